"""Checkpoints and their manifests: damage is named, nothing unread is removed, and older runs still open."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from lfo.checkpoints import (
    MANIFEST,
    best_checkpoint,
    checkpoint_folders,
    latest_checkpoint,
    put_aside,
    reading,
    refuse_damage,
    seal,
    survey,
)
from lfo.config import RunConfig, from_yaml, to_yaml
from lfo.errors import DamageError, UsageError
from lfo.runs.folder import RunDirectory, read_metrics

CONFIG = RunConfig(checkpoint_every=2)


def write(folder: Path) -> None:
    (folder / "policy").mkdir()
    (folder / "policy" / "weights.bin").write_bytes(b"w" * 100)
    (folder / "state.json").write_text('{"step": 1}')


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of five steps with checkpoints of steps 2 (the best) and 4."""
    with RunDirectory.create(tmp_path / "run", CONFIG) as run:
        for step in range(1, 6):
            run.append_metrics({"step": step, "loss": 0.5})
            if step % 2 == 0:
                run.write_checkpoint(step, write, best=step == 2)
    return run.path


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != ".lock"
    }


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def to_older_manifest(folder: Path) -> None:
    """Write the manifest as versions before digests did: sizes only, nothing about the metrics."""
    manifest = json.loads((folder / MANIFEST).read_text())
    sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    (folder / MANIFEST).write_text(json.dumps({"step": manifest["step"], "best": manifest["best"], "files": sizes}))


def resume(run: Path) -> tuple[int | None, int]:
    """Resume; return the step of the checkpoint and of the next row."""
    with RunDirectory.create(run, CONFIG, resume=True) as resumed:
        checkpoint, row = resumed.rewind()
        return (checkpoint.step if checkpoint else None), row


# Manifests


def test_a_sealed_folder_is_whole_and_lists_every_file(tmp_path: Path):
    write(tmp_path)
    seal(tmp_path, {})
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    # sha256sum of a hundred times "w"
    assert manifest["files"]["policy/weights.bin"] == {
        "bytes": 100,
        "sha256": "6ff1386a6f0d444e2af43e9a9e1cdc1394709fc87b5c2a625e16041fec2b1131",
    }
    assert set(manifest["files"]) == {"policy/weights.bin", "state.json"}
    refuse_damage(tmp_path)


@pytest.mark.parametrize("name", ["policy/weights.bin", "state.json", MANIFEST])
@pytest.mark.parametrize("damage", [flip_a_bit, lambda file: file.write_bytes(file.read_bytes()[:-1]), Path.unlink])
def test_every_damaged_file_is_named(run: Path, name: str, damage: Callable[[Path], None]):
    file = run / "checkpoints" / "step-000004" / name
    damage(file)
    with pytest.raises(DamageError, match=rf"{file} is (damaged|missing)"):
        refuse_damage(file.parents[1] if "/" in name else file.parent)
    whole, damaged = survey(run)
    assert [each.step for each in whole] == [2]
    assert str(file) in damaged[run / "checkpoints" / "step-000004"]


def test_every_bit_of_the_manifest_counts(run: Path):
    file = run / "checkpoints" / "step-000004" / MANIFEST
    text = file.read_bytes()
    for index, byte in enumerate(text):
        file.write_bytes(text[:index] + bytes([byte ^ 1]) + text[index + 1 :])
        with pytest.raises(DamageError, match=r"checkpoint\.json is damaged"):
            refuse_damage(file.parent)


