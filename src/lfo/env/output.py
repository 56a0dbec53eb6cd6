"""Redirect what environments print."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def redirected_stdout(target: TextIO) -> Iterator[None]:
    """Redirect stdout like `contextlib.redirect_stdout`, for calls that may end late in an abandoned thread.

    A late call restores stdout only if nothing else has replaced it meanwhile.
    """
    before, sys.stdout = sys.stdout, target
    try:
        yield
    finally:
        if sys.stdout is target:
            sys.stdout = before
