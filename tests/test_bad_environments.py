"""Environments that misbehave in a real run: each gives one sentence, and the run continues if it can."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from lfo.cli import main
from lfo.env.patience import call_all
from lfo.env.worlds.oracle import OracleCodes

SMALL = (
    *("preset=tiny", "steps=1", "eval.every=0", "rollout.prompts=2", "rollout.group_size=4"),
    *("rollout.mini_batch_prompts=2", "rollout.max_turns=2", "rollout.max_turn_tokens=48"),
)


class RaisesAtTimes(OracleCodes):
    count = 0

    def start(self, task):
        type(self).count += 1
        if type(self).count % 2:
            raise OSError("no temple")
        return super().start(task)


class AlwaysRaises(OracleCodes):
    def start(self, task):
        raise OSError("no temple")


class Blocks(OracleCodes):
    def step(self, message):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(60)
        return super().step(message)


class Noisy(OracleCodes):
    """Prints, changes the folder and the random states."""

    def start(self, task):
        print("noise of the environment")
        os.chdir("/")
        random.seed(1)
        np.random.seed(1)
        return super().start(task)


def train(name: str, monkeypatch, capsys, *settings: str) -> tuple[int, str, str]:
    arguments = ["train", f"env=test_bad_environments:{name}", *SMALL, "output_dir=runs/x", "--json", *settings]
    monkeypatch.setattr(sys, "argv", ["lfo", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own_and_without_patience(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lfo.play.runner.RETRIES", 0)


def row() -> dict:
    return json.loads(Path("runs/x/metrics.jsonl").read_text().splitlines()[-1])


def test_an_environment_that_prints_and_wanders_is_told_once_and_trained(tmp_path: Path, monkeypatch, capsys, caplog):
    code, out, _ = train("Noisy", monkeypatch, capsys)
    assert code == 0
    assert json.loads(out)["steps"] == 1, "stdout holds our answer and nothing else"
    assert (tmp_path / "runs" / "x" / "adapters").is_dir()
    assert Path.cwd() == tmp_path
    told = [record.getMessage() for record in caplog.records if "Noisy" in record.getMessage()]
    assert told == [
        "the environment Noisy: it draws from the global random state, so parallel rollouts are not repeatable",
        "the environment Noisy: it changes the working directory of the process",
        "the environment Noisy: it prints: 'noise of the environment'",
    ]


def test_the_random_state_of_an_environment_does_not_reach_the_run(monkeypatch, capsys):
    for name in ("Noisy", "Quiet"):
        assert train(name, monkeypatch, capsys, f"output_dir=runs/{name}")[0] == 0
    noisy, quiet = (json.loads(Path(f"runs/{name}/metrics.jsonl").read_text()) for name in ("Noisy", "Quiet"))
    same = {key for key in quiet if "seconds" not in key and key not in ("tokens_per_second", "memory_size")}
    assert "sampled_tokens" in same
    assert {key: noisy[key] for key in same} == {key: quiet[key] for key in same}


class Quiet(OracleCodes):
    pass


def test_an_environment_that_raises_at_times_costs_those_rollouts(monkeypatch, capsys):
    RaisesAtTimes.count = 0
    code, _, _ = train("RaisesAtTimes", monkeypatch, capsys)
    assert code == 0
    assert row()["stops"]["environment_error"] == 4
    assert any("the environment failed in some rollouts" in warning for warning in row()["warnings"])


def test_an_environment_that_always_raises_is_one_sentence(monkeypatch, capsys):
    code, out, err = train("AlwaysRaises", monkeypatch, capsys)
    assert (code, out) == (1, "")
    sentence = "lfo: the environment failed in all 8 rollouts: reset of AlwaysRaises raised OSError: no temple"
    assert err.splitlines()[-1] == sentence


def test_an_environment_that_blocks_is_one_sentence_and_not_waited_for(monkeypatch, capsys):
    started = time.monotonic()
    code, out, err = train("Blocks", monkeypatch, capsys, "rollout.environment_timeout=0.3")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].endswith("did not answer within 0.3 seconds")
    assert time.monotonic() - started < 50


def test_calls_that_overlap_put_the_output_and_the_folder_back(tmp_path: Path, capsys):
    def noisy(seconds: float):
        print("noise")
        os.chdir("/")
        time.sleep(seconds)
        return seconds

    def batch(seconds: float) -> None:
        call_all([lambda: noisy(seconds)], timeout=5, retries=0, workers=1)

    before = sys.stdout
    threads = [threading.Thread(target=batch, args=(seconds,)) for seconds in (0.05, 0.15, 0.1)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert sys.stdout is before
    assert Path.cwd() == tmp_path
    assert capsys.readouterr().out == ""
