"""Start and monitor ordinary `lfo train` processes, for `lfo demo` and `lfo ablate`.

The parent keeps the standard input of a child open and never writes to it. When the parent ends for any reason, the
child reads the end of its input and ends too. A run can be killed at any time, so only the steps since its last
checkpoint are lost, and no orphaned process keeps a folder locked.
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
    """A run to train, and how far the run in its folder has come."""

    name: str
    folder: Path
    overrides: tuple[str, ...]
    config: RunConfig  # the overrides, resolved

    @classmethod
    def wanted(cls, name: str, folder: Path, overrides: Sequence[str]) -> ChildRun:
        """Return the run of these overrides in a folder; a run that is already there must have the same config."""
        from lfo.config import differences, from_yaml, load_config

        own = (*overrides, f"output_dir={folder}")
        run = cls(name=name, folder=folder, overrides=own, config=load_config(own))
        if run.started:
            for each, (before, now) in differences(from_yaml(folder / "config.yaml"), run.config).items():
                found = each == "imagine.form" and now == "auto"  # the run has found its form
                if each != "output_dir" and not found:
                    raise UsageError(
                        f"{folder} was trained with {each}={before}, not {now}; choose another --output-dir"
                    )
        return run

    @property
    def started(self) -> bool:
        return (self.folder / "config.yaml").is_file()

    @property
    def finished(self) -> bool:
        """Whether the run is complete: it writes its adapters last, and they may be from a shorter run."""
        from lfo.runs.reading import read_run

        return (self.folder / "adapters").is_dir() and read_run(self.folder).finished

    def start(self) -> subprocess.Popen[bytes]:
        """Start or resume the run."""
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
    """Train runs, `jobs` in parallel; end all of them when this function ends.

    `look` is called twice a second for each running process, with its exit code (None while it runs) and the names of
    all running ones. An exception in `look` ends all runs.
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
    process.terminate()  # no effect on a process that has ended; a run can be terminated at any time
    process.wait()
    if process.stdin:
        process.stdin.close()


def end_with_parent() -> None:
    """End this process when the parent closes standard input."""

    def watch() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()
