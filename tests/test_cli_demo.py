"""`lfo demo` with real runs of one small step: it trains, compares, resumes and reports failures."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from lfo.cli import main
from lfo.runs.folder import read_metrics

SMALL = (
    "rollout.prompts=1",
    "rollout.group_size=4",
    "rollout.mini_batch_prompts=1",
    "rollout.max_context=420",
    "eval.tasks=2",
    "eval.every=1",
)


@pytest.fixture
def demo(monkeypatch, capsys, tmp_path: Path):
    """Run `lfo demo` on a folder of this test: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        folder = ("--output-dir", str(tmp_path / "demo"))
        monkeypatch.setattr(sys, "argv", ["lfo", "demo", "--steps", "1", *folder, *SMALL, *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


def test_both_arms_train_on_the_same_tasks_are_compared_and_go_on(demo, tmp_path: Path):
    code, out, err = demo()
    assert code == 0, err
    assert re.search(r"^Watch at http://127\.0\.0\.1:\d+/\S{32}/", err, re.MULTILINE)
    assert "plain DAPO: step 1 of 1, 1 tasks, val " in err
    assert "dual-LoRA: step 1 of 1, 1 tasks, val " in err
    assert "plain DAPO" in out
    assert "Tasks to a share of the ceiling (" in out
    assert "one seed" in out
    assert "Figures depend on the CPU" in out
    page = tmp_path / "demo" / "report.html"
    assert out.splitlines()[-1] == f"Curves and rollouts are on one page; open it in a browser: {page}"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")

    metrics = read_metrics(tmp_path / "demo" / "dual-lora")
    shutil.rmtree(tmp_path / "demo" / "dual-lora" / "adapters")  # as if it had been killed at its very end
    code, out, err = demo("--json")
    assert code == 0, err
    result = json.loads(out)
    assert [group["name"] for group in result["groups"]] == ["plain DAPO", "dual-LoRA"]
    assert result["groups"][1]["tasks_seen"] == 1
    assert 0.8 < result["ceiling"] < 1
    assert result["report"] == str(page)
    assert (tmp_path / "demo" / "dual-lora" / "adapters").is_dir()
    assert read_metrics(tmp_path / "demo" / "dual-lora") == metrics, "nothing was trained twice"

    code, out, err = demo()
    assert (code, "to train again, remove" in err) == (0, True)
    assert "Success at the end" in out
    code, out, err = demo("--seed", "1")
    assert (code, out) == (2, "")
    assert "was trained with seed=0, not 1" in err


def test_a_failed_arm_is_exit_1_with_its_own_words(demo):
    code, out, err = demo("model=./nowhere")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] in (
        f"lfo: {name} failed: model=./nowhere: this folder does not exist" for name in ("plain DAPO", "dual-LoRA")
    )


def test_a_bad_setting_is_exit_2_before_anything_starts(demo, tmp_path: Path):
    code, _, err = demo("lora.rnak=3")
    assert (code, err) == (2, "lfo: there is no setting 'lora.rnak'; the nearest is lora.rank: write lora.rank=3\n")
    assert not (tmp_path / "demo").exists()
