"""Report on stderr which part of a run is starting, and how long each took.

    stages.begin("Ray")
    stages.begin("trainer ranks")           starting: Ray, done in 4.1 s
    stages.end(failed=True)                 starting: trainer ranks, failed after 18.0 s

The driver begins parts in several places: in the backend, in verl's trainer and in the replicas.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.status import Status


class Stages:
    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status: Status | None = None
        self._name, self._started = "", 0.0
        self.seconds: dict[str, float] = {}

    def begin(self, name: str) -> None:
        """Begin a part and end the one before; beginning the same part again does nothing."""
        if name == self._name:
            return
        self.end()
        self._name, self._started = name, time.monotonic()
        if self._console.is_terminal:
            self._status = self._console.status(f"starting: {name}")
            self._status.start()
        else:
            self._say(f"starting: {name} ...")

    def end(self, *, failed: bool = False) -> None:
        """End the current part, if there is one: it is done, or the start has failed."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._name:
            self.seconds[self._name] = time.monotonic() - self._started
            outcome = "failed after" if failed else "done in"
            self._say(f"starting: {self._name}, {outcome} {self.seconds[self._name]:.1f} s")
            self._name = ""

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


stages = Stages()
