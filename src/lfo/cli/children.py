"""Ordinary `lfo train` processes, as `lfo demo` and `lfo ablate` start and watch them. It trains nothing itself.

Whoever starts a child keeps its standard input open and never writes: when the parent ends, however it ends, the
child reads the end of that input and ends too. A run survives being ended at any moment, so nothing is lost but the
steps since its last checkpoint, and no forgotten process keeps a folder locked.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lfo.errors import UsageError

if TYPE_CHECKING:
    from lfo.config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildRun:
    """A run that is wanted, and how far what lies in its folder has come."""

    name: str
    folder: Path
    settings: tuple[str, ...]
    config: RunConfig  # the settings, resolved

    @property
    def started(self) -> bool:
        return (self.folder / "config.yaml").is_file()

    @property
    def finished(self) -> bool:
        """Adapters are the last thing that a run writes; beside fewer steps than wanted they are old."""
        from lfo.evaluation.runs import read_run

        return (self.folder / "adapters").is_dir() and read_run(self.folder).finished

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    def refuse_other_settings(self) -> None:
        """What lies in the folder already must be what is wanted."""
        from lfo.config import differences, from_yaml

        if not self.started:
            return
        for name, (before, now) in differences(from_yaml(self.folder / "config.yaml"), self.config).items():
            if name != "output_dir":
                raise UsageError(
                    f"{self.folder} was trained with {name}={before}, not {now}; choose another --output-dir"
                )

    def start(self) -> subprocess.Popen[bytes]:
        """Begin the run, or go on with it."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        arguments = ("--resume", str(self.folder)) if self.started else self.settings
        with open(self.log, "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-c", "from lfo.cli.children import main; main()", "train", *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.removeprefix("lfo: ") for line in reversed(lines) if line.strip()), "it said nothing")


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # does nothing to one that has ended; a run survives it
    process.wait()
    if process.stdin:
        process.stdin.close()


def main() -> None:
    """The entry point of a child: `lfo`, for as long as the parent lives."""
    from lfo.cli import main

    end_with_parent()
    main()


def end_with_parent() -> None:
    """Watch standard input from now on, and end this process when nobody holds its other end any more."""

    def watch() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()
