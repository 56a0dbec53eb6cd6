"""Call foreign code, such as environments, in parallel, each call with a timeout and retries.

What it changes in the process is put back (`process_state`). Threads cannot be killed: a call that hangs keeps its
daemon thread, and a new thread replaces it, so neither the other calls nor the exit of the program wait for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

from lfo.env.process_state import kept_process_state
from lfo.errors import EnvironmentFailed, LfoError

Result = TypeVar("Result")

MOST_WORDS = 500  # characters of a failure
RETRIES = 2  # of a call outside of rollouts that raised
STARTING = 10  # such a call may load data first, so it gets so many times the time of a step


class EnvironmentTimedOut(EnvironmentFailed):
    pass


class EnvironmentRaised(EnvironmentFailed):
    """The call raised, so it may be tried again; other failures are final."""


def call_all(
    calls: Sequence[Callable[[], Result]],
    *,
    timeout: float,
    retries: int,
    workers: int,
    what: str = "the environment",
) -> list[Result | EnvironmentFailed]:
    """Return the result or the failure of each call, in order. Retry a call that raises, but not one that times out.

    A failure says `what` raised or did not answer, if the call does not say it itself (`naming`).
    """
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
            outcome = _attempt(calls[index], retries, what)
            with changed:
                late = started.pop(index, None) is None
                if not late:
                    outcomes[index] = outcome
                changed.notify()
            if late:
                return  # another thread has replaced this one

    def start_worker() -> None:
        _Worker(target=work, name="environment", daemon=True).start()

    with kept_process_state(), changed:
        for _ in range(min(workers, len(calls))):
            start_worker()
        while len(outcomes) < len(calls):
            now = time.monotonic()
            for index in [index for index, start in started.items() if now - start > timeout]:
                del started[index]
                outcomes[index] = EnvironmentTimedOut(f"{what} did not answer within {timeout:g} seconds")
                start_worker()
            next_deadline = min((start + timeout for start in started.values()), default=now + timeout)
            if len(outcomes) < len(calls):
                changed.wait(max(0.001, next_deadline - now))
        return [outcomes[index] for index in range(len(calls))]


def ask(call: Callable[[], Result], *, timeout: float, what: str = "the environment") -> Result:
    """Return the answer of one call outside of rollouts, or raise its failure; an `LfoError` is raised as it is.

    `timeout` is that of a step. Inside of a call that has a timeout, it is an ordinary call.
    """
    if isinstance(threading.current_thread(), _Worker):
        with naming(what):
            return call()
    (answer,) = call_all([call], timeout=STARTING * timeout, retries=RETRIES, workers=1, what=what)
    if isinstance(answer, EnvironmentFailed):
        raise answer.__cause__ if isinstance(answer.__cause__, LfoError) else answer
    return answer


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn what foreign code raises into an `EnvironmentRaised` that says `what` raised it.

    An `LfoError` stays what it is: its sentence is for the user.
    """
    try:
        yield
    except LfoError:
        raise
    except BaseException as error:  # even SystemExit; only the user's own Ctrl-C, in the main thread, is none of it
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise EnvironmentRaised(f"{what} raised {words_of(error)}"[:MOST_WORDS]) from error


def name_of(made: Any) -> str:
    """Return the name of an environment's class, or of the class or function that makes one.

    >>> name_of(partial(dict, size=5)), name_of({"size": 5})
    ('dict', 'dict')
    """
    while isinstance(made, partial):
        made = made.func
    return made.__name__ if isinstance(made, type | FunctionType | MethodType) else type(made).__name__


def words_of(error: BaseException) -> str:
    """Return class and message of an exception in one line; the message may be empty, and asking for it may raise.

    >>> words_of(OSError("no temple")), words_of(OSError())
    ('OSError: no temple', 'OSError without a message')
    """
    try:
        message = " ".join(plain_text(str(error))[: 2 * MOST_WORDS].split())
    except BaseException as second:
        message = f"a message that cannot be read ({type(second).__name__})"
    return f"{type(error).__name__}: {message}" if message else f"{type(error).__name__} without a message"


def plain_text(text: str) -> str:
    """Return text of foreign code as an ordinary string that every file can hold: without halves of surrogate pairs.

    >>> plain_text("one half: \\ud800")
    'one half: ?'
    """
    text = str.__str__(text)  # of a subclass, its content
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")


class _Worker(threading.Thread):
    """A thread whose calls have a timeout."""


def _attempt(call: Callable[[], Result], retries: int, what: str) -> Result | EnvironmentFailed:
    failures: list[EnvironmentFailed] = []
    while len(failures) <= retries:
        try:
            with naming(what):
                return call()
        except EnvironmentRaised as failure:
            failures.append(failure)
        except EnvironmentFailed as failure:  # a deliberate failure; a retry would not help
            return _readable(failure, what)
        except LfoError as error:
            failures.append(EnvironmentRaised(f"{what} raised {words_of(error)}"[:MOST_WORDS]))
            failures[-1].__cause__ = error
    return failures[0]  # later errors may only be caused by the retry


def _readable(failure: EnvironmentFailed, what: str) -> EnvironmentFailed:
    """Return a failure whose words can be read and are bounded: environments may raise `EnvironmentFailed` too."""
    try:
        words = plain_text(str(failure))[:MOST_WORDS]
    except BaseException:
        words = ""
    kind = EnvironmentTimedOut if isinstance(failure, EnvironmentTimedOut) else EnvironmentFailed
    return kind(words or f"{what} failed without a message")
