"""What each algorithm does in a step: a pure function of config, step and the state of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lfo import algorithms
from lfo.algorithms import plan_of
from lfo.config.algorithms import ALGORITHMS
from lfo.types import Observed, Seat, Situation
from small_runs import fussy_calls, small_config, small_trainer

BLIND, SIGHTED = Seat(look_ahead=False), Seat()
GROUP_OF_8 = "rollout.group_size=8"
SUCCESSES = Situation(success_tasks=24)


def test_plain_dapo_is_blind_and_learns_from_its_own_rollouts_alone():
    plan = plan_of(small_config("algo=dapo", "policy.max_resamples=2"), 3)
    assert plan.seats == (BLIND,) * 4
    assert (plan.draws, plan.selects, plan.reinforces) == (3, True, True)
    assert (plan.imitates, plan.predicts, plan.first_wave) == (False, False, 0)
    assert plan.feedback == "off"


def test_dual_lora_has_explorers_seats_with_look_ahead_and_a_world_model():
    plan = plan_of(small_config(GROUP_OF_8), 3)
    assert plan.seats == (*(BLIND, Seat(imagine=1)) * 2, *(SIGHTED,) * 4)
    assert plan.reinforces
    assert plan.predicts
    assert plan.looks_ahead


def test_feedback_has_a_second_wave_and_imitates():
    config = small_config("algo=feedback", GROUP_OF_8)
    first = plan_of(config, 3)
    assert (first.first_wave, first.feedback, first.predicts) == (4, "own", False)
    assert first.seats == (Seat(look_ahead=False, player="base"),) * 8
    assert plan_of(config, 3, SUCCESSES).imitates
    with_lookahead = small_config(GROUP_OF_8, "feedback=own")
    assert plan_of(with_lookahead, 3).feedback == "own"
    assert plan_of(with_lookahead, 3).seats == plan_of(small_config(GROUP_OF_8), 3).seats


def test_echo_is_dapo_with_an_observation_loss():
    config = small_config("algo=echo")
    plan, plain = plan_of(config, 3), plan_of(small_config("algo=dapo"), 3)
    assert plan.predicts
    assert plain.observed is None
    assert plan_of(config, 3, Situation(predicted_tools={"say"})).observed == Observed(
        tools={"say"}, user_turns=1.0, other=1.0
    )
    assert (plan.seats, plan.draws, plan.reinforces) == (plain.seats, plain.draws, plain.reinforces)
    assert config.world_model.weight == 0.05


def test_each_algorithm_is_a_short_file_of_its_name():
    folder = Path(algorithms.__file__).parent
    files = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py") if path.stem != "__init__"}
    assert files.keys() == {name.replace("-", "_") for name in ALGORITHMS}
    assert all(len(text.splitlines()) <= 200 for text in files.values())


@pytest.mark.parametrize(
    ("settings", "step", "reinforces", "predicts"),
    [
        ("world_model.schedule=alternating", 0, False, True),
        ("world_model.schedule=alternating", 1, True, False),
        ("world_model.schedule=world_model_first:2", 1, False, True),
        ("world_model.schedule=hierarchical:3", 4, True, False),
        ("world_model.predict=none", 4, True, False),
        ("policy.frozen=true", 4, False, True),
    ],
)
def test_a_step_trains_what_schedule_and_settings_say(settings: str, step: int, reinforces: bool, predicts: bool):
    plan = plan_of(small_config(settings, "steps=9"), step)
    assert (plan.reinforces, plan.predicts) == (reinforces, predicts)


def test_tasks_are_drawn_again_only_for_a_policy_that_learns_from_them():
    again = "policy.max_resamples=3"
    first = "world_model.schedule=world_model_first:2"
    drawn = [plan_of(small_config(again, first), step) for step in (1, 2)]
    assert [(plan.draws, plan.selects) for plan in drawn] == [(1, False), (4, True)]
    frozen = plan_of(small_config(again, "policy.frozen=true"), 0)
    assert (frozen.draws, frozen.selects) == (4, True), "its groups are those that a policy would have learned from"


def test_nothing_is_rolled_out_where_logs_are_learned(tmp_path: Path):
    config = small_config("policy.frozen=true", f"world_model.from_logs={tmp_path / 'logs.jsonl'}")
    assert plan_of(config, 0).draws == 0


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_makes_a_step(algo: str):
    trainer = small_trainer(f"algo={algo}", "levels=1", environment=fussy_calls)
    row = trainer.step(0)
    assert row["rollouts_seen"] == 8
    assert ("world_model_loss" in row) == ALGORITHMS[algo].has_world_model
