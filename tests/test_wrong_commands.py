"""Wrong commands end with one sentence that names the right form; the table is in scripts/wrong_commands.py."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lfo.cli import main
from lfo.config import load_config
from lfo.measure.success import POLICY_SILENT
from lfo.runs.advice import Trouble
from lfo.runs.passed_warnings import passed_warnings
from made_runs import write_run

SCRIPT = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "wrong_commands.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("wrong")
    SCRIPT["prepare"](place)
    return place


@pytest.fixture
def lfo(monkeypatch, capsys, folder):
    """Run `lfo ARGUMENTS` in this process, in the folder of the table: exit code, stdout, stderr."""
    import huggingface_hub

    def unreachable(*_: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "my_world", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lfo", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    yield run
    sys.modules.pop("my_world", None)


@pytest.mark.parametrize(("command", "code", "words"), SCRIPT["WRONG"])
def test_a_wrong_command_is_one_sentence_with_the_right_form(lfo, command, code, words):
    ended, _, said = lfo(*command.split())
    assert SCRIPT["flaws"](ended, said, 0.0, code, words) == []


def test_there_are_forty():
    assert len({command for command, *_ in SCRIPT["WRONG"]}) == 40


@pytest.mark.parametrize(
    "command", ["train env=my_world:Safe", "train env=my_world:Safes eval.splits=test", "eval full"]
)
def test_a_wrong_name_is_refused_without_torch(folder, command):
    code = "import sys\nfrom lfo.cli import main\ntry:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    words = [sys.executable, "-c", code, *command.split()]
    ended = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "False\n"), ended.stderr


def test_an_option_that_is_no_setting_points_to_the_help(lfo):
    code, _, said = lfo("train", "--colour", "red")
    assert (code, said.count("\n"), "lfo train --help" in said) == (2, 1, True)


def test_practice_reads_the_environment_only(lfo):
    code, _, said = lfo("pretrain", "env=my_world:Safes", "steps=3", "--output-dir", "base")
    assert (code, said) == (2, "lfo: lfo pretrain reads the settings env and env_args only, not steps; write --steps\n")


def test_a_warning_that_names_advise_is_one_that_advise_explains(lfo, tmp_path):
    warned = {7: {"warnings": [POLICY_SILENT]}}
    run = write_run(tmp_path / "run", steps=40, extra=lambda step: warned.get(step, {}))
    code, out, _ = lfo("advise", str(run))
    assert (code, "warned at 1 of 40 steps, last at step 7: gradient_ratio is below 1:10" in out) == (0, True)
    assert len(json.loads(lfo("advise", str(run), "--json")[1])["passed"]) == 1
    rows = [{"step": 40, "warnings": [POLICY_SILENT]}]
    assert passed_warnings(rows, [Trouble(name="gradient imbalance", figure="", knob="")]) == []
    (said,) = passed_warnings(rows, [Trouble(name="success lost", figure="", knob="")])
    assert "explained by: success lost" in said


def test_training_ends_with_what_was_reached_and_what_to_type_next(lfo, monkeypatch, tmp_path):
    from lfo import engines

    summary = {"steps": 3, "tasks_seen": 24, "best_success": 0.5, "best_step": 2}
    monkeypatch.setattr(engines, "train", lambda config, resume: summary)
    folder = tmp_path / "my run"
    code, out, said = lfo("train", "preset=tiny", "steps=3", f"output_dir={folder}")
    assert (code, out) == (0, "")
    assert "3 steps, 24 tasks; best success on val 50%, at step 2" in said
    assert f"lfo eval '{folder}' --adapter best" in said


def test_progress_keeps_step_time_left_and_success_on_80_columns(monkeypatch):
    import io

    from rich.console import Console

    from lfo.train import tracking

    shown = io.StringIO()
    console = Console(file=shown, width=80, force_terminal=True)
    monkeypatch.setattr(tracking, "Console", lambda **_: console)
    config = load_config(["preset=tiny", "steps=900", "output_dir=a/long/folder/of/a/run/with/a/name"])
    with tracking.Progress(config) as progress:
        progress.show({"step": 300, "tasks_seen": 2400, "success": 0.25, "eval/val/success": 0.5,
                       "eval/val/success_blind": 0.375, "policy_loss": 0.1, "world_model_loss": 0.2,
                       "tokens_per_second": 900.0})  # fmt: skip
    last = shown.getvalue().rpartition("\r")[2]
    assert all(words in last for words in ("300/900", "left", "val 50%", "train 25%"))
