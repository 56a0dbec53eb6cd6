"""Resuming a run after kill -9 at any point, Ctrl-C, a full disk or GPU, a NaN, or a broken environment."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from children import start_as_in_a_terminal
from lfo.checkpoints import latest_checkpoint
from lfo.cli import main
from lfo.engines.local import LocalBackend
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.measure.success import BROKEN_ROLLOUTS, NO_CALLS
from lfo.model.learner import Learner
from lfo.runs.folder import RunDirectory, read_metrics
from lfo.train.loop import Trainer
from small_runs import SMALL, model_of, small_trainer, weights

SETTINGS = [
    *SMALL,
    "levels=1",
    "rollout.group_size=6",
    "exploration.blind_share=0.67",  # four of them, which can be compared, and in one step they differ
    "rollout.max_turns=4",
    "steps=3",
    "checkpoint_every=1",
    "eval.every=2",
    "eval.tasks=1",
    "world_model.examples_per_mini_batch=2",
]

# `lfo train`, killed by the kernel when a method is called for the n-th time.
KILLED = """
import os, signal, sys
from lfo.cli import main
from lfo.model.learner import Learner
name, calls = sys.argv.pop(1), int(sys.argv.pop(1))
method, made = getattr(Learner, name), []
def counted(self, *arguments, **options):
    made.append(1)
    if len(made) == calls:
        os.kill(os.getpid(), signal.SIGKILL)
    return method(self, *arguments, **options)
setattr(Learner, name, counted)
main()
"""


def lfo(*arguments: str) -> int:
    """`lfo ARGUMENTS` in this process; answers the exit code."""
    before = sys.argv
    sys.argv = ["lfo", *arguments]
    try:
        main()
    except SystemExit as exit_:
        return int(exit_.code or 0)
    finally:
        sys.argv = before
    return 0


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", script, *arguments]
    return start_as_in_a_terminal(command, stderr=subprocess.PIPE, env=environment)


def rows(run: Path) -> list[dict[str, Any]]:
    """All metrics but times."""
    return [
        {key: value for key, value in row.items() if not key.startswith("seconds/") and key != "tokens_per_second"}
        for row in read_metrics(run)
    ]


def adapters(run: Path) -> dict[str, bytes]:
    return {str(file.relative_to(run)): file.read_bytes() for file in sorted((run / "adapters").rglob("*.safetensors"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nobody disturbed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert lfo("train", *SETTINGS, f"output_dir={run}") == 0
    return run


def test_an_undisturbed_run_leaves_everything_a_person_needs(whole: Path):
    assert [row["step"] for row in rows(whole)] == [0, 1, 2, 3]
    assert [row["step"] for row in rows(whole) if "eval/val/success" in row] == [0, 2, 3]
    assert any("policy_loss" in row for row in rows(whole)), "or the comparison below would show little"
    assert rows(whole)[-1]["replay_size"] > 0
    assert sorted(file.name for file in (whole / "rollouts").iterdir()) == [
        f"step-00000{step}.jsonl" for step in (0, 2, 3)
    ]
    assert {Path(name).parts[1] for name in adapters(whole)} == {"policy", "world_model"}


@pytest.mark.parametrize(
    ("method", "calls", "checkpoint"),
    [
        ("update", 2, None),  # in the first step: there is no checkpoint yet
        ("update", 4, 1),  # in the middle of the second step
    ],
)
def test_after_kill_9_a_resumed_run_is_the_undisturbed_one(whole: Path, tmp_path: Path, method, calls, checkpoint):
    run = killed(tmp_path / "run", method, calls)
    found = latest_checkpoint(run)
    assert (found.step if found else None) == checkpoint
    assert not (run / "adapters").exists()
    assert_resumed_as(whole, run)


def killed(run: Path, method: str, calls: int) -> Path:
    process = start(KILLED, method, str(calls), "train", *SETTINGS, f"output_dir={run}")
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    return run


def assert_resumed_as(whole: Path, run: Path) -> None:
    assert lfo("train", "--resume", str(run)) == 0
    assert rows(run) == rows(whole)
    assert adapters(run) == adapters(whole)


@pytest.fixture(scope="module")
def after_two(tmp_path_factory) -> Path:
    """A run that was killed in the middle of its third and last checkpoint; for copies."""
    return killed(tmp_path_factory.mktemp("after-two") / "run", "save", 3)


def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run", symlinks=True))


def test_after_kill_9_in_the_last_checkpoint_a_resumed_run_is_the_undisturbed_one(whole, after_two, tmp_path):
    run = copied(after_two, tmp_path)
    assert_intact(run, step=2)
    assert not (run / "adapters").exists()
    assert_resumed_as(whole, run)


def test_an_ended_run_without_checkpoints_is_not_trained_anew(whole: Path, tmp_path: Path, capsys):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    before = rows(run)
    capsys.readouterr()
    assert lfo("train", "--resume", str(run)) == 2
    assert "has ended and has no checkpoint left" in capsys.readouterr().err
    assert rows(run) == before


def test_an_archived_run_is_not_trained_anew(whole: Path, tmp_path: Path, capsys):
    """As in `results`: compressed metrics, and neither adapters nor checkpoints."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(whole / "config.yaml", run)
    (run / "metrics.jsonl.gz").write_bytes(gzip.compress((whole / "metrics.jsonl").read_bytes()))
    assert lfo("train", "--resume", str(run)) == 2
    assert "has ended and has no checkpoint left" in capsys.readouterr().err
    assert read_metrics(run) == read_metrics(whole)


