"""Atomic writing: what has its name is on the disk, whole, even if the power fails right after."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lfo.atomic import write_folder_atomic, write_text_atomic
from lfo.runs.folder import RunDirectory, read_metrics
from small_runs import small_config


@pytest.fixture
def journal(monkeypatch) -> list[tuple[str, ...]]:
    """What is synced and renamed from now on, by name, in order; it still happens."""
    events: list[tuple[str, ...]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def plain(path: object) -> str:
        return Path(str(path)).name.replace(f".{os.getpid()}.", ".PID.")

    def synced(descriptor: int) -> None:
        events.append(("sync", plain(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def moved(real):
        def move(old, new) -> None:
            events.append(("rename", plain(old), plain(new)))
            real(old, new)

        return move

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", moved(rename))
    monkeypatch.setattr(os, "replace", moved(replace))
    return events


def test_a_text_is_on_the_disk_before_it_has_its_name_and_then_the_name_is(tmp_path: Path, journal):
    write_text_atomic(tmp_path / "state.json", "{}")
    assert journal == [
        ("sync", ".state.json.PID.tmp"),
        ("rename", ".state.json.PID.tmp", "state.json"),
        ("sync", tmp_path.name),
    ]


def test_a_folder_is_on_the_disk_with_all_that_is_in_it_before_it_has_its_name(tmp_path: Path, journal):
    def write(folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_text("w")
        (folder / "state").write_text("s")

    write_folder_atomic(tmp_path / "step", write)
    place = journal.index(("rename", ".step.PID.tmp", "step"))
    assert sorted(journal[:place]) == [("sync", name) for name in (".step.PID.tmp", "inner", "state", "weights")]
    assert journal[place + 1 :] == [("sync", tmp_path.name)]

    journal.clear()
    write_folder_atomic(tmp_path / "step", write)
    moved = [event for event in journal if event[0] == "rename"]
    assert moved == [("rename", "step", ".step.replaced.PID.tmp"), ("rename", ".step.PID.tmp", "step")]
    assert [path.name for path in tmp_path.iterdir()] == ["step"], "the old one is removed at the end"


def test_the_rows_before_a_checkpoint_are_on_the_disk_before_it(tmp_path: Path, journal):
    with RunDirectory.create(tmp_path / "run", small_config()) as run:
        run.append_metrics({"step": 1})
        journal.clear()
        run.write_checkpoint(1, lambda folder: None)
    first_rename = next(place for place, event in enumerate(journal) if event[0] == "rename")
    assert ("sync", "metrics.jsonl") in journal[:first_rename]
    assert read_metrics(tmp_path / "run") == [{"step": 1}]
