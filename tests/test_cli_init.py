"""From `lfo init` to a first run, as a new user: three commands, each in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lfo.cli import main


def lfo(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from lfo.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_three_commands_lead_to_a_first_run(tmp_path: Path):
    made = lfo("init", "my_world", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    folder = tmp_path / "my_world"
    assert sorted(each.name for each in folder.iterdir()) == ["README.md", "config.yaml", "test_world.py", "world.py"]
    assert (folder / "README.md").read_text().startswith("# my_world\n")
    checked = lfo("check-env", "env=world:World", "practice=off", "--json", folder=folder)
    result = json.loads(checked.stdout)
    assert (checked.returncode, result["problems"], result["warnings"]) == (0, [], [])
    small = [
        "practice=off",
        "steps=1",
        "rollout.prompts=1",
        "rollout.group_size=4",
        "rollout.max_turns=2",
        "eval.tasks=2",
    ]
    trained = lfo("train", "config=config.yaml", *small, folder=folder)
    assert trained.returncode == 0, trained.stderr
    assert (folder / "runs" / "first" / "adapters" / "policy" / "adapter_model.safetensors").is_file()


def test_the_test_of_a_new_project_passes(tmp_path: Path, monkeypatch):
    assert lfo("init", "w", folder=tmp_path).returncode == 0
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path / "w",
        capture_output=True,
        text=True,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout


def test_a_folder_that_is_there_is_not_touched(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "world.py").write_text("precious")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lfo", "init", "mine"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "lfo: mine already exists and is not empty; name a new folder\n"
    assert (tmp_path / "mine" / "world.py").read_text() == "precious"
