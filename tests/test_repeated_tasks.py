"""pass^k and success with intervals, against cases computed by hand."""

from itertools import combinations
from typing import Any

import pytest

from lfo.measure.repeated_tasks import judge, pass_hat_k
from lfo.types import Rollout, RolloutGroup, StopReason


def rollout(reward: float, **info: Any) -> Rollout:
    return Rollout(
        task_id="t",
        opening=(),
        tokens=(),
        origins=(),
        logprobs=(),
        turns=(),
        reward=reward,
        stop=StopReason.DONE,
        info=info,
    )


def group(*rewards: float, **info: Any) -> RolloutGroup:
    return RolloutGroup(task_id="t", rollouts=tuple(rollout(reward, **info) for reward in rewards))


@pytest.mark.parametrize(
    ("successes", "trials", "k", "expected"),
    [
        (4, 4, 4, 1.0),
        (3, 4, 4, 0.0),  # one failure among four: four tries in a row never worked
        (3, 4, 1, 0.75),
        (3, 4, 2, 0.5),  # 3 of 6 pairs
        (3, 4, 3, 0.25),  # 1 of 4 triples
        (5, 8, 3, 10 / 56),
        (0, 4, 1, 0.0),
    ],
)
def test_pass_hat_k_by_hand(successes: int, trials: int, k: int, expected: float):
    assert pass_hat_k(successes, trials, k) == pytest.approx(expected)


@pytest.mark.parametrize("successes", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_hat_k_is_the_share_of_all_choices(successes: int, k: int):
    trials = [place < successes for place in range(5)]
    choices = [all(choice) for choice in combinations(trials, k)]
    assert pass_hat_k(successes, 5, k) == pytest.approx(sum(choices) / len(choices))


def test_pass_hat_k_is_unbiased():
    """With chance 0.7 a try, and n = 4 tries of a task, its expectation is 0.7 ** k."""
    ways = {0: 1, 1: 4, 2: 6, 3: 4, 4: 1}
    for k in (1, 2, 3, 4):
        mean = sum(ways[c] * 0.7**c * 0.3 ** (4 - c) * pass_hat_k(c, 4, k) for c in ways)
        assert mean == pytest.approx(0.7**k)
        assert mean != pytest.approx(sum(ways[c] * 0.7**c * 0.3 ** (4 - c) * (c / 4) ** k for c in ways)) or k == 1


@pytest.mark.parametrize("k", [0, 5])
def test_pass_hat_k_needs_k_trials(k: int):
    with pytest.raises(ValueError, match="trials"):
        pass_hat_k(2, 4, k)


def test_a_split_is_judged_as_by_hand():
    """Two tasks of level 1, solved in 4 and 2 of 4 tries, and one of level 3, never solved."""
    groups = [
        group(1, 1, 1, 1, calls=1, mistakes=0),
        group(1, 0, 1, 0, calls=3, mistakes=2),
        group(0, 0, 0, 0.5, calls=2, mistakes=1),  # half a reward is no success
    ]
    result = judge(groups, [1, 1, 3])
    assert result["success"]["rate"] == pytest.approx(0.5)
    assert result["success"]["tasks"] == 3
    assert {level: share["rate"] for level, share in result["by_level"].items()} == {"1": 0.75, "3": 0.0}
    rates = {k: share["rate"] for k, share in result["pass_k"].items()}
    assert rates == pytest.approx({"1": 1 / 2, "2": (1 + 1 / 6) / 3, "3": 1 / 3, "4": 1 / 3})
    assert result["behaviour"]["calls"] == pytest.approx(2.0)
    assert result["behaviour"]["mistakes"] == pytest.approx(1.0)
    assert "success" not in result["behaviour"]


def test_the_interval_counts_tasks_and_not_rollouts():
    """9 of 10 tasks: Wilson's interval by hand is 0.596 to 0.982; forty rollouts of ten tasks make it no narrower."""
    once = judge([group(1)] * 9 + [group(0)], [None] * 10)
    assert once["success"]["interval"] == pytest.approx([0.596, 0.982], abs=5e-4)
    four_times = judge([group(1, 1, 1, 1)] * 9 + [group(0, 0, 0, 0)], [None] * 10)
    assert four_times["success"] == once["success"]


def test_a_world_without_levels_and_a_single_try_leave_out_what_they_have_not():
    result = judge([group(1), group(0)], [None, None])
    assert result["by_level"] == {}
    assert "pass_k" not in result
