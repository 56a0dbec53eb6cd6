"""Standard streams that cannot end the work: whoever reads them may go away.

`lfo train ... 2>&1 | head -1` closes the pipe; `2> /dev/full` and `2>&-` cannot be written at all. What goes to stderr
is for people, so a failed write there is dropped.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO, Any, TextIO, cast

from lfo.errors import WorkError


class Lossy:
    """A text stream that drops what cannot be written, and that nothing can close."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # a ValueError: the stream is closed, or cannot encode the text
            return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def close(self) -> None:
        """Do nothing: an environment that closes its output must not close ours."""

    def isatty(self) -> bool:
        return not self._stream.closed and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lossy(stream: TextIO | None) -> TextIO | None:
    return stream if stream is None or isinstance(stream, Lossy) else cast(TextIO, Lossy(stream))


def protect_standard_streams() -> None:
    """Open closed descriptors and make stderr lossy; for the start of a command.

    A closed descriptor 1 or 2 would be given to the next file that is opened, and receive what is printed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = cast(TextIO, lossy(sys.stderr or os.fdopen(2, "w", closefd=False)))


def flush_stdout() -> None:
    """Write what is left of the result of a command; raise a `WorkError` if nobody can read it."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more when it ends
        raise WorkError(f"cannot write the output: {getattr(error, 'strerror', None) or error}") from error