def test_a_folder_that_was_never_sealed_passes_unless_it_is_a_checkpoint(tmp_path: Path):
    write(tmp_path)
    refuse_damage(tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    with pytest.raises(DamageError, match=r"checkpoint\.json is missing"):
        refuse_damage(checkpoint)


def test_a_manifest_of_an_older_version_is_verified_by_its_sizes(run: Path):
    folder = run / "checkpoints" / "step-000004"
    to_older_manifest(folder)
    refuse_damage(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(DamageError, match=r"state\.json is damaged: it has 1 bytes instead of 11"):
        refuse_damage(folder)


def test_a_file_that_its_reader_cannot_read_is_named(tmp_path: Path):
    with pytest.raises(DamageError, match=r"state\.json is damaged: Expecting value"), reading(tmp_path / "state.json"):
        json.loads("")
    with pytest.raises(DamageError, match=r"state\.json is missing"), reading(tmp_path / "state.json") as file:
        file.read_text()
    with pytest.raises(UsageError, match="a better message"), reading(tmp_path / "state.json"):
        raise UsageError("a better message")


def test_only_folders_with_the_name_of_a_checkpoint_are_listed(run: Path):
    (run / "checkpoints" / "step-x").mkdir()
    aside = put_aside(run / "checkpoints" / "step-000002")
    assert aside.name == "step-000002.damaged"
    assert [path.name for path in checkpoint_folders(run)] == ["step-000004"]
    (run / "checkpoints" / "step-000002").mkdir()
    assert put_aside(run / "checkpoints" / "step-000002").name == "step-000002.damaged-2"


# Resuming


def test_an_undamaged_run_continues_after_its_last_checkpoint(run: Path, caplog):
    assert resume(run) == (4, 5)
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]
    assert not caplog.records


def test_a_damaged_last_checkpoint_is_named_kept_and_survives_the_next_ones(run: Path, caplog):
    folder = run / "checkpoints" / "step-000004"
    flip_a_bit(folder / "state.json")
    before = content(folder)
    with caplog.at_level(logging.WARNING), RunDirectory.create(run, CONFIG, resume=True) as resumed:
        checkpoint, row = resumed.rewind()
        assert checkpoint is not None
        assert (checkpoint.step, row) == (2, 3)
        for step in range(3, 9):
            resumed.append_metrics({"step": step})
            if step % 2 == 0:
                resumed.write_checkpoint(step, write, best=True)
    (record,) = caplog.records
    assert str(folder / "state.json") in record.message
    assert "training continues from the checkpoint of step 2" in record.message
    assert content(folder.with_name("step-000004.damaged")) == before
    assert latest_checkpoint(run) == best_checkpoint(run)
    assert resume(run) == (8, 9)


def test_a_damaged_best_checkpoint_is_named_and_kept_while_the_run_goes_on(run: Path, caplog):
    folder = run / "checkpoints" / "step-000002"
    (folder / "policy" / "weights.bin").unlink()
    before = content(folder)
    with caplog.at_level(logging.WARNING), RunDirectory.create(run, CONFIG, resume=True) as resumed:
        resumed.rewind()
        for step in (5, 6):
            resumed.append_metrics({"step": step})
        resumed.write_checkpoint(6, write)
    assert "weights.bin is missing" in caplog.text
    assert content(folder) == before


def test_a_damaged_best_checkpoint_of_the_right_size_is_not_removed_when_another_becomes_the_best(run: Path):
    folder = run / "checkpoints" / "step-000002"
    flip_a_bit(folder / "policy" / "weights.bin")
    before = content(folder)
    with RunDirectory.create(run, CONFIG, resume=True) as resumed:
        resumed.rewind()
        for step in (5, 6):
            resumed.append_metrics({"step": step})
        resumed.write_checkpoint(6, write, best=True)
    assert content(folder) == before
    assert [path.name for path in checkpoint_folders(run)] == ["step-000002", "step-000006"]


@pytest.mark.parametrize("missing", ["one file", "the manifest", "all but an empty folder"])
def test_without_a_whole_checkpoint_nothing_is_trained_and_nothing_changes(run: Path, missing: str):
    for folder in checkpoint_folders(run):
        match missing:
            case "one file":
                (folder / "state.json").unlink()
            case "the manifest":
                (folder / MANIFEST).unlink()
            case _:
                for name in ("state.json", MANIFEST, "policy/weights.bin"):
                    (folder / name).unlink()
    before = content(run)
    with pytest.raises(DamageError, match="none of its checkpoints is whole") as caught:
        resume(run)
    assert all(str(folder) in str(caught.value) for folder in checkpoint_folders(run))
    assert content(run) == before


@pytest.mark.parametrize(("gone", "resumed"), [(4, (2, 3)), (2, (4, 5))])
def test_a_last_or_best_checkpoint_that_is_gone_is_missed(run: Path, caplog, gone: int, resumed: tuple[int, int]):
    (run / "checkpoints" / f"step-{gone:06d}").rename(run.parent / "elsewhere")
    with caplog.at_level(logging.WARNING):
        assert resume(run) == resumed
    assert f"step-{gone:06d} is missing" in caplog.text


def test_metrics_without_the_checkpoints_that_they_had_are_refused(run: Path):
    (run / "checkpoints").rename(run.parent / "elsewhere")
    before = content(run)
    with pytest.raises(DamageError, match=r"has no checkpoint, although metrics\.jsonl has 5 steps"):
        resume(run)
    assert content(run) == before


def lose_lines(text: bytes) -> bytes:
    return b"".join(text.splitlines(keepends=True)[:-5])  # still valid YAML


def change_a_number(text: bytes) -> bytes:
    return text.replace(b"seed: 0", b"seed: 1")


def empty(text: bytes) -> bytes:
    return text[: text.index(b"\n")]


@pytest.mark.parametrize("damage", [lose_lines, change_a_number, empty])
def test_a_config_that_is_not_as_it_was_written_is_refused(run: Path, damage: Callable[[bytes], bytes]):
    file = run / "config.yaml"
    file.write_bytes(damage(file.read_bytes()))
    before = content(run)
    with pytest.raises(DamageError, match=r"config\.yaml is damaged.*nothing was changed"):
        RunDirectory.create(run, from_yaml(file), resume=True)
    assert content(run) == before


def test_a_config_of_an_older_version_has_no_seal(run: Path):
    (run / "config.yaml").write_text(to_yaml(CONFIG))
    assert resume(run) == (4, 5)


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path, caplog):
    with RunDirectory.create(tmp_path, CONFIG) as run:
        for step in range(3):  # killed between the row of step 2 and its checkpoint
            run.append_metrics({"step": step})
    with caplog.at_level(logging.WARNING):
        assert resume(tmp_path) == (None, 1)
    assert "training starts again at step 1" in caplog.text
    assert [row["step"] for row in read_metrics(tmp_path)] == [0]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:40]),
        lambda file: file.write_bytes(file.read_bytes().replace(b"{", b"[", 1)),
        lambda file: file.write_text("".join(file.read_text().splitlines(keepends=True)[1:])),
    ],
)
def test_metrics_that_disagree_with_the_checkpoint_are_refused(run: Path, older: bool, damage: Callable[[Path], None]):
    if older:
        for folder in checkpoint_folders(run):
            to_older_manifest(folder)
    damage(run / "metrics.jsonl")
    before = content(run)
    with pytest.raises(DamageError, match=r"metrics\.jsonl.*nothing was changed"):
        resume(run)
    assert content(run) == before


def test_a_changed_number_in_a_row_before_the_checkpoint_is_seen(run: Path):
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace("0.5", "0.6", 1))
    with pytest.raises(DamageError, match="does not agree with the checkpoint of step 4"):
        resume(run)


def test_rows_after_the_checkpoint_that_cannot_be_read_are_kept_in_another_file(run: Path, caplog):
    file = run / "metrics.jsonl"
    file.write_bytes(file.read_bytes().replace(b'{"step": 5', b"\0" * 10) + b'{"step": 6}\n')
    before = file.read_bytes()
    with caplog.at_level(logging.WARNING):
        assert resume(run) == (4, 5)
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]
    assert (run / "metrics.damaged.jsonl").read_bytes() == before
    assert "unreadable rows after step 4" in caplog.text
    file.write_bytes(file.read_bytes() + b"again\n")
    resume(run)
    assert (run / "metrics.damaged.jsonl").read_bytes() == before, "the first one is kept too"
    assert (run / "metrics.damaged.jsonl-2").read_bytes().endswith(b"again\n")
