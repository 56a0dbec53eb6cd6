"""How sure a world model is of what it expects: whether the replies that it samples mean the same.

A reply is said in many ways, so the probability of its text is small however much is known. Certainty is therefore the
agreement of meanings: the share of sampled replies that mean what the likeliest one means. Whether it can be believed
is measured in `evaluation/certainty.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Protocol

import numpy as np

from lfo.env.interface import Environment, same_meaning

SAMPLES = 8  # replies by whose agreement certainty is measured
ROWS = 64  # sampled at a time: what `lfo plan` counts for the world model


class Complete(Protocol):
    """What the world model says behind each prompt: greedily, or drawn at temperature 1 by numbers for each."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], uniforms: Sequence[Sequence[float]] | None = None
    ) -> Sequence[Sequence[int]]: ...


def sampled_replies(complete: Complete, prompts: Sequence[Sequence[int]], *, limit: int) -> list[list[Sequence[int]]]:
    """`SAMPLES` replies to each prompt, of at most `limit` tokens.

    The random numbers are named by the prompt: with our own sampler, what is sampled depends on it and the weights
    alone, not on what else is asked. vLLM draws by itself.
    """
    replies: list[list[Sequence[int]]] = []
    for start in range(0, len(prompts), ROWS // SAMPLES):
        part = prompts[start : start + ROWS // SAMPLES]
        repeated = [prompt for prompt in part for _ in range(SAMPLES)]
        said = complete(repeated, [row for prompt in part for row in _uniforms(prompt, limit)])
        replies += [list(said[first : first + SAMPLES]) for first in range(0, len(said), SAMPLES)]
    return replies


def _uniforms(prompt: Sequence[int], limit: int) -> Sequence[Sequence[float]]:
    name = zlib.crc32(np.asarray(prompt, dtype=np.int64).tobytes())
    return list(np.random.default_rng(name).random((SAMPLES, limit)))


def certainty(environment: Environment, expected: str, sampled: Iterable[str]) -> float | None:
    """The share of sampled replies that mean what the expected one means; None where nobody can tell what it means."""
    agree = [same_meaning(environment, each, expected) for each in sampled]
    return None if not agree or None in agree else fmean(map(bool, agree))
