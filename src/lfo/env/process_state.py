"""Put back what environments change in their process: streams, files 1 and 2, the working folder and defaults.

    with kept_process_state():
        environment.reset(task)

What an environment does outside of its calls, in a thread of its own, cannot be noticed here. Nor can a process survive
`os._exit`, a signal, or C code that never returns: such a run is resumed from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from lfo.env.output import redirected_stdout

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
                for context in (_kept_files, _kept_streams, _kept_folder, _kept_defaults, redirected_stdout):
                    self._before.enter_context(context())
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


@contextlib.contextmanager
def _kept_folder() -> Iterator[None]:
    folder = None
    with contextlib.suppress(OSError):  # it may have been removed, before or meanwhile
        folder = os.getcwd()
    try:
        yield
    finally:
        if folder is not None:
            with contextlib.suppress(OSError):
                os.chdir(folder)


@contextlib.contextmanager
def _kept_defaults() -> Iterator[None]:
    before = {name: getattr(sys.modules[name], read)() for name, read, _ in _DEFAULTS if name in sys.modules}
    try:
        yield
    finally:
        for name, read, write in _DEFAULTS:
            if name in before and getattr(sys.modules[name], read)() != before[name]:
                write(sys.modules[name], before[name])


@contextlib.contextmanager
def _kept_files() -> Iterator[None]:
    """Restore files 1 and 2: the next file that is opened would get the number of a closed one, and our output."""
    copies = {}
    for number in _OUTPUTS:
        with contextlib.suppress(OSError):  # closed before
            copies[number] = os.dup(number)
    try:
        yield
    finally:
        for number, copy in copies.items():
            if _identity(number) != _identity(copy):
                os.dup2(copy, number)
            os.close(copy)


def _identity(number: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _kept_streams() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    try:
        yield
    finally:
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
