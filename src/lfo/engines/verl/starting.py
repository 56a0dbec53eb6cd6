"""What a run is waiting for while its processes start, told on stderr: a part begins, and how long it took.

    stages.begin("Ray")
    stages.begin("trainer ranks")           starting: Ray, done in 4.1 s
    stages.end(failed=True)                 starting: trainer ranks, failed after 18.0 s

Parts are begun wherever they begin on the driver: by the backend, by verl's trainer and by the replicas that it makes.
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
        """The next part begins, and with it the one before is done; the same again is no other part."""
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
        """The last part is done, or has failed with all that it was part of."""
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
