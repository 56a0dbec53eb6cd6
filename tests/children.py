"""Start processes in tests as a terminal does."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from typing import Any


def start_as_in_a_terminal(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """A child that Ctrl-C interrupts.

    A suite that was itself started with SIGINT ignored (`nohup make test &`, some CI systems) would hand that on, and
    the product rightly respects it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, text=True, **options)
    finally:
        signal.signal(signal.SIGINT, before)
