"""Turn rollouts and replies into training rows; the replay buffer of replies."""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Iterable, Sequence
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
from lfo.rollout.runner import ENVIRONMENT_FAILURES
from lfo.types import Origin, Rollout, RolloutGroup, TrainingSample, Turn

MOST_ENCODERS = 4  # threads that tokenise replies; more would wait for the interpreter lock

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """How much the tokens of each observation count for a world model that learns on the rows of the policy.

    Every observation that this rollout received has one of three sources. What it did not receive counts nothing.
    """

    tools: Collection[str] | None = frozenset()  # replies to calls of these tools count 1 (None: of all)
    user_turns: float = 0.0  # answers to messages that call no tool
    other: float = 0.0  # replies to other calls, and to those that cannot be parsed

    def weight(self, turn: Turn) -> float:
        if turn.predicted:
            return 0.0
        if turn.call is None:
            return self.other if "<tool_call>" in turn.action else self.user_turns
        return 1.0 if self.tools is None or turn.call.name in self.tools else self.other


NOTHING = Observed()


def policy_sample(
    rollout: Rollout,
    advantage: float | None,
    *,
    adapters: tuple[str, ...],
    observed: Observed = NOTHING,
) -> TrainingSample | None:
    """Return a rollout as a row: the advantage on sampled tokens, world-model weights on what is `observed`.

    `advantage=None`: the policy does not learn from this rollout. An advantage of 0 still counts in the mean over
    tokens. The row ends with the last token that has a weight; None if there is none.
    """
    sampled = [float(origin == Origin.SAMPLED and advantage is not None) for origin in rollout.origins]
    learned = [0.0] * len(rollout.tokens)
    for turn in rollout.turns:
        for index in range(turn.observation_start, turn.observation_end):
            learned[index] = observed.weight(turn)
    weighted = [index for index in range(len(rollout.tokens)) if sampled[index] or learned[index]]
    if not weighted:
        return None
    end = weighted[-1] + 1
    return TrainingSample(
        tokens=rollout.tokens[:end],
        adapters=adapters,
        logprobs=rollout.logprobs[:end],
        advantages=[(advantage or 0.0) * weight for weight in sampled[:end]],
        policy_weights=sampled[:end],
        world_model_weights=learned[:end],
    )


def acted_by_policy(rollout: Rollout) -> bool:
    """Whether the policy alone acted: the environment did not fail, and the base did not act instead of it."""
    return rollout.stop not in ENVIRONMENT_FAILURES and not rollout.untrained


def mark_imagined(group: RolloutGroup) -> RolloutGroup:
    """Mark real calls as `asked` if some rollout of the group has imagined the same call in the same state.

    Only imagined calls that stayed in a row count. With those that were taken back, mostly filled-in calls, one run
    learned far slower (LOG 26).
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


def mark_first_calls(group: RolloutGroup, tools: Container[str] | None) -> RolloutGroup:
    """Mark the first real call of `tools` (None: all) in each rollout as `asked`, if no call of the group is.

    A memory learns from asked calls only. Without this it could stay empty: it predicts nothing at first, so nothing
    imagined is kept, and in a small group no two rollouts may make the same call.
    """
    if any(turn.asked for rollout in group.rollouts for turn in rollout.turns):
        return group

    def marked(rollout: Rollout) -> Rollout:
        for index, turn in enumerate(rollout.turns):
            if turn.imagined:
                break  # what follows was said because of it
            if turn.call is not None and not turn.predicted and (tools is None or turn.call.name in tools):
                turns = (*rollout.turns[:index], replace(turn, asked=True), *rollout.turns[index + 1 :])
                return replace(rollout, turns=turns)
        return rollout

    return replace(group, rollouts=tuple(map(marked, group.rollouts)))


def policy_rows(
    group: RolloutGroup, *, adapters: tuple[str, ...], observed: Observed = NOTHING
) -> list[TrainingSample]:
    """Return the rows of a group, each with its group-relative advantage."""
    advantages = group_advantages(group.rewards, conditions=group.conditions)
    if group.bonuses:
        advantages = [advantage + bonus for advantage, bonus in zip(advantages, group.bonuses, strict=True)]
    rows = (
        policy_sample(rollout, advantage, adapters=adapters, observed=observed)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True)
    )
    return [row for row in rows if row is not None]


def inline_rows(
    groups: Sequence[RolloutGroup],
    *,
    without: Collection[int],
    adapters: tuple[str, ...],
    observed: Observed,
) -> list[list[TrainingSample]]:
    """Return, for each group, inline world-model rows of the rollouts that give no policy row.

    `without`: indices of groups whose own rollouts already give policy rows.
    """
    return [
        [
            row
            for rollout in group.rollouts
            if not (index in without and acted_by_policy(rollout))
            and (row := policy_sample(rollout, None, adapters=adapters, observed=observed))
        ]
        for index, group in enumerate(groups)
    ]


def deal(parts: Sequence[Sequence[T]], count: int) -> list[list[T]]:
    """Distribute whole parts to `count` mini-batches, in order and as evenly as possible."""
    dealt: list[list[T]] = [[] for _ in range(count)]
    for index, part in enumerate(parts):
        dealt[index * count // max(len(parts), count)].extend(part)
    return dealt


def examples_of_groups(
    groups: Sequence[RolloutGroup], codec: WorldModelCodec, *, predict: Collection[str] | None
) -> list[list[WorldModelExample]]:
    """Return the distinct world-model examples of each group."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    with ThreadPoolExecutor(min(MOST_ENCODERS, os.cpu_count() or 1)) as pool:
        examples = pool.map(partial(codec.examples_of, predict=predict), rollouts)
    by_group = []
    for group in groups:
        merged = ReplayBuffer()
        for of_rollout in islice(examples, len(group.rollouts)):
            merged.add(of_rollout)
        by_group.append(list(merged.examples.values()))
    return by_group


