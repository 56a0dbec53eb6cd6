"""Redirect what environments print."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

MOST_PRINTED = 10_000  # characters that environments may print at a time


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
