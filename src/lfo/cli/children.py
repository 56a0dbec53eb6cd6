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
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lfo.errors import UsageError

if TYPE_CHECKING:
    from lfo.config import RunConfig

LOOK_EVERY = 0.5  # seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildRun:
    """A run that is wanted, and how far what lies in its folder has come."""

    name: str
    folder: Path
    overrides: tuple[str, ...]
    config: RunConfig  # the overrides, resolved

    @classmethod
    def wanted(cls, name: str, folder: Path, overrides: Sequence[str]) -> ChildRun:
        """The run of these overrides in a folder; a run that is already there must have the same config."""
        from lfo.config import differences, from_yaml, load_config

        own = (*overrides, f"output_dir={folder}")
        run = cls(name=name, folder=folder, overrides=own, config=load_config(own))
        if run.started:
            for each, (before, now) in differences(from_yaml(folder / "config.yaml"), run.config).items():
                if each != "output_dir":
                    raise UsageError(
                        f"{folder} was trained with {each}={before}, not {now}; choose another --output-dir"
                    )
        return run

    @property
    def started(self) -> bool:
        return (self.folder / "config.yaml").is_file()

    @property
    def finished(self) -> bool:
        """Adapters are the last thing that a run writes; beside fewer steps than wanted they are old."""
        from lfo.evaluation.runs import read_run

        return (self.folder / "adapters").is_dir() and read_run(self.folder).finished

    def start(self) -> subprocess.Popen[bytes]:
        """Begin the run, or go on with it."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        arguments = ("--resume", str(self.folder)) if self.started else self.overrides
        with open(self._log, "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "lfo.cli.child", "train", *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.removeprefix("lfo: ") for line in reversed(lines) if line.strip()), "it said nothing")

    @property
    def _log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")


def train_all(
    runs: Sequence[ChildRun], *, jobs: int, look: Callable[[ChildRun, int | None, Sequence[str]], None]
) -> None:
    """Train runs, so many at the same time; none outlives this call.

    `look` is told twice a second of each one that runs: its exit code, None while it has none, and the names of all
    that run. What it raises ends them.
    """
    waiting = list(runs)
    running: dict[str, tuple[ChildRun, subprocess.Popen[bytes]]] = {}
    with ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                running[run.name] = run, run.start()
                stack.callback(_stop, running[run.name][1])
            time.sleep(LOOK_EVERY)
            for run, process in list(running.values()):
                code = process.poll()
                names = list(running)
                if code is not None:
                    del running[run.name]
                    _stop(process)
                look(run, code, names)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # does nothing to one that has ended; a run survives it
    process.wait()
    if process.stdin:
        process.stdin.close()


def end_with_parent() -> None:
    """Watch standard input from now on, and end this process when nobody holds its other end any more."""

    def watch() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()