def supervised_sample(
    tokens: Sequence[int],
    *,
    adapters: tuple[str, ...],
    world_model_weights: Sequence[float] = (),
    imitation_weights: Sequence[float] = (),
) -> TrainingSample:
    """Return a row without a policy loss; `()` means that the row has no such loss."""
    zeros = [0.0] * len(tokens)
    return TrainingSample(
        tokens=tokens,
        adapters=adapters,
        logprobs=zeros,
        advantages=zeros,
        policy_weights=zeros,
        world_model_weights=world_model_weights or zeros,
        imitation_weights=imitation_weights,
    )


def world_model_sample(example: WorldModelExample, *, adapters: tuple[str, ...]) -> TrainingSample:
    return supervised_sample(example.tokens, adapters=adapters, world_model_weights=example.token_weights)


@dataclass(slots=True)
class ReplayBuffer:
    """Every distinct reply received so far. Environments are stationary, so old replies stay true.

    A draw depends only on the buffer and the seeds, so a resumed run draws the same examples.
    """

    examples: dict[str, WorldModelExample] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.examples)

    def add(self, examples: Iterable[WorldModelExample]) -> int:
        """Add new examples and return their number. `asked` is never unset: a rollout that saw the predicted reply may
        make the same call later without asking."""
        before = len(self.examples)
        for example in examples:
            if example.asked or example.key not in self.examples:
                self.examples[example.key] = example
        return len(self.examples) - before

    def draw(self, count: int, seeds: Sequence[int], *, asked_first: bool = False) -> list[WorldModelExample]:
        """Return at most `count` different examples, all with the same probability.

        With `asked_first`, calls that look-ahead asks about come before all others, because the world model will be
        asked about these. (With three quarters of such calls it learned half as fast: research/LOG.md.)
        """
        keys = list(self.examples)
        shuffled = [keys[index] for index in np.random.default_rng(list(seeds)).permutation(len(keys))]
        if asked_first:
            shuffled.sort(key=lambda key: not self.examples[key].asked)
        return [self.examples[key] for key in shuffled[:count]]

    def save(self, path: Path) -> None:
        """Write the buffer as flat arrays. Token weights are 0 or 1."""
        rows = list(self.examples.values())
        arrays = {
            "lengths": np.array([len(row.tokens) for row in rows], dtype=np.int64),
            "tokens": np.array([token for row in rows for token in row.tokens], dtype=np.int32),
            "weights": np.array([weight for row in rows for weight in row.token_weights], dtype=np.uint8),
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
        for index, end in enumerate(ends):
            start = end - arrays["lengths"][index]
            key = arrays["keys"][index * size : (index + 1) * size].tobytes().hex()
            tokens = tuple(map(int, arrays["tokens"][start:end]))
            weights = tuple(map(float, arrays["weights"][start:end]))
            buffer.examples[key] = WorldModelExample(
                tokens=tokens, token_weights=weights, key=key, asked=bool(arrays["asked"][index])
            )
        return buffer


def logged_replies(
    path: str, environment: Environment, codec: WorldModelCodec, *, predict: Collection[str] | None
) -> ReplayBuffer:
    """Return the replies in the rollouts of a file."""
    replay = ReplayBuffer()
    for rollout in read_rollouts(path, environment):
        replay.add(codec.examples_of(rollout, predict=predict))
    if not replay:
        raise DataError(
            f"{path} contains no reply of a tool that world_model.predict names; choose other logs or tools"
        )
    return replay
