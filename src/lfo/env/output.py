"""What environments print is no output of ours."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def redirected_stdout(target: TextIO) -> Iterator[None]:
    """As `contextlib.redirect_stdout`, for calls that may end late, in a thread that nobody waits for any more: such a
    call finds somebody else's stdout, and leaves it alone."""
    before, sys.stdout = sys.stdout, target
    try:
        yield
    finally:
        if sys.stdout is target:
            sys.stdout = before
