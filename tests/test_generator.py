"""Data folders: the same options give the same bytes, nothing is overwritten by accident, every defect is named."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lfo.env.worlds.phone.ceiling import mean_ceiling
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.env.worlds.phone.generator import FILES, MANIFEST, Options, generate, load, parse_levels, render
from lfo.env.worlds.phone.tasks import SPLITS
from lfo.errors import DataError, UsageError, WorkError

SMALL: dict[str, Any] = {"num_companies": 12, "num_train_tasks": 15, "num_val_tasks": 10, "seed": 4}
ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generate(tmp_path / "data", **SMALL)
    return tmp_path / "data"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- writing ---------------------------------------------------------------------------------------------------------


def test_the_manifest_describes_the_files(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["seed"] == 4
    assert set(content(folder)) == {*FILES, MANIFEST}
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "lines": len(data.splitlines())}
    assert manifest["counts"]["train"] == {str(level): 3 for level in range(1, 6)}
    assert {sum(manifest["counts"][split].values()) for split in SPLITS if split != "train"} == {10}
    tasks = [task for task in load(folder).tasks["val"] if task.level == 3]
    assert manifest["ceilings"]["val"]["3"] == mean_ceiling(tasks)


def test_companies_are_written_with_their_hidden_rules(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "companies.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(12))
    for department in rows[0]["departments"]:
        assert sorted(map(len, department["requires"].values())) == [2, 3]
    unseen = (folder / "unseen_companies.jsonl").read_text().splitlines()
    assert len(unseen) == 6
    assert all(json.loads(line)["unseen"] for line in unseen)


def test_what_is_read_is_what_the_seed_draws(folder: Path) -> None:
    dataset = load(folder)
    drawn = PhoneCalls(seed=4, companies=12, unseen_companies=6, counts={"train": 15})
    assert dataset.tasks["train"] == tuple(drawn.tasks("train"))
    assert [len(dataset.tasks[split]) for split in SPLITS] == [15, 10, 10, 10, 10]
    assert dataset.options == Options(
        num_companies=12, num_unseen_companies=6, num_train_tasks=15, num_val_tasks=10, seed=4
    )


def test_the_bytes_do_not_depend_on_the_hash_seed(folder: Path, tmp_path: Path) -> None:
    code = f"from lfo.env.worlds.phone.generator import generate; generate('other', **{SMALL!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONHASHSEED": "4711"}, check=True)
    assert content(tmp_path / "other") == content(folder)


def test_the_same_options_may_be_written_again_and_others_only_with_force(folder: Path) -> None:
    before = content(folder)
    generate(folder, **SMALL)
    assert content(folder) == before
    for other in ({"seed": 5}, {"num_train_tasks": 16}, {"levels": (1, 2)}):
        with pytest.raises(UsageError, match="--force"):
            generate(folder, **{**SMALL, **other})
    assert content(folder) == before
    generate(folder, **{**SMALL, "seed": 5}, force=True)
    assert load(folder).options.seed == 5
    assert [path.name for path in folder.parent.iterdir()] == ["data"]  # no temporary folder is left


def test_a_folder_with_strangers_in_it_is_never_replaced(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(UsageError, match=r"notes\.txt"):
            generate(folder, **SMALL, force=force)
    assert (folder / "notes.txt").read_text() == "mine"


def test_damaged_data_is_only_replaced_with_force(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")
    with pytest.raises(UsageError, match="--force"):
        generate(folder, **SMALL)
    generate(folder, **SMALL, force=True)
    load(folder)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="not a folder"):
        generate(tmp_path / "file", **SMALL)
    with pytest.raises(WorkError, match="Could not write"):
        generate(tmp_path / "file" / "data", **SMALL)
    (tmp_path / "empty").mkdir()
    generate(tmp_path / "empty", **SMALL)
    load(tmp_path / "empty")


@pytest.mark.parametrize(
    "options",
    [
        {"num_companies": 1},
        {"num_companies": 10**9},
        {"num_train_tasks": 0},
        {"num_val_tasks": -1},
        {"seed": -1},
        {"levels": ()},
        {"levels": (0, 1)},
        {"levels": (2, 1)},
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        generate(tmp_path / "data", **{**SMALL, **options})
    assert not (tmp_path / "data").exists()


def test_levels_as_text() -> None:
    assert parse_levels("1-5") == (1, 2, 3, 4, 5)
    assert parse_levels("4,2-3,2") == (2, 3, 4)
    assert parse_levels("3") == (3,)
    for text in ("", "x", "0-2", "1-7", "5-1", "1--2", "-1", "1-99999999999", "2;3"):
        with pytest.raises(UsageError, match="levels"):
            parse_levels(text)


# --- reading ---------------------------------------------------------------------------------------------------------


def change(path: Path, number: int, line: bytes | None) -> None:
    """Replace line `number`, or take it out."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1 : number] = [] if line is None else [line + b"\n"]
    path.write_bytes(b"".join(lines))


