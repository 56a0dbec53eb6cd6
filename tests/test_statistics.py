"""The interval of a success rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfo.statistics import wilson


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
