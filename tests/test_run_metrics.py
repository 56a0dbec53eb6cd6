"""The outputs of a run: world-model evaluation, warnings, data.json, trackers, learning from logs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch

from lfo.env.worlds.oracle import OracleCodes
from lfo.errors import ConfigError, DataError
from lfo.measure.success import (
    POLICY_SILENT,
    SAMPLER_DIFFERS,
    WORLD_MODEL_SILENT,
    gradient_balance,
    judged,
    rollout_metrics,
)
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import render_state
from lfo.runs.data import describe_data
from lfo.runs.folder import RunDirectory, read_json_lines, read_metrics
from lfo.train.loop import Trainer
from lfo.train.tracking import Progress, scalars
from small_runs import fussy_calls, model_of, small_config, small_trainer, weights

SMALLER = ("steps=2", "rollout.prompts=1")
RUN = (*SMALLER, "eval.every=2", "eval.tasks=7", "checkpoint_every=1", "trackers=tensorboard")
EXAMINED = ("token_accuracy", "perplexity", "bleu", "semantic_accuracy", "exact")
DOCS = (Path(__file__).parent.parent / "docs" / "TRAINING.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Trainer, Path]:
    """Two steps of dual-LoRA, evaluated before and after."""
    run = tmp_path_factory.mktemp("whole") / "run"
    trainer = small_trainer(*RUN, f"output_dir={run}", environment=fussy_calls)
    trainer.fit()
    return trainer, run


def told(run: Path) -> list[dict]:
    """All metrics but times."""
    timed = re.compile(r"seconds/.*|tokens_per_second")
    return [{key: value for key, value in row.items() if not timed.fullmatch(key)} for row in read_metrics(run)]


# --- the examination ------------------------------------------------------------------------------------------------


def test_every_evaluation_examines_the_world_model(whole):
    _, run = whole
    rows = [row for row in read_metrics(run) if "world_model_eval/bleu" in row]
    assert [row["step"] for row in rows] == [0, 2]
    for row in rows:
        assert all(math.isfinite(row[f"world_model_eval/{name}"]) for name in EXAMINED)
        assert row["world_model_eval/perplexity"] >= 1
        by_category = row["world_model_eval/by_category"]
        assert sum(category["count"] for category in by_category.values()) == 7
        assert set(by_category) == {"auth_failure", "lockout", "refusal", "routing_violation", "success"}
        hits = sum(category["semantic_accuracy"] * category["count"] for category in by_category.values())
        assert row["world_model_eval/semantic_accuracy"] == pytest.approx(hits / 7)
    assert rows[0]["world_model_eval/perplexity"] != rows[1]["world_model_eval/perplexity"], "the world model moved"


def test_five_predictions_of_different_categories_are_kept_for_a_person(whole):
    trainer, run = whole
    examples = read_json_lines(run / "predictions" / "step-000002.jsonl")
    assert len({example["category"] for example in examples}) == len(examples) == 5
    calls = {(render_state(call.state), format_tool_call(call.call)): call for call in trainer.examination.calls}
    for example in examples:
        assert set(example) == {
            "state",
            "action",
            "predicted",
            "actual",
            "category",
            "same_meaning",
            "token_accuracy",
        }
        call = calls[example["state"], example["action"]]
        assert call.reply == example["actual"]
        assert trainer.backend.agent.predict([(call.state, call.call)]) == [example["predicted"]]


def test_a_run_is_the_same_bit_for_bit_with_and_without_evaluation(whole):
    trainer, _ = whole
    other = small_trainer(*SMALLER, environment=fussy_calls)
    rows = [other.step(step) for step in range(2)]
    assert any("policy_loss" in row for row in rows)
    for name in ("policy", "world_model"):
        assert torch.equal(weights(model_of(trainer), name), weights(model_of(other), name))


@pytest.mark.parametrize(
    "settings",
    [("algo=dapo",), ("world_model.predict=none",), ("world_model.weight=0",)],
)
def test_a_world_model_that_never_learns_is_not_examined(settings: tuple[str, ...]):
    row = small_trainer(*settings, "eval.tasks=1").evaluate()
    assert not any(name.startswith("world_model_eval") for name in row)


def test_any_environment_is_examined_on_what_the_untrained_base_does():
    first, second = (
        small_trainer(
            "env=oracle-codes", "world_model.predict=all", "eval.tasks=12", f"seed={seed}", environment=OracleCodes
        )
        for seed in (0, 1)
    )
    with torch.no_grad():
        for parameter in model_of(second).adapter_parameters("policy"):
            parameter.add_(0.1)
    second.backend.sync(0)
    assert first.examination.calls == second.examination.calls, "whatever the policy has become"
    assert any(call.asked for call in first.examination.calls)
    metrics, examples = first.examination.run()
    assert metrics["world_model_eval/perplexity"] > 1
    assert examples


# --- the balance of the gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "world_model", "warnings"),
    [
        (1.0, 10.0, None),
        (1.0, 10.1, [POLICY_SILENT]),
        (10.0, 1.0, None),
        (10.1, 1.0, [WORLD_MODEL_SILENT]),
    ],
)
def test_warnings_begin_outside_one_to_ten(policy: float, world_model: float, warnings):
    balance = gradient_balance({"gradient_norm/policy": policy, "gradient_norm/world_model": world_model})
    assert balance["gradient_ratio"] == policy / world_model
    assert balance.get("warnings") == warnings


@pytest.mark.parametrize(
    "row", [{}, {"gradient_norm/policy": 1.0}, {"gradient_norm/policy": 1.0, "gradient_norm/world_model": 0.0}]
)
def test_one_adapter_alone_has_no_balance(row: dict):
    assert gradient_balance(row) == {}


def test_servers_that_differ_from_the_trainer_are_one_warning_more():
    assert judged({"logprob_gap_mean": 0.02}) == {}
    row = {"gradient_norm/policy": 1.0, "gradient_norm/world_model": 11.0, "warnings": ["of the rollouts"]}
    assert judged({**row, "logprob_gap_mean": 0.021})["warnings"] == ["of the rollouts", POLICY_SILENT, SAMPLER_DIFFERS]
    assert judged({"warnings": ["of the rollouts"], "logprob_gap_mean": 1.0})["warnings"][0] == "of the rollouts"


def test_rows_of_a_run_hold_the_ratio_of_their_norms(whole):
    rows = [row for row in read_metrics(whole[1]) if row.get("gradient_norm/policy")]
    assert rows
    for row in rows:
        assert row["gradient_ratio"] == pytest.approx(row["gradient_norm/policy"] / row["gradient_norm/world_model"])


def test_a_warning_is_shown_once(capsys):
    row = {"tasks_seen": 8, "tokens_per_second": 9.0, "warnings": [POLICY_SILENT]}
    with Progress(small_config()) as progress:
        for step in (1, 2, 3):
            progress.show({"step": step, **row})
        progress.show({"step": 4, **row, "warnings": [WORLD_MODEL_SILENT]})
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.count(POLICY_SILENT) == shown.count(WORLD_MODEL_SILENT) == 1
    assert shown.startswith("step 1: ")


# --- what the run was evaluated on ----------------------------------------------------------------------------------


def test_the_data_of_a_run_is_described_in_its_folder(whole):
    trainer, run = whole
    described = json.loads((run / "data.json").read_text())
    assert described == describe_data(trainer.config, fussy_calls)
    assert described["splits"]["val"]["tasks"] == 7


# --- trackers -------------------------------------------------------------------------------------------------------


def events(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value), as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run / "tensorboard"))
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_tensorboard_holds_every_number_of_every_row(whole):
    _, run = whole
    expected: dict[str, list[tuple[int, float]]] = {}
    for row in read_metrics(run):
        for name, value in scalars(row):
            expected.setdefault(name, []).append((row["step"], pytest.approx(value, rel=1e-5)))
    assert {"success", "eval/val/success_by_level/2", "world_model_eval/by_category/success/bleu"} <= set(expected)
    assert events(run) == expected


def test_a_resumed_run_goes_on_in_the_same_tensorboard_log(whole, tmp_path: Path, monkeypatch):
    run = tmp_path / "run"
    settings = (*RUN, "checkpoint_every=2", f"output_dir={run}")
    write = RunDirectory.write_checkpoint

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt  # the row of step 1 is told already, and there is no checkpoint yet

    monkeypatch.setattr(RunDirectory, "write_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        small_trainer(*settings, environment=fussy_calls).fit()
    assert [step for step, _ in events(run)["success"]] == [1]
    monkeypatch.setattr(RunDirectory, "write_checkpoint", write)
    small_trainer(*settings, environment=fussy_calls).fit(resume=True)
    assert told(run) == told(whole[1])
    timed = re.compile(r"seconds/.*|tokens_per_second")
    first, second = (
        {tag: values for tag, values in events(each).items() if not timed.fullmatch(tag)} for each in (whole[1], run)
    )
    assert first == second


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_written(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="trackers=wandb needs the package wandb: pip install wandb"):
        small_trainer("trackers=wandb", f"output_dir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


# --- from logs ------------------------------------------------------------------------------------------------------


def logged(tmp_path: Path, count: int = 12) -> Path:
    """Rollouts as a user may have them: of scripted players, in the least form."""
    from lfo.env.worlds.phone.players import reader
    from lfo.measure.held_out import _play

    path = tmp_path / "logs.jsonl"
    with path.open("w") as file:
        for task in fussy_calls().stream("train", 7).take(count):
            rollout = _play(fussy_calls, task, reader)
            opening = [{"role": message.role, "content": message.content} for message in rollout.opening]
            turns = [{"action": turn.action, "observation": turn.observation} for turn in rollout.turns]
            file.write(json.dumps({"opening": opening, "turns": turns}) + "\n")
    return path


def test_the_world_model_learns_from_logs_without_a_rollout_and_resumes(tmp_path: Path, monkeypatch):
    logs = logged(tmp_path)
    settings = ("policy.frozen=true", f"world_model.from_logs={logs}", "eval.every=2", "eval.tasks=2")

    def refuse(*_: object) -> None:
        raise AssertionError("nobody may roll out")

    monkeypatch.setattr(Trainer, "draw", refuse)
    straight = small_trainer(*settings, "steps=4", f"output_dir={tmp_path / 'straight'}")
    before = weights(model_of(straight), "policy").clone()
    straight.fit()
    rows = read_metrics(tmp_path / "straight")
    assert [row["step"] for row in rows if "world_model_eval/bleu" in row] == [0, 2, 4]
    assert all(row["tasks_seen"] == 0 for row in rows)
    assert all(row["replay_size"] >= 24 for row in rows[1:]), "two calls of each of the twelve readers"
    assert rows[-1]["world_model_loss"] < rows[1]["world_model_loss"]
    assert not any("policy_loss" in row for row in rows)
    assert torch.equal(weights(model_of(straight), "policy"), before)

    part = ("steps=4", "checkpoint_every=1", f"output_dir={tmp_path / 'part'}")
    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, n: refuse() if n == 3 else step(self, n))
    with pytest.raises(AssertionError):
        small_trainer(*settings, *part).fit()
    monkeypatch.setattr(Trainer, "step", step)
    resumed = small_trainer(*settings, *part)
    resumed.fit(resume=True)
    assert told(tmp_path / "part") == told(tmp_path / "straight")
    assert torch.equal(weights(model_of(resumed), "world_model"), weights(model_of(straight), "world_model"))


def test_logs_without_a_reply_to_learn_from_are_named(tmp_path: Path):
    logs = tmp_path / "logs.jsonl"
    logs.write_text('{"opening": [], "turns": [{"action": "Hello", "observation": "Hm"}]}\n')
    with pytest.raises(DataError, match=r"contains no reply of a tool that world_model.predict names"):
        small_trainer("policy.frozen=true", f"world_model.from_logs={logs}")


# --- the documentation ----------------------------------------------------------------------------------------------


def test_every_metric_of_a_real_run_is_documented(whole, tmp_path: Path):
    """Names in the table may stand for many: `eval/<split>/...` and `<adapter>` are read as patterns."""
    section = DOCS.partition("## Metrics")[2].partition("\n## ")[0]
    patterns = [
        re.compile(re.sub(r"<\w+>", r"[\\w-]+", name).replace("...", ".+"))
        for name in re.findall(r"`([\w/<>.-]+)`", section)
    ]
    cut = rollout_metrics(
        [dataclasses.replace(each, cut=1) for group in whole[0].draw(whole[0].plan(0), 0) for each in group.rollouts]
    )
    names = {name for row in (*read_metrics(whole[1]), cut) for name in row}
    assert "replies_cut" in names
    assert len(names) > 40
    assert [name for name in sorted(names) if not any(pattern.fullmatch(name) for pattern in patterns)] == []
