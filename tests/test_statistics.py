"""Intervals of a success rate and of a paired difference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfo.statistics import paired_difference, wilson


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_wilson_interval_holds_the_proportion_and_stays_in_bounds(case: tuple[int, int]):
    successes, n = case
    low, high = wilson(successes / n, n)
    assert 0.0 <= low <= successes / n <= high <= 1.0


def test_wilson_by_hand() -> None:
    # Newcombe (1998), 81 of 263, and the well-known 0 of 10.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=5e-5)
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(0.0, 1000)[1] == pytest.approx(0.00383, abs=1e-5)
    assert wilson(1.0, 60)[1] == 1.0
    assert wilson(0.0, 0) == (0.0, 1.0), "of no trials, everything is possible"


def test_paired_difference_by_hand() -> None:
    # 10 tasks are solved by the first only, 4 by the second only, 50 by both: 6/102 +- 1.96 sqrt(15 - 36/102) / 102.
    first = [True] * 10 + [False] * 4 + [True] * 50 + [False] * 36
    second = [False] * 10 + [True] * 4 + [True] * 50 + [False] * 36
    result = paired_difference(first, second)
    assert (result["only_first"], result["only_second"], result["rate"]) == (10, 4, 0.54)
    assert result["difference"] == pytest.approx(0.06)
    assert result["interval"] == pytest.approx([-0.0147, 0.1324], abs=5e-5)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1))
def test_a_paired_difference_changes_its_sign_with_the_order(pairs: list[tuple[bool, bool]]):
    first, second = zip(*pairs, strict=True)
    forth, back = paired_difference(first, second), paired_difference(second, first)
    assert forth["difference"] == -back["difference"]
    assert forth["interval"] == pytest.approx([-bound for bound in reversed(back["interval"])])
    assert -1 <= forth["interval"][0] < forth["interval"][1] <= 1


def test_pairs_need_the_same_number_of_tasks() -> None:
    with pytest.raises(ValueError):
        paired_difference([True], [True, False])
