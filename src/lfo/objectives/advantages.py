"""Advantages from the rewards of a group, as in DAPO; dynamic sampling; reward shaping.

Not here: `lfo.rows` decides which tokens get an advantage, and `lfo.train.loop` how many more groups to roll out if
dynamic sampling keeps too few.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from lfo.types import Rollout, RolloutGroup


def group_advantages(
    rewards: Sequence[float],
    *,
    conditions: Sequence[Hashable] | None = None,
    eps: float = 1e-6,
) -> tuple[float, ...]:
    """Return the advantage of each rollout over its peers: (reward - mean) / (std + eps).

    The peers are the whole group, or the rollouts with the same entry in `conditions`: a rollout that was shown more
    than others must not get an advantage for it. The standard deviation is the population's, so a group of which
    half succeed gives +1 and -1, whatever its size. (verl's is the unbiased one, with which advantages of n peers are
    smaller by sqrt((n - 1) / n): 0.71 for two.)

    >>> [round(advantage, 3) for advantage in group_advantages((1.0, 0.0, 0.0, 0.0))]
    [1.732, -0.577, -0.577, -0.577]
    >>> [round(advantage, 3) for advantage in group_advantages((1.0, 1.0, 1.0, 0.0), conditions="aabb")]
    [0.0, 0.0, 1.0, -1.0]
    """
    advantages = [0.0] * len(rewards)
    for indices in _peers(rewards, conditions):
        among = [rewards[index] for index in indices]
        if not is_informative(among):  # also keeps 1 / eps from amplifying rounding errors of the mean
            continue
        mean = fmean(among)
        std = math.sqrt(fmean((reward - mean) ** 2 for reward in among))
        for index in indices:
            advantages[index] = (rewards[index] - mean) / (std + eps)
    return tuple(advantages)


def is_informative(rewards: Sequence[float], conditions: Sequence[Hashable] | None = None) -> bool:
    """Whether the policy can learn from a group: some rollouts with the same condition differ in reward."""
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"all rewards must be finite numbers, not {tuple(rewards)}")
    return any(len({rewards[index] for index in indices}) > 1 for indices in _peers(rewards, conditions))


def _peers(rewards: Sequence[float], conditions: Sequence[Hashable] | None) -> list[list[int]]:
    """Return the indices of the rollouts with each condition."""
    indices: dict[Hashable, list[int]] = defaultdict(list)
    for index, condition in zip(range(len(rewards)), conditions or [None] * len(rewards), strict=True):
        indices[condition].append(index)
    return list(indices.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSamplingReport:
    """The result of dynamic sampling on a batch of groups; reports can be added."""

    kept: int
    all_failed: int
    all_succeeded: int

    @property
    def seen(self) -> int:
        """Tasks seen: every task that was rolled out, including dropped ones."""
        return self.kept + self.all_failed + self.all_succeeded

    def __add__(self, other: DynamicSamplingReport) -> DynamicSamplingReport:
        return DynamicSamplingReport(
            kept=self.kept + other.kept,
            all_failed=self.all_failed + other.all_failed,
            all_succeeded=self.all_succeeded + other.all_succeeded,
        )


class Collected(NamedTuple):
    """The rollouts of a step."""

    groups: Sequence[RolloutGroup]  # all groups of the step
    kept: Mapping[int, RolloutGroup]  # groups that train the policy, by index in `groups`, with shaped rewards
    report: DynamicSamplingReport

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]


def select_groups(
    groups: Sequence[RolloutGroup], *, success_reward: float = 1.0
) -> tuple[tuple[RolloutGroup, ...], DynamicSamplingReport]:
    """Return the groups that the policy can learn from, in order, and a report on all groups.

    Their rewards must not be shaped: a group that fails in different lengths would be kept for its lengths alone.
    Groups are dropped for the policy only: their replies still train the world model. A dropped group counts as
    succeeded if one of its rewards reaches `success_reward` (then all with that condition do), else as failed.
    """
    informative = [is_informative(group.rewards, group.conditions) or any(group.bonuses) for group in groups]
    kept = tuple(group for group, teaches in zip(groups, informative, strict=True) if teaches)
    dropped = [group for group, teaches in zip(groups, informative, strict=True) if not teaches]
    all_succeeded = sum(max(group.rewards, default=-math.inf) >= success_reward for group in dropped)
    report = DynamicSamplingReport(kept=len(kept), all_failed=len(dropped) - all_succeeded, all_succeeded=all_succeeded)
    return kept, report


def overlong_penalty(length: int, *, limit: int, buffer: int) -> float:
    """Return DAPO's soft overlong punishment, which is added to the reward of a rollout with `length` tokens.

        length    0 ........ limit - buffer ........ limit ........
        penalty   0              0      falls linearly   -1     -1

    >>> overlong_penalty(90, limit=100, buffer=20)
    -0.5
    """
    if not 0 <= buffer <= limit:
        raise ValueError(f"the overlong buffer must be between 0 and the limit {limit}, not {buffer}")
    excess = length - (limit - buffer)
    if excess <= 0:
        return 0.0
    return -min(1.0, excess / buffer) if buffer else -1.0


def surprise_bonus(
    losses: Sequence[float], scale: float, *, conditions: Sequence[Hashable] | None = None
) -> tuple[float, ...]:
    """Return what is added to the advantage of each rollout: `scale` times its world-model loss, normalised as rewards.

    The loss is relative to its peers, so a task whose replies are hard to predict gives no bonus by itself, and the
    bonus does not vanish as the world model improves. A rollout without replies has a loss of 0.
    """
    return tuple(scale * surprise for surprise in group_advantages(losses, conditions=conditions))


def with_overlong_penalty(group: RolloutGroup, *, limit: int, buffer: int) -> RolloutGroup:
    """Return the group with DAPO's overlong penalty added to its rewards.

    Rollouts whose peers all have the same reward get none: lengths alone would give them advantages of full size.
    """
    rollouts = list(group.rollouts)
    for indices in _peers(group.rewards, group.conditions):
        if is_informative([group.rewards[index] for index in indices]):
            for index in indices:
                penalty = overlong_penalty(len(rollouts[index].tokens), limit=limit, buffer=buffer)
                rollouts[index] = replace(rollouts[index], reward=rollouts[index].reward + penalty)
    return replace(group, rollouts=tuple(rollouts))
