"""How sure a world model is of what it expects, and whether that can be believed.

A reply is said in many ways, so the probability of its text is small however much is known. Certainty is therefore the
agreement of meanings: the share of sampled replies that mean what the likeliest one means. It is calibrated where, of
all replies that were expected with a certainty of 70 %, seven in ten come true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lfo.env.interface import Environment
from lfo.evaluation.world_model import same_meaning

BINS = 10


def certainty(environment: Environment, expected: str, sampled: Sequence[str]) -> float | None:
    """The share of sampled replies that mean what the expected one means; None where nobody can tell what it means."""
    agree = [same_meaning(environment, each, expected) for each in sampled]
    return None if not agree or None in agree else fmean(map(bool, agree))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """Predictions of like certainty: `Bin(certainty=0.72, right=0.65, count=20)`"""

    certainty: float  # mean
    right: float  # share of them
    count: int


def reliability(certainties: Sequence[float], right: Sequence[bool], *, bins: int = BINS) -> list[Bin]:
    """The reliability diagram: predictions by certainty, in bins of equal width from 0 to 1, without empty ones."""
    of_bin: dict[int, list[tuple[float, bool]]] = {}
    for sure, came_true in zip(certainties, right, strict=True):
        of_bin.setdefault(min(int(sure * bins), bins - 1), []).append((sure, came_true))
    return [
        Bin(certainty=fmean(sure for sure, _ in some), right=fmean(true for _, true in some), count=len(some))
        for _, some in sorted(of_bin.items())
    ]


def expected_calibration_error(diagram: Sequence[Bin]) -> float:
    """How far certainty and truth lie apart in a bin, mean over all predictions."""
    total = sum(each.count for each in diagram)
    return sum(each.count * abs(each.certainty - each.right) for each in diagram) / total
