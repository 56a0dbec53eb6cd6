"""A run on verl from the command line that is killed and resumed, in an environment that fails at times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lfo.checkpoints import latest_checkpoint
from lfo.runs.folder import read_metrics
from small_runs import SMALL

pytest.importorskip("verl", reason="verl is not installed: pip install -e '.[verl]'")
pytestmark = pytest.mark.verl

import psutil  # noqa: E402  comes with verl

from lfo.engines.verl.backend import LARGEST_GAP  # noqa: E402

HERE = Path(__file__).parent
LFO = Path(sys.executable).parent / "lfo"
SETTINGS = (
    "env=verl_worlds:BreakingWorld",
    "steps=40",
    "checkpoint_every=1",
    "verl.algorithm.rollout_correction.bypass_mode=false",  # the trainer computes the log-probs that it trains on
)


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


def trainers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "WorkerDict" in " ".join(child.cmdline())]


def test_a_lost_worker_ends_the_run_with_a_sentence_and_resume_goes_on(tmp_path: Path):
    run = tmp_path / "run"
    process = start(run, *SETTINGS)
    deadline = time.monotonic() + 400
    while not (latest_checkpoint(run) or process.poll() is not None) and time.monotonic() < deadline:
        time.sleep(0.2)
    (worker,) = trainers(process)
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
    assert all(row["logprob_gap"] < LARGEST_GAP for row in rows if "logprob_gap" in row)
    assert (run / "adapters" / "world_model" / "adapter_config.json").is_file()
    broken = sum(row["stops"].get("environment_error", 0) for row in rows)
    assert 0 < broken < sum(sum(row["stops"].values()) for row in rows), "an environment that raises ends one rollout"
