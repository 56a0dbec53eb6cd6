"""Checkpoints of a run: which there are, and whether each is whole.

    runs/x/checkpoints/step-000010/checkpoint.json
      {"step": 10, "best": true,
       "files": {"policy/adapter_model.safetensors": {"bytes": 81920, "sha256": "..."}, ...},
       "metrics": {"bytes": 5120, "sha256": "..."},      of metrics.jsonl when the checkpoint was written
       "sha256": "..."}                                  of everything above

A folder is *sealed* by this manifest, which is written last; `adapters` of a finished run is sealed too. Resuming and
loading compare every file with it, so damage is named instead of loaded. Listing checkpoints compares sizes only: that
is fast enough to do while a run writes. Manifests of older runs have sizes and no digests.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from lfo.errors import DamageError, LfoError, first_line

MANIFEST = "checkpoint.json"
_DAMAGED = ".damaged"  # ends the name of a folder that a resumed run has put aside


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint: `Checkpoint(step=10, path=Path("runs/x/checkpoints/step-000010"), best=True)`."""

    step: int
    path: Path
    best: bool  # whether it was the best by evaluation when it was written
    metrics: Mapping[str, Any] | None = None  # size and digest of metrics.jsonl then; None in older runs


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def is_checkpoint(path: Path) -> bool:
    """Whether a path has the name of a checkpoint of a run."""
    return path.parent.name == "checkpoints" and re.fullmatch(r"step-\d{6,}", path.name) is not None


# Listing


def latest_checkpoint(run: str | Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run folder."""
    return max(complete_checkpoints(Path(run)), key=lambda checkpoint: checkpoint.step, default=None)


def best_checkpoint(run: str | Path) -> Checkpoint | None:
    """Return the newest complete checkpoint that was the best when it was written."""
    best = (checkpoint for checkpoint in complete_checkpoints(Path(run)) if checkpoint.best)
    return max(best, key=lambda checkpoint: checkpoint.step, default=None)


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the folders of checkpoints, complete or not, the oldest first."""
    return sorted(filter(is_checkpoint, (run / "checkpoints").glob("step-*")), key=step_of)


def newest_checkpoint(run: Path) -> Path | None:
    """Return the folder of the newest checkpoint, complete or not."""
    return next(reversed(checkpoint_folders(run)), None)


def named_checkpoint(run: Path, name: str) -> Path | None:
    """Return the folder that `checkpoints/last` or `checkpoints/best` names, whether it exists or not."""
    try:
        named = (run / "checkpoints" / name).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    path = run / "checkpoints" / named
    return path if is_checkpoint(path) else None


def complete_checkpoints(run: Path) -> Iterator[Checkpoint]:
    """Yield the checkpoints whose files have the sizes of their manifests."""
    for path in checkpoint_folders(run):
        try:
            manifest = _manifest(path)
            if all((path / name).stat().st_size == _size(entry) for name, entry in manifest["files"].items()):
                yield _checkpoint(path, manifest)
        except (OSError, DamageError):
            continue  # an incomplete copy, or removed meanwhile by the run


# Sealing and verifying


def seal(folder: Path, about: Mapping[str, Any]) -> None:
    """Write the manifest of a folder whose files are all written."""
    files = {str(file.relative_to(folder)): fingerprint(file) for file in files_of(folder)}
    manifest = {**about, "files": files}
    manifest["sha256"] = _digest_of(manifest)
    # No newline at the end: without any of its bytes the file would not be JSON.
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, allow_nan=False), encoding="utf-8")


def fingerprint(file: Path, size: int | None = None) -> dict[str, Any]:
    """Return size and SHA-256 of a file, or of its first `size` bytes."""
    digest, left = hashlib.sha256(), file.stat().st_size if size is None else size
    read = 0
    with open(file, "rb") as opened:
        while block := opened.read(min(1 << 20, left - read)):
            digest.update(block)
            read += len(block)
    return {"bytes": read, "sha256": digest.hexdigest()}


def refuse_damage(folder: Path) -> None:
    """Raise a `DamageError` that names the first damaged file of a checkpoint or of another sealed folder."""
    if is_checkpoint(folder) or (folder / MANIFEST).exists():
        _verify(folder)


def survey(run: Path) -> tuple[list[Checkpoint], dict[Path, str]]:
    """Return the whole checkpoints of a run, the oldest first, and for each damaged one what is wrong."""
    whole, damaged = [], {}
    for path in checkpoint_folders(run):
        try:
            whole.append(_checkpoint(path, _verify(path)))
        except DamageError as error:
            damaged[path] = str(error)
    for name in ("last", "best"):
        path = named_checkpoint(run, name)
        if path is not None and not path.exists():
            damaged[path] = f"{path} is missing, although {path.parent / name} names it"
    return whole, damaged


def put_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that the resumed run can write one of this step; return its new path."""
    return folder.rename(free_path(folder.with_name(folder.name + _DAMAGED)))


def free_path(path: Path) -> Path:
    """Return this path, or, if something is there already, the first one with a number that is free."""
    names = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return path if not path.exists() else next(each for each in names if not each.exists())


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Yield the path; turn any failure to read this file of a run into a `DamageError` that names it."""
    try:
        yield path
    except LfoError:
        raise
    except FileNotFoundError as error:
        raise DamageError(f"{path} is missing") from error
    except Exception as error:  # what a damaged file makes a reader raise depends on the library
        raise DamageError(f"{path} is damaged: {first_line(error, type(error).__name__)}") from error


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _verify(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder whose files are all as it says."""
    manifest = _manifest(folder)
    for name, entry in manifest["files"].items():
        file = folder / name
        with reading(file):
            found = file.stat().st_size
        if found != _size(entry):
            raise DamageError(f"{file} is damaged: it has {found:,} bytes instead of {_size(entry):,}")
    for name, entry in manifest["files"].items():
        file = folder / name
        if isinstance(entry, dict):
            with reading(file):
                found = fingerprint(file)
            if found["sha256"] != entry.get("sha256"):
                raise DamageError(f"{file} is damaged: its content is not what was written (SHA-256 differs)")
    return manifest


def _manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder; raise a `DamageError` unless it is one that `seal` wrote, now or formerly."""
    path = folder / MANIFEST
    with reading(path):
        manifest = json.loads(path.read_bytes())
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not all(isinstance(_size(entry), int) for entry in files.values()):
        raise DamageError(f"{path} is damaged: it does not list the files of this folder")
    digested = any(isinstance(entry, dict) for entry in files.values())
    if digested and manifest.pop("sha256", None) != _digest_of(manifest):
        raise DamageError(f"{path} is damaged: its content is not what was written (SHA-256 differs)")
    return manifest


def _checkpoint(path: Path, manifest: Mapping[str, Any]) -> Checkpoint:
    step = manifest.get("step")
    if not isinstance(step, int) or path.name != step_name(step):
        raise DamageError(f"{path / MANIFEST} is damaged: it is the manifest of step {step}")
    return Checkpoint(step=step, path=path, best=manifest.get("best") is True, metrics=manifest.get("metrics"))


def _size(entry: Any) -> Any:
    return entry.get("bytes") if isinstance(entry, dict) else entry


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
