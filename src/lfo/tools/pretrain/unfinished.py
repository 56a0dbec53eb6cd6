"""What a practice has so far, in a hidden folder beside its base: rows, and snapshots of the training.

base                      the folder that is being made
.base.unfinished/         settings.json, practice.npz, practice.json, training.safetensors
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from lfo.atomic import temporary_path, write_json_atomic, writing
from lfo.tools.pretrain.practice import Practice
from lfo.tools.pretrain.snapshots import Snapshots


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The folder; it is emptied if it was made with other settings."""

    folder: Path

    @classmethod
    def beside(cls, output_dir: Path, settings: Mapping[str, Any]) -> Unfinished:
        folder = output_dir.with_name(f".{output_dir.name}.unfinished")
        if _read(folder / "settings.json") != settings:
            shutil.rmtree(folder, ignore_errors=True)
        with writing(f"the practice {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            write_json_atomic(folder / "settings.json", dict(settings))
        return cls(folder)

    @property
    def snapshots(self) -> Snapshots:
        return Snapshots(self.folder / "training.safetensors")

    def practice(self) -> Practice | None:
        """Return the rows that are there, or None."""
        told = _read(self.folder / "practice.json")
        path = self.folder / "practice.npz"
        with suppress(OSError, ValueError, KeyError, EOFError, BadZipFile), np.load(path, allow_pickle=False) as arrays:
            return Practice(
                tokens=arrays["tokens"],
                wanted=arrays["wanted"],
                steps=told["steps"],
                figures=told["figures"],
                warnings=tuple(told["warnings"]),
            )
        return None

    def keep(self, practice: Practice) -> None:
        path = self.folder / "practice.npz"
        temporary = temporary_path(path)
        with writing(f"the practice {self.folder}"):
            with temporary.open("wb") as file:
                np.savez_compressed(file, tokens=practice.tokens, wanted=practice.wanted)
            told = {"steps": practice.steps, "figures": dict(practice.figures), "warnings": list(practice.warnings)}
            write_json_atomic(self.folder / "practice.json", told)
            os.replace(temporary, path)  # last: the rows are there only if the rest is

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _read(path: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads(path.read_bytes())
    return {}
