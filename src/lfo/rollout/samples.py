"""From what happened to what is trained: rollouts and replies as rows for a trainer that knows no algorithm."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from safetensors.numpy import load_file, save_file

from lfo.env.interface import Environment
from lfo.errors import DataError
from lfo.objectives.advantages import group_advantages
from lfo.protocol.world_model import WorldModelCodec, WorldModelExample
from lfo.rollout.deliberation import asked_at, imagined
from lfo.rollout.records import read_rollouts
from lfo.rollout.runner import BROKEN_OFF
from lfo.types import Origin, Rollout, RolloutGroup, TrainingSample

MOST_ENCODERS = 4  # threads that turn what was heard into tokens; more of them wait for the interpreter

T = TypeVar("T")


def policy_sample(
    rollout: Rollout,
    advantage: float | None,
    *,
    adapters: tuple[str, ...],
    inline: Collection[str] | None = frozenset(),
) -> TrainingSample | None:
    """A rollout as a row: advantage on every sampled token and, inline, weight on what the tools in `inline` said.

    Advantage None: the policy does not learn from this rollout. An advantage of 0 still counts in the mean over
    tokens, and for the KL and entropy terms. The row ends with its last token of any weight; a rollout without one
    is no row.
    """
    sampled = [float(origin == Origin.SAMPLED and advantage is not None) for origin in rollout.origins]
    observed = [0.0] * len(rollout.tokens)
    for turn in rollout.turns:
        heard = turn.call is not None and not turn.predicted and (inline is None or turn.call.name in inline)
        if heard:
            for place in range(turn.observation_start, turn.observation_end):
                observed[place] = 1.0
    weighted = [place for place in range(len(rollout.tokens)) if sampled[place] or observed[place]]
    if not weighted:
        return None
    end = weighted[-1] + 1
    return TrainingSample(
        tokens=rollout.tokens[:end],
        adapters=adapters,
        logprobs=rollout.logprobs[:end],
        advantages=[(advantage or 0.0) * weight for weight in sampled[:end]],
        policy_weights=sampled[:end],
        world_model_weights=observed[:end],
    )


def is_the_policys(rollout: Rollout) -> bool:
    """Whether the policy is judged by a rollout: not where its environment broke off, a call was dictated, or the base
    acted in its place."""
    return rollout.stop not in BROKEN_OFF and not rollout.inquired and not rollout.untrained


def mark_imagined(group: RolloutGroup) -> RolloutGroup:
    """The group with those real calls marked as asked about that some rollout of it has imagined in the same state.

    Only what stayed in a row: with what was taken back, mostly filled-in calls, one run learned far slower (LOG 26).
    """
    drafted = {question.key for rollout in group.rollouts for question, _ in imagined(rollout)}

    def marked(rollout: Rollout) -> Rollout:
        turns = [
            replace(turn, asked=True)
            if turn.call is not None and not turn.predicted and asked_at(rollout, index).key in drafted
            else turn
            for index, turn in enumerate(rollout.turns)
        ]
        return replace(rollout, turns=tuple(turns))

    return replace(group, rollouts=tuple(map(marked, group.rollouts))) if drafted else group


def policy_rows(
    group: RolloutGroup, *, adapters: tuple[str, ...], inline: Collection[str] | None
) -> list[TrainingSample]:
    """The rows of a group, each with its advantage over its peers."""
    advantages = group_advantages(group.rewards, conditions=group.conditions)
    rows = (
        policy_sample(rollout, advantage, adapters=adapters, inline=inline)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True)
    )
    return [row for row in rows if row is not None]


def inline_rows(
    groups: Sequence[RolloutGroup],
    *,
    without: Collection[int],
    adapters: tuple[str, ...],
    inline: Collection[str] | None,
) -> list[list[TrainingSample]]:
    """For each group the rows of what the policy does not learn from; groups `without`, by index, carry the others."""
    return [
        [
            row
            for rollout in group.rollouts
            if not (index in without and is_the_policys(rollout))
            and (row := policy_sample(rollout, None, adapters=adapters, inline=inline))
        ]
        for index, group in enumerate(groups)
    ]


def deal(parts: Sequence[Sequence[T]], count: int) -> list[list[T]]:
    """Deal whole parts into `count` mini-batches, as evenly as their number allows, in order."""
    dealt: list[list[T]] = [[] for _ in range(count)]
    for index, part in enumerate(parts):
        dealt[index * count // max(len(parts), count)].extend(part)
    return dealt


def examples_of_groups(
    groups: Sequence[RolloutGroup], codec: WorldModelCodec, *, predict: Collection[str] | None, threads: int
) -> list[list[WorldModelExample]]:
    """The distinct world-model examples of each group; `threads` 0 is one for each core."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    with ThreadPoolExecutor(min(MOST_ENCODERS, threads or os.cpu_count() or 1)) as pool:
        examples = pool.map(partial(codec.examples_of, predict=predict), rollouts)
    heard = []
    for group in groups:
        merged = ReplayBuffer()
        for of_rollout in islice(examples, len(group.rollouts)):
            merged.add(of_rollout)
        heard.append(list(merged.examples.values()))
    return heard


