"""Real trainings on verl, on this CPU: Ray, worker processes, rollout servers, agent loops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lfo.rundir import latest_checkpoint, read_metrics
from small_runs import SMALL, small_trainer, tokenizer

pytest.importorskip("verl", reason="verl is not installed: pip install -e '.[verl]'")
pytestmark = pytest.mark.verl

import psutil  # noqa: E402  comes with verl

from verl_worlds import LONG, TalkativeWorld  # noqa: E402

HERE = Path(__file__).parent
LFO = Path(sys.executable).parent / "lfo"
CLOSE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fits")
    command = [sys.executable, "-W", "ignore", "verl_fits.py", str(folder)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def test_three_steps_are_those_of_the_local_engine(results):
    """The same rollouts, token by token, and the same losses: tasks, seeds, look-ahead, sampling and updates agree."""
    trainer = small_trainer(
        "coupling=stacked", "policy.max_resamples=1", "steps=5", "rollout.max_context=1536", environment=TalkativeWorld
    )
    tokens: list[tuple[int, ...]] = []
    roll_out = trainer.roll_out

    def noting(requests):
        rollouts = roll_out(requests)
        tokens.extend(rollout.tokens for rollout in rollouts)
        return rollouts

    trainer.roll_out = noting  # type: ignore[method-assign]
    rows = [trainer.step(step) for step in range(3)]
    assert [tuple(each["tokens"]) for each in results["rollouts"]] == tokens
    assert sum(row["groups_kept"] for row in rows) > 0, "dynamic sampling kept nothing: no policy update was compared"
    compared = 0
    for mine, theirs in zip(rows, results["rows"], strict=True):
        for name, value in mine.items():
            if name.startswith(("seconds/", "tokens_per_second")):
                continue
            compared += 1
            if isinstance(value, float):
                assert theirs[name] == pytest.approx(value, abs=CLOSE), name
            else:
                assert theirs[name] == value, name
    assert compared > 60


def test_rollouts_are_sampled_with_the_weights_that_are_trained(results, folder: Path):
    """After every weight sync, for each coupling; `separate` is in the run of the command line below."""
    gaps = [row["logprob_gap"] for row in results["rows"] if "logprob_gap" in row]
    gaps += [row["logprob_gap"] for row in read_metrics(folder / "oracle") if "logprob_gap" in row]
    assert len(gaps) >= 4
    assert max(gaps) < CLOSE


def test_a_server_that_missed_the_new_weights_is_noticed(results):
    assert "other weights than the trainer's" in results["stale"]


def test_replies_reach_the_trainer_whole(results):
    decode = tokenizer().decode
    long = 0
    for rollout in results["rollouts"]:
        for turn, (start, end) in zip(rollout["record"]["turns"], rollout["spans"], strict=True):
            if turn["predicted"] or end == start:
                continue
            assert decode(rollout["tokens"][start:end]) == turn["observation"]
            long += turn["observation"].startswith(LONG)
    assert long > 0


def test_another_environment_trains_on_two_ranks(results, folder: Path):
    run = folder / "oracle"
    assert results["oracle"]["steps"] == 2
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all("eval/val/success" in row for row in rows)
    assert rows[-1]["world_model_loss"] > 0
    assert rows[-1]["gradient_norm/policy"] > 0
    assert (run / "adapters" / "policy" / "adapter_model.safetensors").is_file()
    assert (run / "data.json").is_file()
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.step == 2


def test_an_environment_that_raises_ends_its_own_rollouts_only(results, folder: Path):
    rows = read_metrics(folder / "broken")
    assert results["broken"]["steps"] == len(rows) == 3
    broken = sum(row["stops"].get("environment_error", 0) for row in rows)
    assert 0 < broken < sum(sum(row["stops"].values()) for row in rows)


# --- the command line: killed, and resumed --------------------------------------------------------------------------


def start(run: Path, *settings: str, resume: bool = False) -> subprocess.Popen[str]:
    command = [
        LFO,
        "train",
        *(["--resume", run] if resume else [*SMALL, "engine=verl", f"output_dir={run}"]),
        *settings,
    ]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        command, cwd=HERE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_lost_worker_ends_the_run_with_a_sentence_and_resume_goes_on(tmp_path: Path):
    run = tmp_path / "run"
    process = start(run, "env=verl_worlds:FussyWorld", "steps=40", "checkpoint_every=1", "eval.every=0")
    deadline = time.monotonic() + 400
    while not (latest_checkpoint(run) or process.poll() is not None) and time.monotonic() < deadline:
        time.sleep(0.2)
    workers = [child for child in psutil.Process(process.pid).children(recursive=True) if "WorkerDict" in child.name()]
    workers = workers or [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "WorkerDict" in " ".join(child.cmdline())
    ]
    (worker,) = workers
    worker.send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("lfo: a process of the run was lost or failed")
    assert f"lfo train --resume {run}" in last

    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    steps = checkpoint.step + 2
    resumed = start(run, f"steps={steps}", resume=True)
    _, err = resumed.communicate(timeout=400)
    assert resumed.returncode == 0, err[-2000:]
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["logprob_gap"] < CLOSE for row in rows if "logprob_gap" in row)
    assert (run / "adapters" / "world_model" / "adapter_config.json").is_file()
