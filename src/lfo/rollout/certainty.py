"""How certain a world model is of a predicted reply: the share of sampled replies with the same meaning.

The same content can be worded in many ways, so the probability of one text is small even if the world model knows the
content. Certainty therefore compares meanings: it is the share of sampled replies that mean the same as the greedy
one. `evaluation/certainty.py` measures how well it is calibrated.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Protocol

import numpy as np

from lfo.env.interface import Environment, same_meaning

SAMPLES = 8  # sampled replies for each certainty
ROWS = 64  # replies sampled in one batch; `lfo plan` assumes this number


class Complete(Protocol):
    """Returns what the world model writes after each prompt: greedy, or sampled at temperature 1 with `uniforms`."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], uniforms: Sequence[Sequence[float]] | None = None
    ) -> Sequence[Sequence[int]]: ...


def sampled_replies(complete: Complete, prompts: Sequence[Sequence[int]], *, limit: int) -> list[list[Sequence[int]]]:
    """Return `SAMPLES` replies to each prompt, of at most `limit` tokens.

    The prompt seeds the random numbers: with our own sampler, the samples depend only on the prompt and the weights,
    not on the rest of the batch. vLLM uses its own random numbers.
    """
    replies: list[list[Sequence[int]]] = []
    for start in range(0, len(prompts), ROWS // SAMPLES):
        part = prompts[start : start + ROWS // SAMPLES]
        repeated = [prompt for prompt in part for _ in range(SAMPLES)]
        sampled = complete(repeated, [row for prompt in part for row in _uniforms(prompt, limit)])
        replies += [list(sampled[first : first + SAMPLES]) for first in range(0, len(sampled), SAMPLES)]
    return replies


def _uniforms(prompt: Sequence[int], limit: int) -> Sequence[Sequence[float]]:
    seed = zlib.crc32(np.asarray(prompt, dtype=np.int64).tobytes())
    return list(np.random.default_rng(seed).random((SAMPLES, limit)))


def certainty(environment: Environment, predicted: str, sampled: Iterable[str]) -> float | None:
    """Return the share of sampled replies with the meaning of `predicted`; None if the environment cannot tell."""
    agree = [same_meaning(environment, each, predicted) for each in sampled]
    return None if not agree or None in agree else fmean(map(bool, agree))
