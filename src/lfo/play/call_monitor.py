"""Call foreign code with a time limit and record its side effects on the process."""

from __future__ import annotations

import io
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lfo.env.patience import call_all, redirected_stdout


class CallMonitor:
    """Makes calls one after the other, with a time limit, and records their side effects.

    `most_chars` is the longest text that is worth reading; None: any.
    """

    def __init__(self, timeout: float, most_chars: int | None = None) -> None:
        self._timeout = timeout
        self.most_chars = most_chars
        self._printed = ""
        self._moved = self._drew = False

    def call(self, function: Callable[[], Any], what: str = "the environment") -> tuple[Any, float]:
        """Return the result, or an `EnvironmentFailed`, and the seconds that the call took; see `call_all`."""
        random_before, printed, folder = _random_state(), io.StringIO(), os.getcwd()

        def watched() -> Any:
            try:
                with redirected_stdout(printed):
                    return function()
            finally:
                self._moved |= _working_directory() != folder

        started = time.perf_counter()
        (outcome,) = call_all([watched], timeout=self._timeout, retries=0, workers=1, what=what)
        seconds = time.perf_counter() - started
        self._printed = self._printed or printed.getvalue().strip()
        self._drew |= _random_state() != random_before
        return outcome, seconds

    def effects(self) -> list[str]:
        """Return the recorded side effects, one sentence each."""
        seen = {
            "it draws from the global random state, so parallel rollouts are not repeatable": self._drew,
            "it changes the working directory of the process": self._moved,
            f"it prints: {self._printed.partition(chr(10))[0][:80]!r}": bool(self._printed),
        }
        return [sentence for sentence, happened in seen.items() if happened]


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the call has removed it
        return None


def _random_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, bytes(np.asarray(keys)), *rest