def test_a_resumed_run_cannot_have_fewer_steps_than_it_has_made(whole: Path, tmp_path: Path, capsys):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    before = (run / "config.yaml").read_text()
    assert lfo("train", "--resume", str(run), "steps=2") == 2
    assert "has already made 3 steps; steps=2 must not be below" in capsys.readouterr().err
    assert (run / "config.yaml").read_text() == before


class OnlyTraining(PhoneCalls):
    def tasks(self, split):
        return [] if split == "val" else super().tasks(split)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("eval.splits=val,vall",), "no split 'vall'"),
        (("eval.splits=test_unseen_rules", "env=test_resume:OnlyTraining"), "no tasks in its split 'val'"),
    ],
)
def test_a_wrong_split_leaves_no_folder_behind(tmp_path: Path, capsys, settings: tuple[str, ...], words: str):
    run = tmp_path / "run"
    assert lfo("train", *SETTINGS, *settings, f"output_dir={run}") == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not run.exists()


class Wordy(PhoneCalls):
    def start(self, task):
        *others, request = super().start(task)
        return [*others, replace(request, content=request.content + " please" * 2_000)]


def test_an_opening_that_does_not_fit_is_no_fault_of_the_model(tmp_path: Path, capsys):
    code, err, _ = failing_run(capsys, tmp_path, "env=test_resume:Wordy", "eval.every=0", "steps=1")
    assert (code, "exceed rollout.max_context: raise it" in err, NO_CALLS in err) == (1, True, False)


@pytest.mark.parametrize("changed", [False, True])
def test_a_run_that_goes_on_with_other_tasks_says_so(whole: Path, tmp_path: Path, caplog, changed: bool):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    if changed:
        data = json.loads((run / "data.json").read_text())
        data["splits"]["val"]["fingerprint"] = "0" * 16
        (run / "data.json").write_text(json.dumps(data))
    now = json.loads((whole / "data.json").read_text())["splits"]["val"]["fingerprint"]
    for _ in range(2):  # the second time it has the same tasks as the first
        assert lfo("train", "--resume", str(run)) == 0
    assert caplog.text.count("the tasks of val have changed since") == changed
    # So `lfo compare` refuses it beside runs on the tasks of before or of now.
    fingerprint = json.loads((run / "data.json").read_text())["splits"]["val"]["fingerprint"]
    assert fingerprint == (f"{'0' * 16}, then {now}" if changed else now)


def test_ctrl_c_leaves_a_run_that_can_be_resumed_and_exit_code_130(whole: Path, tmp_path: Path):
    run = tmp_path / "run"
    process = start("from lfo.cli import main; main()", "train", *SETTINGS, f"output_dir={run}")
    deadline = time.monotonic() + 200
    while not ((run / "metrics.jsonl").exists() and len(read_metrics(run)) >= 2):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert err.splitlines()[-1] == f"lfo: interrupted; continue with: lfo train --resume {run}"
    assert "Traceback" not in err
    assert lfo("train", "--resume", str(run)) == 0
    assert rows(run) == rows(whole)


def test_a_first_row_torn_by_the_kill_is_written_again(whole: Path, tmp_path: Path):
    trainer = small_trainer(*SETTINGS, f"output_dir={tmp_path}")
    RunDirectory.create(tmp_path, trainer.config).close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "tas')
    trainer.fit(resume=True)
    assert rows(tmp_path) == rows(whole)


def failing_third_step(capsys, after_two: Path, tmp_path: Path) -> tuple[int, str, Path]:
    run = copied(after_two, tmp_path)
    code = lfo("train", "--resume", str(run))
    return code, capsys.readouterr().err, run


def failing_run(capsys, tmp_path: Path, *settings: str) -> tuple[int, str, Path]:
    code = lfo("train", *SETTINGS, *settings, f"output_dir={tmp_path / 'run'}")
    return code, capsys.readouterr().err, tmp_path / "run"


