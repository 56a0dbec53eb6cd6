"""Call foreign code, such as environments, in parallel, each call with a timeout and retries.

Output of the calls goes to stderr, and a change of the working directory is undone. Threads cannot be killed: a call
that hangs keeps its daemon thread, and a new thread replaces it, so neither the other calls nor the exit of the program
wait for it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from lfo.errors import EnvironmentFailed

Result = TypeVar("Result")


class EnvironmentTimedOut(EnvironmentFailed):
    pass


def call_all(
    calls: Sequence[Callable[[], Result]], *, timeout: float, retries: int, workers: int
) -> list[Result | EnvironmentFailed]:
    """Return the result or the failure of each call, in order. Retry a call that raises, but not one that times out."""
    outcomes: dict[int, Result | EnvironmentFailed] = {}
    started: dict[int, float] = {}  # start times of the calls in progress
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    changed = threading.Condition()
    for index in range(len(calls)):
        waiting.put(index)

    def work() -> None:
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            with changed:
                started[index] = time.monotonic()
            outcome = _attempt(calls[index], retries)
            with changed:
                late = started.pop(index, None) is None
                if not late:
                    outcomes[index] = outcome
                changed.notify()
            if late:
                return  # another thread has replaced this one

    def start_worker() -> None:
        threading.Thread(target=work, name="environment", daemon=True).start()

    with _GUARD, changed:
        for _ in range(min(workers, len(calls))):
            start_worker()
        while len(outcomes) < len(calls):
            now = time.monotonic()
            for index in [index for index, start in started.items() if now - start > timeout]:
                del started[index]
                outcomes[index] = EnvironmentTimedOut(f"the environment did not answer within {timeout:g} seconds")
                start_worker()
            next_deadline = min((start + timeout for start in started.values()), default=now + timeout)
            if len(outcomes) < len(calls):
                changed.wait(max(0.001, next_deadline - now))
        return [outcomes[index] for index in range(len(calls))]


class _ProcessGuard:
    """Redirects stdout to stderr and restores the working directory around foreign calls.

    Both are global to the process, so if several contexts overlap, the last one to exit restores them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before.callback(os.chdir, os.getcwd())
                self._before.enter_context(contextlib.redirect_stdout(sys.stderr))
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._before.close()


_GUARD = _ProcessGuard()


def _attempt(call: Callable[[], Result], retries: int) -> Result | EnvironmentFailed:
    errors: list[BaseException] = []
    while len(errors) <= retries:
        try:
            return call()
        except EnvironmentFailed as failure:  # a deliberate failure; a retry would not help
            return failure
        except BaseException as error:  # anything it raises, even SystemExit, fails only this rollout
            errors.append(error)
    cause = errors[0]  # later errors may only be caused by the retry
    return EnvironmentFailed(f"the environment raised {type(cause).__name__}: {cause}"[:500])