def world_model_sample(example: WorldModelExample, *, adapters: tuple[str, ...]) -> TrainingSample:
    nothing = [0.0] * len(example.tokens)
    return TrainingSample(
        tokens=example.tokens,
        adapters=adapters,
        logprobs=nothing,
        advantages=nothing,
        policy_weights=nothing,
        world_model_weights=example.weights,
    )


@dataclass(slots=True)
class ReplayBuffer:
    """Every reply ever heard, once each: the world does not change, so old replies stay true.

    What is drawn for a step is a function of the buffer and the given seeds, so a resumed run draws the same.
    """

    examples: dict[str, WorldModelExample] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.examples)

    def add(self, examples: Iterable[WorldModelExample]) -> int:
        """Keep what is new; answers how much that was. What look-ahead asked about once is marked for good: a rollout
        that was shown the expected reply may make the same call without asking."""
        before = len(self.examples)
        for example in examples:
            if example.asked or example.key not in self.examples:
                self.examples[example.key] = example
        return len(self.examples) - before

    def draw(
        self, count: int, seeds: Sequence[int], *, without: Collection[str] = (), asked_first: bool = False
    ) -> list[WorldModelExample]:
        """At most `count` different examples whose keys are not in `without`, all equally likely.

        With `asked_first`, calls that look-ahead asks about come before all others: the world model practises what
        it will be asked. (Three quarters of them learned half as fast as all of them: docs/LOG.md.)
        """
        keys = [key for key in self.examples if key not in without]
        shuffled = [keys[place] for place in np.random.default_rng(list(seeds)).permutation(len(keys))]
        if asked_first:
            shuffled.sort(key=lambda key: not self.examples[key].asked)
        return [self.examples[key] for key in shuffled[:count]]

    def save(self, path: Path) -> None:
        """Write the whole buffer as flat arrays. Weights are 0 or 1."""
        rows = list(self.examples.values())
        arrays = {
            "lengths": np.array([len(row.tokens) for row in rows], dtype=np.int64),
            "tokens": np.array([token for row in rows for token in row.tokens], dtype=np.int32),
            "weights": np.array([weight for row in rows for weight in row.weights], dtype=np.uint8),
            "asked": np.array([row.asked for row in rows], dtype=np.uint8),
            "keys": np.frombuffer(b"".join(bytes.fromhex(row.key) for row in rows), dtype=np.uint8),
        }
        save_file(arrays, path)

    @classmethod
    def load(cls, path: Path) -> ReplayBuffer:
        arrays = load_file(path)
        buffer = cls()
        ends = np.cumsum(arrays["lengths"])
        size = len(arrays["keys"]) // max(1, len(ends))
        for place, end in enumerate(ends):
            start = end - arrays["lengths"][place]
            key = arrays["keys"][place * size : (place + 1) * size].tobytes().hex()
            tokens = tuple(map(int, arrays["tokens"][start:end]))
            weights = tuple(map(float, arrays["weights"][start:end]))
            buffer.examples[key] = WorldModelExample(
                tokens=tokens, weights=weights, key=key, asked=bool(arrays["asked"][place])
            )
        return buffer


def logged_replies(
    path: str, environment: Environment, codec: WorldModelCodec, *, predict: Collection[str] | None
) -> ReplayBuffer:
    """Everything that was heard in the rollouts of a file."""
    replay = ReplayBuffer()
    for rollout in read_rollouts(path, environment):
        replay.add(codec.examples_of(rollout, predict=predict))
    if not replay:
        raise DataError(f"{path} holds no reply of a tool that world_model.predict names")
    return replay
