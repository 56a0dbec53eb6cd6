"""The minimal loop of the examples trains, and does what `lfo train` does."""

import runpy
from pathlib import Path

import torch

from lfo.algorithms import plan_of
from lfo.config import load_config
from small_runs import SMALL, fussy_calls, model_of, small_trainer, weights

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "minimal_loop.py"))
FEW = ("rollout.group_size=8", "rollout.max_turns=4", "eval.every=1", "eval.tasks=2")


def test_the_minimal_loop_makes_the_updates_of_a_run():
    agent, rows = EXAMPLE["train"](2, [*SMALL, *FEW], fussy_calls)
    trainer = small_trainer(*FEW, "steps=2", environment=fussy_calls)
    untrained = {name: weights(model_of(trainer), name) for name in ("policy", "world_model")}
    steps = [trainer.step(step) for step in range(2)]

    assert [row["tasks_seen"] for row in rows] == [0, 2, 4]
    assert all(0 <= row[name] <= 1 for row in rows for name in ("success", "success_blind"))
    assert [row["replies"] for row in rows[1:]] == [step["replay_size"] for step in steps]
    for name, before in untrained.items():
        assert not torch.equal(weights(agent.model, name), before)
        assert torch.equal(weights(agent.model, name), weights(model_of(trainer), name))


def test_the_numbers_that_the_minimal_loop_shows_are_those_of_the_preset():
    settings = EXAMPLE["SETTINGS"]
    evaluation = [setting for setting in settings if setting.startswith("eval.")]
    config = load_config(["preset=tiny", *evaluation])
    assert load_config(settings) == config
    assert plan_of(config, 0).seats == EXAMPLE["GROUP"]
    assert config.rollout.mini_batch_prompts == 1
