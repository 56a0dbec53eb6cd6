"""The calibration of the world model's certainty (`rollout/certainty.py`).

It is calibrated if seven in ten predictions with a certainty of 70 % are right. The reliability diagram has bins of
predictions of similar certainty. The expected calibration error is the mean difference between certainty and accuracy
of the bins, over all predictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import fmean
from typing import Any

BINS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """Predictions of similar certainty: `Bin(certainty=0.72, right=0.65, count=20)`"""

    certainty: float  # mean
    right: float  # share of right predictions
    count: int


def reliability(certainties: Sequence[float], right: Sequence[bool]) -> list[Bin]:
    """Return the reliability diagram: bins of equal width from 0 to 1, without empty ones."""
    of_bin: dict[int, list[tuple[float, bool]]] = {}
    for certainty, is_right in zip(certainties, right, strict=True):
        of_bin.setdefault(_bin_index(certainty), []).append((certainty, is_right))
    return [
        Bin(certainty=fmean(sure for sure, _ in some), right=fmean(true for _, true in some), count=len(some))
        for _, some in sorted(of_bin.items())
    ]


def expected_calibration_error(diagram: Sequence[Bin]) -> float:
    """Return the mean difference of certainty and accuracy in a bin, over all predictions."""
    total = sum(each.count for each in diagram)
    return sum(each.count * abs(each.certainty - each.right) for each in diagram) / total


def together(diagrams: Iterable[Iterable[Bin]]) -> list[Bin]:
    """Merge several diagrams.

    >>> together([[Bin(certainty=0.5, right=1.0, count=1)], [Bin(certainty=0.5, right=0.0, count=3)]])
    [Bin(certainty=0.5, right=0.25, count=4)]
    """
    of_bin: dict[int, list[Bin]] = {}
    for each in chain.from_iterable(diagrams):
        of_bin.setdefault(_bin_index(each.certainty), []).append(each)
    return [_merged(some) for _, some in sorted(of_bin.items())]


def _bin_index(certainty: float) -> int:
    return min(int(certainty * BINS), BINS - 1)


def _merged(some: Sequence[Bin]) -> Bin:
    count = sum(each.count for each in some)
    return Bin(
        certainty=sum(each.certainty * each.count for each in some) / count,
        right=sum(each.right * each.count for each in some) / count,
        count=count,
    )


def calibration_metrics(certainties: Sequence[float | None], right: Sequence[bool | None]) -> dict[str, Any]:
    """Return diagram and error of the predictions with known certainty and truth; nothing if there are none."""
    known = [
        (sure, true) for sure, true in zip(certainties, right, strict=True) if sure is not None and true is not None
    ]
    if not known:
        return {}
    diagram = reliability([sure for sure, _ in known], [true for _, true in known])
    return {"calibration_error": expected_calibration_error(diagram), "reliability": [asdict(each) for each in diagram]}
