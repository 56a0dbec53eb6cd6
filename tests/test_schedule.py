"""Active losses, learning rate and weight controller, step by step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfo.algorithms.dapo import learning_rate
from lfo.algorithms.dual_lora import active_losses, adapted_weight, control_weight


def written(schedule: str, steps: int) -> str:
    """The schedule as a row of its table: `pw p p pw`."""
    active = [active_losses(schedule, step) for step in range(steps)]
    return " ".join("p" * losses.policy + "w" * losses.world_model for losses in active)


@pytest.mark.parametrize(
    ("schedule", "row"),
    [
        ("joint", "pw pw pw pw pw pw"),
        ("alternating", "w p w p w p"),
        ("world_model_first:2", "w w pw pw pw pw"),
        ("hierarchical:3", "pw p p pw p p"),
    ],
)
def test_each_schedule_trains_what_its_table_says(schedule: str, row: str) -> None:
    assert written(schedule, 6) == row


def test_schedules_with_their_knob_at_the_end_are_joint() -> None:
    assert written("world_model_first:0", 4) == written("joint", 4)
    assert written("hierarchical:1", 4) == written("joint", 4)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="sometimes"):
        active_losses("sometimes", 0)


def test_learning_rate_warms_up_linearly_and_falls_as_a_cosine() -> None:
    rates = [learning_rate(step, base=2.0, warmup=4, total=12) for step in range(14)]
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    # progress (6 - 4) / 8 = 1/4: 2 * (1 + cos 45 deg) / 2 = 1.7071; progress 1/2: 1; progress 3/4: 0.2929
    assert [rates[6], rates[8], rates[10]] == pytest.approx([1.70710678, 1.0, 0.29289322])
    assert rates[12:] == [0.0, 0.0]


def test_learning_rate_ends_at_its_floor() -> None:
    assert learning_rate(100, base=2.0, warmup=10, total=100, floor=0.1) == pytest.approx(0.2)
    assert learning_rate(55, base=2.0, warmup=10, total=100, floor=0.1) == pytest.approx(2.0 * (0.1 + 0.9 / 2))


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(0, 50), st.integers(1, 150), st.floats(0.0, 1.0))
def test_learning_rate_stays_between_0_and_base_and_falls_after_the_warm_up(
    step: int, warmup: int, total: int, floor: float
) -> None:
    now, later = (learning_rate(s, base=1e-3, warmup=warmup, total=total, floor=floor) for s in (step, step + 1))
    assert 0.0 <= now <= 1e-3 * (1 + 1e-12)
    assert later <= now + 1e-15 if step >= warmup else later >= now or step + 1 == warmup


@pytest.mark.parametrize(
    ("accuracy", "success", "baseline", "weight"),
    [
        (0.29, 0.9, 0.1, 1.0),  # a poor world model gets full weight, whatever the policy does
        (0.30, 0.0, 0.5, 0.5),  # the bounds themselves change nothing
        (0.80, 0.0, 0.5, 0.5),
        (0.81, 0.4, 0.5, 0.3),  # a good one that does not help gets less
        (0.81, 0.5, 0.5, 0.5),
        (0.50, 0.0, 0.5, 0.5),
        (math.nan, 0.0, 0.5, 0.5),  # never measured
    ],
)
def test_the_controller_follows_its_rules(accuracy: float, success: float, baseline: float, weight: float) -> None:
    assert control_weight(0.5, accuracy, success, baseline) == weight


def test_the_weight_follows_the_accuracy_and_success_of_an_evaluation():
    weight = 0.5
    for accuracy, success, expected in ((0.1, 0.5, 1.0), (0.5, 0.5, 1.0), (0.9, 0.1, 0.3), (0.9, 0.6, 0.3)):
        weight = adapted_weight(weight, {"world_model_accuracy": accuracy}, success=success, best=0.5)
        assert weight == expected
    assert adapted_weight(0.3, {}, success=0.0, best=0.5) == 0.3, "what nobody measured changes nothing"
    both = {"world_model_eval/token_accuracy": 0.2, "world_model_accuracy": 0.9}
    assert adapted_weight(0.3, both, success=0.0, best=0.5) == 1.0, "held-out replies count where there are any"
    first = {"world_model_eval/token_accuracy": 0.9}
    assert adapted_weight(1.0, first, success=0.1, best=None) == 1.0, "nothing to be worse than"
    assert adapted_weight(0.0, {"world_model_accuracy": 0.1}, success=0.0, best=0.5) == 0.0, "no world model, no weight"
