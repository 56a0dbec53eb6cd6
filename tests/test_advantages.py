"""Advantages, dynamic sampling and reward shaping, against values computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfo.objectives.advantages import (
    DynamicSamplingReport,
    group_advantages,
    is_informative,
    overlong_penalty,
    select_groups,
    surprise_bonus,
    with_overlong_penalty,
)
from lfo.rows.samples import policy_samples
from lfo.types import Origin, Rollout, RolloutGroup, StopReason

# Quarters: shifting and summing them is exact, so the properties need no tolerance for the inputs.
rewards_of_a_group = st.lists(st.integers(-400, 400).map(lambda quarters: quarters / 4), min_size=1, max_size=16)


def group(task_id: str, *rewards: float) -> RolloutGroup:
    return RolloutGroup(
        task_id=task_id,
        rollouts=tuple(
            Rollout(
                task_id=task_id,
                opening=(),
                tokens=(1,),
                origins=(0,),
                logprobs=(0.0,),
                turns=(),
                reward=reward,
                stop=StopReason.DONE,
            )
            for reward in rewards
        ),
    )


def test_advantages_equal_hand_computed_values() -> None:
    # mean 2; differences -2, 0, 2; variance (4 + 0 + 4) / 3 = 8/3; std 1.632993; 2 / 1.632993 = 1.224745
    assert group_advantages((0.0, 2.0, 4.0), eps=0.0) == pytest.approx((-1.2247449, 0.0, 1.2247449), abs=1e-7)
    # mean 1/4; std sqrt(3)/4 = 0.4330127; 0.75 / 0.4330127 = sqrt(3); -0.25 / 0.4330127 = -1 / sqrt(3)
    assert group_advantages((1.0, 0.0, 0.0, 0.0), eps=0.0) == pytest.approx(
        (math.sqrt(3), *[-1 / math.sqrt(3)] * 3), abs=1e-12
    )
    # eps enters beside the std: differences +-0.5, std 0.5, 0.5 / (0.5 + 0.5) = 0.5
    assert group_advantages((1.0, 0.0), eps=0.5) == (0.5, -0.5)


@pytest.mark.parametrize("rewards", [(), (1.0,), (0.0,) * 8, (1.0,) * 8, (0.1,) * 3])
def test_a_group_without_spread_teaches_nothing(rewards: tuple[float, ...]) -> None:
    assert not is_informative(rewards)
    assert group_advantages(rewards) == (0.0,) * len(rewards)


@settings(deadline=None)
@given(rewards_of_a_group)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
    for i, j in zip(range(len(rewards)), range(1, len(rewards)), strict=False):
        assert (rewards[i] < rewards[j]) == (advantages[i] < advantages[j])


@settings(deadline=None)
@given(rewards_of_a_group, st.integers(-100, 100))
def test_advantages_do_not_change_when_all_rewards_shift(rewards: list[float], shift: int) -> None:
    assert group_advantages([reward + shift for reward in rewards]) == pytest.approx(
        group_advantages(rewards), abs=1e-9
    )


@settings(deadline=None)
@given(rewards_of_a_group.filter(is_informative), st.integers(1, 100))
def test_scaling_by_std_removes_the_scale_of_rewards(rewards: list[float], scale: int) -> None:
    scaled = [reward * scale for reward in rewards]
    assert group_advantages(scaled, eps=0.0) == pytest.approx(group_advantages(rewards, eps=0.0), abs=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="must be finite numbers"):
        group_advantages((0.0, bad))


def test_dynamic_sampling_keeps_informative_groups_in_order_and_reports_the_rest() -> None:
    groups = [
        group("mixed", 1.0, 0.0),
        group("failed", 0.0, 0.0),
        group("solved", 1.0, 1.0),
        group("also mixed", 0.0, 1.0),
        group("half done by all", 0.5, 0.5),
    ]
    kept, report = select_groups(groups)
    assert [kept_group.task_id for kept_group in kept] == ["mixed", "also mixed"]
    assert report == DynamicSamplingReport(kept=2, all_failed=2, all_succeeded=1)
    assert report.seen == 5
    assert select_groups(groups, success_reward=0.5)[1] == DynamicSamplingReport(kept=2, all_failed=1, all_succeeded=2)


def test_only_rollouts_under_one_condition_are_compared() -> None:
    # Four saw something and succeeded but for one; four did not and failed: by the whole group, seeing would look like
    # merit and not seeing like a fault.
    rewards, sees = (1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0), (True,) * 4 + (False,) * 4
    assert group_advantages(rewards, conditions=sees, eps=0.0) == pytest.approx(
        (0.5773503, 0.5773503, 0.5773503, -1.7320508, 0, 0, 0, 0), abs=1e-7
    )
    assert group_advantages(rewards)[7] < 0
    assert is_informative((1.0, 0.0))
    assert not is_informative((1.0, 0.0), (True, False))
    with pytest.raises(ValueError, match="argument"):
        group_advantages(rewards, conditions=sees[:-1])


def test_a_group_that_differs_by_sight_alone_is_dropped_as_solved() -> None:
    seen = group("differs by sight", 1.0, 1.0, 0.0, 0.0)
    blind = tuple(replace(rollout, look_ahead=place <= 1) for place, rollout in enumerate(seen.rollouts))
    kept, report = select_groups([replace(seen, rollouts=blind)])
    assert kept == ()
    assert report == DynamicSamplingReport(kept=0, all_failed=0, all_succeeded=1)
    assert select_groups([seen])[1].kept == 1


def test_dynamic_sampling_of_nothing_is_nothing_and_reports_add_up() -> None:
    kept, nothing = select_groups([])
    assert kept == ()
    assert nothing == DynamicSamplingReport(kept=0, all_failed=0, all_succeeded=0)
    report = DynamicSamplingReport(kept=1, all_failed=2, all_succeeded=3)
    assert nothing + report + report == DynamicSamplingReport(kept=2, all_failed=4, all_succeeded=6)


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0)]
)
def test_overlong_penalty_falls_linearly_inside_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=100, buffer=20) == pytest.approx(penalty)


def test_overlong_penalty_without_a_buffer_is_a_cliff_behind_the_limit() -> None:
    assert overlong_penalty(100, limit=100, buffer=0) == 0.0
    assert overlong_penalty(101, limit=100, buffer=0) == -1.0


@pytest.mark.parametrize("buffer", [-1, 101])
def test_an_impossible_overlong_buffer_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match="overlong buffer"):
        overlong_penalty(1, limit=100, buffer=buffer)


def test_surprise_is_relative_to_the_group() -> None:
    # mean 2, std 1: the rollout that was predicted worse gets +scale
    assert surprise_bonus((3.0, 1.0), 0.1) == pytest.approx((0.1, -0.1), abs=1e-6)
    assert surprise_bonus((103.0, 101.0), 0.1) == pytest.approx((0.1, -0.1), abs=1e-6)
    assert surprise_bonus((5.0, 5.0, 5.0), 0.1) == (0.0, 0.0, 0.0)
    assert surprise_bonus((3.0, 1.0), 0.0) == (0.0, 0.0)
    assert surprise_bonus((9.0, 3.0, 1.0), 0.1, conditions="abb") == pytest.approx((0.0, 0.1, -0.1), abs=1e-6)


def test_the_scale_of_a_bonus_holds_where_all_rewards_are_equal() -> None:
    """Added to rewards it would be normalised away: a group that fails would follow any scale at full strength."""
    origins = (Origin.PROMPT, Origin.SAMPLED)
    failed = group("a", 0.0, 0.0)
    said = [replace(rollout, tokens=(1, 2), origins=origins, logprobs=(0.0, -0.1)) for rollout in failed.rollouts]
    failed = replace(failed, rollouts=tuple(said))
    assert select_groups([failed])[1].kept == 0
    for scale in (0.001, 0.1):
        curious = replace(failed, bonuses=surprise_bonus((3.0, 1.0), scale))
        assert select_groups([curious])[1].kept == 1
        rows = policy_samples(curious, adapters=("policy",))
        assert [row.advantages[1] for row in rows] == pytest.approx([scale, -scale], rel=1e-4)


def test_lengths_alone_give_no_advantage_where_all_peers_failed():
    """Blind: one success and one failure. With look-ahead: two failures of different lengths."""
    plain = group("a", 1.0, 0.0, 0.0, 0.0).rollouts
    rollouts = [
        replace(each, look_ahead=index >= 2, tokens=(1,) * length, origins=(0,) * length, logprobs=(0.0,) * length)
        for index, (each, length) in enumerate(zip(plain, (90, 90, 81, 82), strict=True))
    ]
    mixed = RolloutGroup(task_id="a", rollouts=tuple(rollouts))
    assert with_overlong_penalty(mixed, limit=100, buffer=20).rewards == (0.5, -0.5, 0.0, 0.0)
