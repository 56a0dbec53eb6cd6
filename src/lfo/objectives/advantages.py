"""From the rewards of a group to advantages, as in DAPO; what is dropped on the way; reward shaping.

Not here: which tokens an advantage is given to (`lfo.rollout` fills the streams) and how many more groups to
roll out when too few are kept (the engine's decision, with its cap).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lfo.types import RolloutGroup


def group_advantages(
    rewards: Sequence[float],
    *,
    conditions: Sequence[Hashable] | None = None,
    eps: float = 1e-6,
) -> tuple[float, ...]:
    """How much better each rollout did than its peers: (reward - mean) / (std + eps).

    Peers are the whole group, or those under the same of the `conditions`: what a rollout was shown and others were
    not is no merit of its actions, and must not be taken for one.
    The standard deviation is the population's, so a group that is half right gives exactly +1 and -1,
    whatever its size.

    >>> [round(advantage, 3) for advantage in group_advantages((1.0, 0.0, 0.0, 0.0))]
    [1.732, -0.577, -0.577, -0.577]
    >>> [round(advantage, 3) for advantage in group_advantages((1.0, 1.0, 1.0, 0.0), conditions="aabb")]
    [0.0, 0.0, 1.0, -1.0]
    """
    advantages = [0.0] * len(rewards)
    for places in _peers(rewards, conditions):
        among = [rewards[place] for place in places]
        if not is_informative(among):  # also keeps rounding errors of the mean from being blown up by 1 / eps
            continue
        mean = fmean(among)
        std = math.sqrt(fmean((reward - mean) ** 2 for reward in among))
        for place in places:
            advantages[place] = (rewards[place] - mean) / (std + eps)
    return tuple(advantages)


def is_informative(rewards: Sequence[float], conditions: Sequence[Hashable] | None = None) -> bool:
    """Whether a group can teach the policy anything: some rollouts under one condition differ in reward."""
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"a reward is not a finite number: {tuple(rewards)}")
    return any(len({rewards[place] for place in places}) > 1 for places in _peers(rewards, conditions))


def _peers(rewards: Sequence[float], conditions: Sequence[Hashable] | None) -> list[list[int]]:
    """The places of the rollouts under each condition."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, condition in zip(range(len(rewards)), conditions or [None] * len(rewards), strict=True):
        places[condition].append(place)
    return list(places.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSamplingReport:
    """What dynamic sampling did to a batch of groups; reports of several batches add up."""

    kept: int
    all_failed: int
    all_succeeded: int

    @property
    def seen(self) -> int:
        """Tasks seen: every task that was rolled out, those dropped included."""
        return self.kept + self.all_failed + self.all_succeeded

    def __add__(self, other: DynamicSamplingReport) -> DynamicSamplingReport:
        return DynamicSamplingReport(
            kept=self.kept + other.kept,
            all_failed=self.all_failed + other.all_failed,
            all_succeeded=self.all_succeeded + other.all_succeeded,
        )


def select_groups(
    groups: Sequence[RolloutGroup], *, success_reward: float = 1.0
) -> tuple[tuple[RolloutGroup, ...], DynamicSamplingReport]:
    """The groups that the policy can learn from, in their order, and a report of the others.

    Dropped for the policy only: what the environment said in a dropped group still feeds the world model.
    A dropped group has succeeded if any of its rewards reaches `success_reward` - all that saw as much did - and
    failed otherwise.
    """
    informative = [is_informative(group.rewards, group.conditions) for group in groups]
    kept = tuple(group for group, teaches in zip(groups, informative, strict=True) if teaches)
    dropped = [group for group, teaches in zip(groups, informative, strict=True) if not teaches]
    all_succeeded = sum(max(group.rewards, default=-math.inf) >= success_reward for group in dropped)
    report = DynamicSamplingReport(kept=len(kept), all_failed=len(dropped) - all_succeeded, all_succeeded=all_succeeded)
    return kept, report


def overlong_penalty(length: int, *, limit: int, buffer: int) -> float:
    """DAPO's soft overlong punishment, added to the reward of a rollout with `length` tokens.

        length    0 ........ limit - buffer ........ limit ........
        penalty   0              0      falls linearly   -1     -1

    >>> overlong_penalty(90, limit=100, buffer=20)
    -0.5
    """
    if not 0 <= buffer <= limit:
        raise ValueError(f"the overlong buffer must lie between 0 and the limit of {limit}, not be {buffer}")
    excess = length - (limit - buffer)
    if excess <= 0:
        return 0.0
    return -min(1.0, excess / buffer) if buffer else -1.0


def surprise_bonus(losses: Sequence[float], scale: float) -> tuple[float, ...]:
    """Intrinsic reward from prediction error: `scale` x the group-normalised world-model loss of each rollout.

    Relative to the group, so that a task whose replies are hard to predict for everyone pays nobody, and the
    bonus does not fade as the world model gets better. A rollout that heard nothing has a loss of 0.
    """
    return tuple(scale * surprise for surprise in group_advantages(losses))


def shaped_group(
    group: RolloutGroup, *, limit: int, overlong_buffer: int = 0, bonus: Sequence[float] = ()
) -> RolloutGroup:
    """The group with what shaping adds to each reward: the overlong penalty, where there is a buffer, and `bonus`."""
    rollouts = []
    for place, rollout in enumerate(group.rollouts):
        reward = rollout.reward
        if overlong_buffer:
            reward += overlong_penalty(len(rollout.tokens), limit=limit, buffer=overlong_buffer)
        if bonus:
            reward += bonus[place]
        rollouts.append(replace(rollout, reward=reward))
    return replace(group, rollouts=tuple(rollouts))
