"""Everything that README.md and docs/ARCHITECTURE.md name exists."""

import re
import sys
from pathlib import Path

import typer

from lfo.cli import app
from lfo.config import load_config
from lfo.env.interface import OffersLookahead
from lfo.loading import environment_factory
from lfo.protocol.hermes import format_tool_call
from lfo.types import ToolCall

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
(WORLD,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_environment_of_the_readme_plays(tmp_path: Path, monkeypatch):
    (tmp_path / "my_world.py").write_text(WORLD)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    environment = environment_factory(load_config(["env=my_world:Safes"]))
    for dial, key, reward in (("north", "iron", 1.0), ("north", "tin", 0.0), ("up", "iron", 0.0)):
        safes = environment()
        assert safes.reset(safes.tasks("train")[0])
        assert not isinstance(safes, OffersLookahead), "look-ahead needs no question of the environment's author"
        result = safes.step(format_tool_call(ToolCall(name="open_safe", arguments={"dial": dial, "key": key})))
        assert (result.reward, result.done) == (reward, dial != "up")
        if result.done:
            refusal = "It stays shut; it wanted the dial at north and the iron key."
            assert result.observation == ("It opens." if reward else refusal)


def test_held_out_tasks_of_the_readme_share_rules_but_no_answer(tmp_path: Path, monkeypatch):
    (tmp_path / "my_world.py").write_text(WORLD)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    safes = environment_factory(load_config(["env=my_world:Safes"]))()
    seen, held_out = ({(task.colour, task.room) for task in safes.tasks(split)} for split in ("train", "val"))
    assert (len(seen), len(held_out)) == (12, 4)
    assert seen.isdisjoint(held_out)
    for part in (0, 1):
        assert {case[part] for case in held_out} <= {case[part] for case in seen}


def test_the_readme_names_every_command_and_no_other():
    rows = re.findall(r"^\| (`lfo .*?) \|", README, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`lfo ([\w-]+)`", row)]
    assert sorted(listed) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_the_settings_of_the_readme_exist():
    lines = re.findall(r"^ +lfo train (.*?)(?:  |$)", README, re.MULTILINE)
    assert len(lines) == 7
    for line in lines:
        if "--resume" not in line:
            load_config([word for word in line.split() if not word.startswith("--")])


def test_links_lead_somewhere():
    for text, folder in ((README, ROOT), (SECURITY, ROOT), (ARCHITECTURE, ROOT / "docs")):
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (folder / target).exists(), target


def test_the_architecture_names_every_part_and_only_files_that_exist():
    package = ROOT / "src" / "lfo"
    layout = ARCHITECTURE.partition("## Layout")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^      ([\w.]+)/? ", layout, re.MULTILINE))
    parts = {path.name for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert listed == parts - {"__init__.py"}
    for name in re.findall(r"\b(?:\w+/)+\w+\.py\b", ARCHITECTURE.partition("## Direction")[2]):
        assert (package / name).exists() or (ROOT / name).exists(), name
