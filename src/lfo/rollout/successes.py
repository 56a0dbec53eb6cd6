"""Successful rollouts as rows to imitate, without the exchanges that were only shown, so that the policy learns to act
without them.

tokens    P0  D0 (expected) I0  A0  E0  A1 ...       D0: draft, I0: predicted reply or feedback, A0: the action after it
row       P0                    A0  E0  A1 ...       as if nothing had been shown
weight     0                     1   0   1

A failed rollout can also be used in hindsight: if the agent had known the reply to its first call, it would have done
at once what it did after it. That call and its reply are cut out in the same way, and the row ends with the next call
of the same tools.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from lfo.rollout.samples import deal, supervised_sample
from lfo.types import Origin, Rollout, TrainingSample

DRAW_STREAM = 1_000_001  # part of the seed; the replay buffer has the index of a mini-batch in its place


@dataclass(frozen=True, kw_only=True, slots=True)
class Success:
    """A rollout without shown exchanges, up to its last sampled token; `sampled` marks the sampled tokens."""

    tokens: tuple[int, ...]
    sampled: tuple[bool, ...]


def without_shown(rollout: Rollout) -> Success:
    """Remove every exchange that did not happen in this rollout, with the template around it.

    Such an exchange starts at its action and ends at the next action, so the prompt before it becomes the prompt of the
    next action.
    """
    starts = [turn.action_start for turn in rollout.turns]
    tokens: list[int] = []
    sampled: list[bool] = []
    start = 0
    for turn, end in zip(rollout.turns, [*starts[1:], len(rollout.tokens)], strict=True):
        stop = turn.action_start if turn.predicted else end
        tokens += rollout.tokens[start:stop]
        sampled += [origin == Origin.SAMPLED for origin in rollout.origins[start:stop]]
        start = end
    length = max((index + 1 for index, each in enumerate(sampled) if each), default=0)
    return Success(tokens=tuple(tokens[:length]), sampled=tuple(sampled[:length]))


def in_hindsight(rollout: Rollout, tools: Collection[str] | None) -> Rollout | None:
    """Return a failed rollout up to its second call of `tools` (None: all), with the first call marked as not made.

    Return None if it succeeded, if both calls are equal, if it did nothing between them, or if the first call shares
    its message with others: half of a message cannot be removed.
    """
    calls = [
        index
        for index, turn in enumerate(rollout.turns)
        if turn.call is not None and not turn.predicted and (tools is None or turn.call.name in tools)
    ]
    if rollout.succeeded or len(calls) < 2:
        return None
    first, second = calls[:2]
    turns, tokens = list(rollout.turns), len(rollout.tokens)
    between = [turn for turn in turns[first + 1 : second] if not turn.predicted]
    # In a message with several calls, only the first turn has action tokens.
    alone = all(turn.action_start < turn.action_end for turn in turns[first : first + 2])
    if turns[first].call == turns[second].call or not between or not alone:
        return None
    end = turns[second + 1].action_start if second + 1 < len(turns) else tokens
    turns[first] = replace(turns[first], predicted=True)
    return replace(
        rollout,
        turns=tuple(turns[: second + 1]),
        tokens=rollout.tokens[:end],
        origins=rollout.origins[:end],
        logprobs=rollout.logprobs[:end],
    )


def imitation_sample(success: Success, *, adapters: tuple[str, ...]) -> TrainingSample:
    return supervised_sample(
        success.tokens, adapters=adapters, imitation_weights=[float(each) for each in success.sampled]
    )


@dataclass(slots=True)
class SuccessBuffer:
    """The newest success of each task. A draw depends only on the buffer and the seeds."""

    successes: dict[str, Success] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.successes)

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Store successful rollouts, except those in which a call was made for the policy."""
        for rollout in rollouts:
            if rollout.succeeded:
                self._keep(rollout)

    def add_in_hindsight(self, rollouts: Iterable[Rollout], tools: Collection[str] | None) -> None:
        """Store failed rollouts in hindsight, for tasks without a stored success."""
        for rollout in rollouts:
            better = in_hindsight(rollout, tools)
            if better is not None and rollout.task_id not in self.successes:
                self._keep(better)

    def _keep(self, rollout: Rollout) -> None:
        success = without_shown(rollout)
        if success.tokens:
            self.successes[rollout.task_id] = success

    def draw(self, rows: int, mini_batches: int, seeds: Sequence[int]) -> list[list[Success]]:
        """Return at most `rows` successes for each mini-batch, evenly distributed; no success occurs twice."""
        kept = list(self.successes.values())
        order = np.random.default_rng([*seeds, DRAW_STREAM]).permutation(len(kept))[: rows * mini_batches]
        return deal([[kept[index]] for index in order], mini_batches)

    def save(self, path: Path) -> None:
        """Write the whole buffer as flat arrays."""
        rows, names = list(self.successes.values()), [task.encode() for task in self.successes]
        arrays = {
            "lengths": np.array([len(row.tokens) for row in rows], dtype=np.int64),
            "tokens": np.array([token for row in rows for token in row.tokens], dtype=np.int32),
            "sampled": np.array([each for row in rows for each in row.sampled], dtype=np.uint8),
            "name_lengths": np.array([len(name) for name in names], dtype=np.int64),
            "names": np.frombuffer(b"".join(names), dtype=np.uint8),
        }
        save_file(arrays, path)

    @classmethod
    def load(cls, path: Path) -> SuccessBuffer:
        arrays = load_file(path)
        names = _split(arrays["names"], arrays["name_lengths"])
        tokens = _split(arrays["tokens"], arrays["lengths"])
        sampled = _split(arrays["sampled"], arrays["lengths"])
        return cls(
            {
                name.tobytes().decode(): Success(tokens=tuple(map(int, row)), sampled=tuple(map(bool, where)))
                for name, row, where in zip(names, tokens, sampled, strict=True)
            }
        )


def _split(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
