"""Metrics of a set of rollouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lfo.measure.success import BROKEN_ROLLOUTS, NO_CALLS, NO_ROOM, draft_metrics, rollout_metrics, step_metrics
from lfo.types import Rollout, StopReason, Turn


def rollout(reward: float, *, stop: StopReason = StopReason.DONE, turns: int = 1, imagined: int = 0, **info) -> Rollout:
    where = {"action_start": 0, "action_end": 0, "observation_start": 0, "observation_end": 0}
    turn = {"action": "a", "observation": "o", "call": None, **where}
    return Rollout(
        task_id="t",
        opening=(),
        tokens=(1, 2),
        origins=(0, 1),
        logprobs=(0.0, -0.5),
        turns=tuple(Turn(**turn, predicted=place < imagined) for place in range(turns + imagined)),
        reward=reward,
        stop=stop,
        info=info,
    )


def test_means_levels_and_stops():
    metrics = rollout_metrics(
        [
            rollout(1.0, turns=4, imagined=2, level=1, calls=2, form_before_call=True),
            rollout(0.0, turns=2, level=2, calls=1, form_before_call=False),
            rollout(1.0, turns=3, level=1, calls=3, form_before_call=False),
            rollout(0.0, turns=0, stop=StopReason.ENVIRONMENT_TIMEOUT, calls="none"),
        ]
    )
    assert metrics["success"] == 0.5
    assert metrics["success_by_level"] == {"1": 1.0, "2": 0.0}
    assert metrics["turns"] == 9 / 4, "imagined exchanges are no turns"
    assert metrics["calls"] == 2.0, "over the rollouts that tell"
    assert metrics["form_before_call"] == pytest.approx(1 / 3)
    assert metrics["stops"] == {"done": 3, "environment_timeout": 1}
    assert "excess_fields" not in metrics
    assert rollout_metrics([]) == {}


def test_an_environment_without_levels_has_none():
    assert "success_by_level" not in rollout_metrics([rollout(1.0)])


def test_drafts_are_counted_over_rollouts_that_look_ahead_and_none_is_told_as_none():
    kept, blind = rollout(1.0, imagined=2), replace(rollout(0.0), look_ahead=False)
    (turn, *_) = rollout(0.0, turns=0, imagined=1).turns
    back = replace(rollout(0.0), taken_back=(replace(turn, taken_back=True), replace(turn, taken_back=True)))
    assert draft_metrics([kept, back, blind]) == {"drafts": 2.0, "drafts_kept": 0.5}
    assert draft_metrics([rollout(1.0), blind]) == {"drafts": 0.0}
    assert draft_metrics([blind]) == {}, "nobody could"


def test_warnings_name_what_kept_rollouts_from_acting():
    spoken, full = rollout(0.0), rollout(0.0, turns=0, stop=StopReason.CONTEXT_OVERFLOW)
    assert step_metrics([spoken], {"call"})[1] == [NO_CALLS]
    assert step_metrics([spoken, full], {"call"})[1] == [NO_ROOM, NO_CALLS]
    assert step_metrics([full], {"call"})[1] == [NO_ROOM], "the model was never asked"
    assert step_metrics([rollout(0.0, turns=0, stop=StopReason.ENVIRONMENT_ERROR)], {"call"})[1] == [BROKEN_ROLLOUTS]