def assert_intact(run: Path, *, step: int) -> None:
    """The newest checkpoint is that of `step`, and a trainer can take it up."""
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.step == step
    trainer = small_trainer(*SETTINGS)
    model_of(trainer).load(checkpoint.path)
    assert all(weights(model_of(trainer), name).isfinite().all() for name in model_of(trainer).adapter_names)


def test_a_nan_stops_the_run_and_the_last_checkpoint_is_intact(whole, after_two, tmp_path, capsys, monkeypatch):
    collect = Trainer.collect

    def poisoned(self, plan):
        collected = collect(self, plan)
        if plan.step == 2:
            with torch.no_grad():
                model_of(self).adapter_parameters("world_model")[0].fill_(float("nan"))
        return collected

    monkeypatch.setattr(Trainer, "collect", poisoned)
    code, err, run = failing_third_step(capsys, after_two, tmp_path)
    assert code == 1
    assert "not a finite number" in err.splitlines()[-1]
    assert_intact(run, step=2)
    assert rows(run) == rows(whole)[:3]


def test_a_full_gpu_stops_the_run_and_the_last_checkpoint_is_intact(whole, after_two, tmp_path, capsys, monkeypatch):
    def full(self, mini_batches, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 282.00 MiB.")

    monkeypatch.setattr(LocalBackend, "learn", full)
    code, err, run = failing_third_step(capsys, after_two, tmp_path)
    assert code == 1
    assert err.splitlines()[-1].startswith("lfo: the GPU is out of memory; continue from")
    assert_intact(run, step=2)


def test_a_full_disk_stops_the_run_and_the_last_checkpoint_is_intact(whole, after_two, tmp_path, capsys, monkeypatch):
    save = Learner.save

    def full(self, path: Path) -> None:
        if "step-000003" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(self, path)

    monkeypatch.setattr(Learner, "save", full)
    code, err, run = failing_third_step(capsys, after_two, tmp_path)
    assert code == 1
    assert err.splitlines()[-1] == (
        f"lfo: the disk is full: cannot write the checkpoint of step 3 of {run}; the checkpoint of step 2 is intact"
    )
    assert_intact(run, step=2)
    assert rows(run) == rows(whole)


# --- environments that fail, named on the command line as a user would -------------------------------------------


class Dead(PhoneCalls):
    def step(self, message: str):
        raise ConnectionError("the exchange is down")


class Mute(PhoneCalls):
    """The phone-call world with its tools under names that the base has never seen."""

    def tools(self):
        return [
            {**tool, "function": {**tool["function"], "name": f"my_{tool['function']['name']}"}}
            for tool in super().tools()
        ]

    def lookahead_query(self, transcript):
        return None


def test_a_base_that_calls_no_tool_of_the_environment_is_told(tmp_path: Path, capsys):
    settings = ("env=test_resume:Mute", "practice=off", "world_model.predict=all", "eval.every=0", "steps=1")
    code, err, _ = failing_run(capsys, tmp_path, *settings)
    assert (code, err.splitlines()[0]) == (0, f"step 1: {NO_CALLS}")


class Moody(PhoneCalls):
    """Raises for some tasks and hangs for others."""

    def start(self, task):
        self.mood = sum(map(ord, task.id)) % 3
        return super().start(task)

    def step(self, message: str):
        if self.mood == 1:
            raise ConnectionError("the exchange is down")
        if self.mood == 2:
            time.sleep(2.0)
        return super().step(message)


FAILING = ["rollout.environment_timeout=1", "rollout.prompts=4", "steps=1"]


@pytest.mark.parametrize("evaluation", ["eval.every=0", "eval.every=1"])
def test_an_environment_that_always_raises_stops_the_run_with_its_own_words(tmp_path: Path, capsys, evaluation: str):
    code, err, _ = failing_run(capsys, tmp_path, *FAILING, "env=test_resume:Dead", evaluation)
    assert code == 1
    count = 24 if evaluation == "eval.every=0" else 1
    assert err == (
        f"lfo: the environment failed in all {count} rollouts: "
        "step of Dead raised ConnectionError: the exchange is down\n"
    )


def test_an_environment_that_sometimes_raises_or_hangs_costs_those_rollouts(tmp_path: Path, capsys):
    code, err, run = failing_run(capsys, tmp_path, *FAILING, "env=test_resume:Moody", "eval.every=0")
    assert (code, err.splitlines()[0]) == (0, f"step 1: {BROKEN_ROLLOUTS}")
    (row,) = rows(run)
    assert {"environment_error", "environment_timeout"} < row["stops"].keys()
    assert (run / "adapters" / "policy").is_dir()