def edited(path: Path, number: int, **values: Any) -> bytes:
    row = json.loads(path.read_text().splitlines()[number - 1])
    return json.dumps({**row, **values}).encode()


@pytest.mark.parametrize("line", [b'{"id": "x"', b"", b"[]", b"7", b"\xff\xfe", b"NaN", b"[" * 5_000, b'{"id": "x"}'])
@pytest.mark.parametrize("name", ["train.jsonl", "test_unseen_rules.jsonl", "companies.jsonl"])
def test_a_broken_line_is_named(folder: Path, name: str, line: bytes) -> None:
    change(folder / name, 3, line)
    with pytest.raises(DataError, match=f"{name}, line 3: "):
        load(folder)


@pytest.mark.parametrize(
    "values", [{"level": "2"}, {"goal": None}, {"errands": []}, {"profile": {"pin": "1"}}, {"company": 99}, {"more": 1}]
)
def test_a_wrong_value_is_named(folder: Path, values: dict[str, Any]) -> None:
    change(folder / "train.jsonl", 2, edited(folder / "train.jsonl", 2, **values))
    with pytest.raises(DataError, match=r"train\.jsonl, line 2: was changed; it is not what the options of manifest"):
        load(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_is_named_with_its_line(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    lines = len(data.splitlines())
    for cut, line in ((len(data) - 40, lines), (len(data) - 1, lines), (data.rindex(b"\n", 0, -1) + 1, lines)):
        (folder / name).write_bytes(data[:cut])
        with pytest.raises(DataError, match=f"{name}, line {line}: "):
            load(folder)
    (folder / name).write_bytes(b"")
    with pytest.raises(DataError, match=f"{name}, line 1: "):
        load(folder)
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        load(folder)


def test_a_change_that_is_still_a_good_task_is_found(folder: Path) -> None:
    change(folder / "val.jsonl", 7, edited(folder / "val.jsonl", 7, goal="Something else."))
    with pytest.raises(DataError, match=r"val\.jsonl, line 7: was changed"):
        load(folder)


def test_lines_in_another_order_are_found(folder: Path) -> None:
    lines = (folder / "companies.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "companies.jsonl").write_bytes(b"".join([*lines[:4], *reversed(lines[4:])]))
    with pytest.raises(DataError, match=r"companies\.jsonl, line 5: was changed"):
        load(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[:50], r"line \d+: not JSON"),
        (lambda text: "[]", "line 1: must be a JSON object"),
        (lambda text: "[" * 100_000, "line 1: not JSON"),
        (lambda text: text.replace('"generator_version": 2', '"generator_version": 1'), "generate it again"),
        (
            lambda text: text.replace('"num_companies": 12', '"num_companies": "12"'),
            "num_companies: must be an integer",
        ),
        (lambda text: text.replace('"num_companies": 12', '"num_companies": -12'), "options: num_companies must be"),
        (lambda text: text.replace('"num_companies": 12', '"companies": 12'), "options: must be an object with num_"),
        (lambda text: text.replace('"levels": [', '"levels": ["2", '), "levels: must be an array of integers"),
        (lambda text: text.replace('"lines": 15', '"lines": 16'), r"line \d\d: was changed"),
        (lambda text: text.replace('"1": 1.0', '"1": 0.5'), r"line \d\d: was changed"),
    ],
)
def test_a_damaged_manifest_is_named(folder: Path, damage: Any, words: str) -> None:
    text = (folder / MANIFEST).read_text()
    assert damage(text) != text
    (folder / MANIFEST).write_text(damage(text))
    with pytest.raises(DataError, match=rf"manifest\.json, {words}" if words.startswith("line") else words):
        load(folder)


def test_no_data_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no data"):
        load(tmp_path / "nowhere")


def test_another_seeds_file_does_not_pass(folder: Path) -> None:
    other = render(Options(num_companies=12, num_unseen_companies=6, num_train_tasks=15, num_val_tasks=10, seed=9))
    (folder / "companies.jsonl").write_bytes(other["companies.jsonl"])
    with pytest.raises(DataError, match=r"companies\.jsonl, line 1: was changed"):
        load(folder)


# --- the tools' configuration ----------------------------------------------------------------------------------------


def test_the_tool_configuration_is_what_the_code_says() -> None:
    text = (ROOT / "configs" / "tool_config.yaml").read_text()
    written = runpy.run_path(str(ROOT / "scripts" / "tool_config.py"))["tool_config"]()
    assert text == written, "the tools changed: write the file again with the command in its first lines"
    assert [each["tool_schema"] for each in yaml.safe_load(text)["tools"]] == PhoneCalls().tools()
