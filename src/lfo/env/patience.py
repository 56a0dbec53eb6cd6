"""Call foreign code, such as environments, in parallel, each call with a timeout and retries.

Threads cannot be killed: a call that hangs keeps its daemon thread, and a new thread replaces it, so neither the other
calls nor the exit of the program wait for it.

What a call changes in the process is put back: streams, files 1 and 2, the working folder and defaults. What it prints
goes to stderr. What an environment does outside of its calls, in a thread of its own, cannot be noticed here. Nor can a
process survive `os._exit`, a signal, or C code that never returns: such a run is resumed from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TextIO, TypeVar, cast

from lfo.errors import EnvironmentFailed, LfoError

Result = TypeVar("Result")

MOST_PRINTED = 10_000  # characters that environments may print at a time
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


@contextlib.contextmanager
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


# --- the state of the process ----------------------------------------------------------------------------------------

# Defaults of the process, by the module that holds them, which need not be loaded: (module, read, write).
_DEFAULTS: tuple[tuple[str, str, Callable[[Any, Any], object]], ...] = (
    ("torch", "get_default_dtype", lambda module, value: module.set_default_dtype(value)),
    ("numpy", "geterr", lambda module, value: module.seterr(**value)),
)
_OUTPUTS = (1, 2)  # file descriptors


class _ProcessState:
    """A context that may be entered by several threads; the last one to leave restores what the first one found."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                for keep in (_keep_files, _keep_streams, _keep_folder, _keep_defaults):
                    keep(self._before.callback)
                self._before.enter_context(redirected_stdout())
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._before.close()


_STATE = _ProcessState()


def kept_process_state() -> contextlib.AbstractContextManager[None]:
    """Return the context around calls of foreign code; what it prints goes to stderr."""
    return _STATE


def _keep_folder(later: Callable[..., object]) -> None:
    with contextlib.suppress(OSError):  # it may have been removed, before or meanwhile
        later(_return_to, os.getcwd())


def _return_to(folder: str) -> None:
    with contextlib.suppress(OSError):
        os.chdir(folder)


def _keep_defaults(later: Callable[..., object]) -> None:
    for name, read, write in _DEFAULTS:
        if name in sys.modules:
            later(_restore_default, sys.modules[name], read, write, getattr(sys.modules[name], read)())


def _restore_default(module: Any, read: str, write: Callable[[Any, Any], object], before: Any) -> None:
    if getattr(module, read)() != before:
        write(module, before)


def _keep_files(later: Callable[..., object]) -> None:
    """Restore files 1 and 2: the next file that is opened would get the number of a closed one, and our output."""
    for number in _OUTPUTS:
        with contextlib.suppress(OSError):  # closed before
            later(_restore_file, number, os.dup(number))


def _restore_file(number: int, copy: int) -> None:
    if _identity(number) != _identity(copy):
        os.dup2(copy, number)
    os.close(copy)


def _identity(number: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _keep_streams(later: Callable[..., object]) -> None:
    later(_restore_streams, sys.stdout, sys.stderr)


def _restore_streams(*before: TextIO) -> None:
    sys.stdout, sys.stderr = (_usable(stream, number) for stream, number in zip(before, _OUTPUTS, strict=True))


def _usable(stream: TextIO, number: int) -> TextIO:
    """Return a stream, or a new one on its file if foreign code has closed or detached it."""
    try:
        closed = stream is not None and stream.closed
    except ValueError:  # detached
        closed = True
    if closed and _identity(number) is not None:
        return open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    return stream


class BoundedOutput:
    """A stdout for foreign code that writes to stderr, or to another target.

    It cannot be closed or detached, drops what exceeds `MOST_PRINTED` characters, and never raises: neither a closed
    stderr nor one that nobody reads is the fault of an environment. Everything else is that of stderr.
    """

    closed = False

    def __init__(self, target: TextIO | None = None) -> None:
        self._target, self._room = target, MOST_PRINTED

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self._room > 0:
            dropped = len(text) - self._room
            shown = text if dropped <= 0 else f"{text[: self._room]}\n(an environment printed more; it is not shown)\n"
            self._room -= len(text)
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, full, or None
                (self._target or sys.stderr).write(shown)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            (self._target or sys.stderr).flush()

    def close(self) -> None:
        pass

    def detach(self) -> Any:
        raise ValueError("this stdout cannot be detached")

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


@contextlib.contextmanager
def redirected_stdout(target: TextIO | None = None) -> Iterator[None]:
    """Redirect stdout to stderr or to another target, for calls that may end late in an abandoned thread.

    A late call restores stdout only if nothing else has replaced it meanwhile.
    """
    ours = cast(TextIO, BoundedOutput(target))
    before, sys.stdout = sys.stdout, ours
    try:
        yield
    finally:
        if sys.stdout is ours:
            sys.stdout = before


class QuietFactory(partial[Any]):
    """A factory whose environments print to stderr while they are made: stdout is for our own result."""

    def __call__(self) -> Any:
        with redirected_stdout():
            return super().__call__()
