"""What succeeded, as rows that the policy imitates: so that it later acts without what it was shown.

tokens    P0  D0 (expected) I0  A0  E0  A1 ...       D0 drafted, I0 imagined or heard by others, A0 said after that
row       P0                    A0  E0  A1 ...       as if nothing had been shown
weight     0                     1   0   1

In hindsight a failure teaches too: had the agent known what its first call would hear, it would have said at once what
it said after it. The call and its reply are cut out in the same way, and the row ends with the next call of that tool.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from lfo.rollout.samples import deal
from lfo.types import Origin, Rollout, TrainingSample

DRAWN = 1  # names the random numbers of this draw, apart from those of the replay buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class Success:
    """A rollout without what it was shown, up to its last sampled token; `sampled` tells which tokens these are."""

    tokens: tuple[int, ...]
    sampled: tuple[bool, ...]


def without_shown(rollout: Rollout) -> Success:
    """Cut every exchange that never happened in this rollout out of it, the template around it included.

    Such an exchange begins where its action does and ends where the next one's action begins, so the prompt before it
    becomes the prompt of what follows it.
    """
    starts = [turn.action_start for turn in rollout.turns]
    tokens: list[int] = []
    sampled: list[bool] = []
    place = 0
    for turn, end in zip(rollout.turns, [*starts[1:], len(rollout.tokens)], strict=True):
        stop = turn.action_start if turn.predicted else end
        tokens += rollout.tokens[place:stop]
        sampled += [origin == Origin.SAMPLED for origin in rollout.origins[place:stop]]
        place = end
    length = max((index + 1 for index, each in enumerate(sampled) if each), default=0)
    return Success(tokens=tuple(tokens[:length]), sampled=tuple(sampled[:length]))


def in_hindsight(rollout: Rollout, tools: Collection[str] | None) -> Rollout | None:
    """A failed rollout with its first call of such a tool marked as never made, up to its second one; None: all tools.

    None where it succeeded, where what it heard did not change the call, where it did nothing between the two, or where
    the first one was made in one message with others: half of a message cannot be cut out.
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
    # Of a message with several calls, all turns but the first have no tokens of an action.
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
    nothing = [0.0] * len(success.tokens)
    return TrainingSample(
        tokens=success.tokens,
        adapters=adapters,
        logprobs=nothing,
        advantages=nothing,
        policy_weights=nothing,
        world_model_weights=nothing,
        imitation_weights=[float(each) for each in success.sampled],
    )


@dataclass(slots=True)
class SuccessBuffer:
    """The newest success of each task. What is drawn is a function of the buffer and the given seeds."""

    successes: dict[str, Success] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.successes)

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Keep what succeeded by the words of whoever acted; a rollout with a dictated call did not."""
        for rollout in rollouts:
            if rollout.succeeded and not rollout.inquired:
                self._keep(rollout)

    def add_in_hindsight(self, rollouts: Iterable[Rollout], tools: Collection[str] | None) -> None:
        """Keep what failures would have said, for tasks of which no success is known."""
        for rollout in rollouts:
            better = in_hindsight(rollout, tools)
            if better is not None and not rollout.inquired and rollout.task_id not in self.successes:
                self._keep(better)

    def _keep(self, rollout: Rollout) -> None:
        success = without_shown(rollout)
        if success.tokens:
            self.successes[rollout.task_id] = success

    def draw(self, rows: int, mini_batches: int, seeds: Sequence[int]) -> list[list[Success]]:
        """For each mini-batch at most `rows` successes, dealt evenly; all different, so at most one pass over all."""
        kept = list(self.successes.values())
        order = np.random.default_rng([*seeds, DRAWN]).permutation(len(kept))[: rows * mini_batches]
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
