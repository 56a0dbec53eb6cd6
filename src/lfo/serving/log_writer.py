"""Files of recorded conversations: one line at a time, rotated by size, readable by their owner only.

A line is written in one call, or not at all: what a full disk left of it is cut off again. Lines that could not be
written wait in memory, up to a limit, and are tried again with the next one. Nothing here raises.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lfo.env.log_folder import OUTCOMES, ROLLOUTS

MOST_WAITING = 64_000_000  # bytes that wait for a disk with room; the oldest are given up first
SAY_EVERY = 60.0  # seconds between two complaints

logger = logging.getLogger(__name__)


class LogWriter:
    """Writes into one folder; several processes may share it."""

    def __init__(self, folder: Path, *, most_bytes: int) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._start = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._rotations = 0
        self._rollouts: _File | None = None
        self._outcomes: _File | None = None
        self._waiting: deque[tuple[bool, bytes]] = deque()
        self._waiting_bytes = 0
        self._complained = -SAY_EVERY
        self.written = self.lost = 0  # lines of rollouts

    def write(self, record: Mapping[str, Any]) -> None:
        self._enqueue(True, record)

    def write_outcome(self, outcome: Mapping[str, Any]) -> None:
        self._enqueue(False, outcome)

    def close(self) -> None:
        self._flush()
        if self._waiting:
            self.lost += sum(is_rollout for is_rollout, _ in self._waiting)
            logger.warning("%d lines could not be written to %s and are lost", len(self._waiting), self._folder)
        for file in (self._rollouts, self._outcomes):
            if file is not None:
                file.close()

    def _enqueue(self, is_rollout: bool, value: Mapping[str, Any]) -> None:
        line = (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")
        self._waiting.append((is_rollout, line))
        self._waiting_bytes += len(line)
        self._flush()
        while self._waiting_bytes > MOST_WAITING:
            was_rollout, oldest = self._waiting.popleft()
            self._waiting_bytes -= len(oldest)
            self.lost += was_rollout

    def _flush(self) -> None:
        try:
            while self._waiting:
                is_rollout, line = self._waiting[0]
                self._file_for(is_rollout, len(line)).append(line)
                self._waiting.popleft()
                self._waiting_bytes -= len(line)
                self.written += is_rollout
        except OSError as error:
            if time.monotonic() - self._complained >= SAY_EVERY:
                self._complained = time.monotonic()
                waiting = len(self._waiting)
                logger.warning("cannot write to %s: %s; %d lines wait", self._folder, error.strerror, waiting)

    def _file_for(self, is_rollout: bool, length: int) -> _File:
        if not is_rollout:
            self._outcomes = self._outcomes or _File(self._folder / f"{OUTCOMES}{self._start}.jsonl")
            return self._outcomes
        if self._rollouts is None or (self._rollouts.size and self._rollouts.size + length > self._most_bytes):
            number = self._rotations + 1
            new = _File(self._folder / f"{ROLLOUTS}{self._start}-{number:04d}.jsonl")
            if self._rollouts is not None:
                self._rollouts.close()
            self._rollouts, self._rotations = new, number
        return self._rollouts


class _File:
    """A new file to which whole lines are appended."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self.size = 0

    def append(self, line: bytes) -> None:
        done = 0
        try:
            while done < len(line):
                done += os.write(self._descriptor, line[done:])
        except OSError:
            if done:
                os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(line)

    def close(self) -> None:
        os.close(self._descriptor)
