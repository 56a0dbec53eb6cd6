"""Does what decides stand in the prompt? Measure whether replies to decisive calls follow from what stands before.

    foretelling(rollouts, may_imagine) -> {"tool": "serve", "foretold": False, "p": 0.4, ...}

For each first decisive call of a rollout, the call of another task with the most similar situation is found. If its
reply is no more similar than that of a task drawn by chance, then no model can learn the reply from these prompts:
something must be looked up first, or the reply follows no rule, or these tasks are too few to tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lfo.play.reply_store import Similarity, StoredReply, columns_of, occurrences, situation_of, terms_of
from lfo.protocol.world_model import ObservedCall, observed_calls
from lfo.types import Rollout

FEWEST = 12  # calls; below, nothing is said
SHUFFLES = 199
CHANCE = 0.05
AT_MOST = 256  # calls: a figure needs no more, and every shuffle compares all pairs


def foretelling(rollouts: Sequence[Rollout], may_imagine: Callable[[str], bool]) -> dict[str, Any] | None:
    """Return how well replies follow from situations, for the decisive tool called most; None: too few calls."""
    first = [(rollout.task_id, found) for rollout in rollouts if (found := _first_call(rollout, may_imagine))]
    counts = Counter(call.call.name for _, call in first)
    if not counts or counts.most_common(1)[0][1] < FEWEST:
        return None
    tool = counts.most_common(1)[0][0]
    chosen = [(task, call) for task, call in first if call.call.name == tool][:AT_MOST]
    tasks, calls = [task for task, _ in chosen], [call for _, call in chosen]
    stored = [StoredReply(situation=situation_of(call.state, call.call), reply=call.reply) for call in calls]
    alike, real, shuffled = _alike(stored), 0.0, []
    others = _other_tasks(tasks)
    if not others.any(axis=1).all():
        return None
    generator = np.random.default_rng(0)
    real = _similarity_of_nearest(stored, alike, others)
    for order in (generator.permutation(len(stored)) for _ in range(SHUFFLES)):
        mixed = [
            StoredReply(situation=each.situation, reply=stored[to].reply)
            for each, to in zip(stored, order, strict=True)
        ]
        shuffled.append(_similarity_of_nearest(mixed, alike[np.ix_(order, order)], others))
    p = (1 + sum(each >= real - 1e-12 for each in shuffled)) / (1 + SHUFFLES)
    return {
        "tool": tool,
        "calls": len(calls),
        "after_others": sum(bool(call.state.actions) for call in calls) / len(calls),
        "similarity": real,
        "by_chance": float(np.mean(shuffled)),
        "p": p,
        "foretold": p < CHANCE,
    }


def _first_call(rollout: Rollout, may_imagine: Callable[[str], bool]) -> ObservedCall | None:
    return next((call for call in observed_calls(rollout) if may_imagine(call.call.name)), None)


def _other_tasks(tasks: Sequence[str]) -> np.ndarray:
    """Return an array `[call, call]`: whether two calls belong to different tasks."""
    numbers = np.unique(np.array(tasks), return_inverse=True)[1]
    return numbers[:, None] != numbers[None, :]


def _alike(stored: Sequence[StoredReply]) -> np.ndarray:
    """Return the similarity of each two replies: the cosine of their words, rare ones weighted most."""
    bags = [terms_of([each.reply]) for each in stored]
    found = occurrences(bags, columns_of(bags)).toarray()
    weighted = found * np.log(len(stored) / np.maximum(found.sum(axis=0), 1))
    lengths = np.linalg.norm(weighted, axis=1)
    weighted /= np.where(lengths > 0, lengths, 1)[:, None]
    return weighted @ weighted.T


def _similarity_of_nearest(stored: Sequence[StoredReply], alike: np.ndarray, others: np.ndarray) -> float:
    """Return how similar the reply in the most similar situation of another task is, on average."""
    similarity = Similarity(stored)([each.situation for each in stored])
    nearest = np.argmax(np.where(others, similarity, -np.inf), axis=1)
    return float(alike[np.arange(len(stored)), nearest].mean())
