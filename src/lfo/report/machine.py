"""The load of a run's process and of the machine, from `/proc` and `nvidia-smi`.

Nothing here affects a run: its lock is found in the open files of its process, and never taken.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PROC = Path("/proc")
GPU_EVERY = 5.0  # seconds between two calls of nvidia-smi
GPU_FIELDS = ("name", "utilization.gpu", "memory.used", "memory.total")


def process_of(run: Path) -> int | None:
    """Return the id of the process that writes a run."""
    lock = run / ".lock"
    try:
        number = int(lock.read_text(encoding="utf-8"))
        os.kill(number, 0)
    except (OSError, ValueError, OverflowError):
        return None
    try:
        files = os.listdir(PROC / str(number) / "fd")
    except OSError:
        return number  # no /proc, or a process of another user: trust the number
    for file in files:
        with suppress(OSError):  # closed meanwhile
            if os.readlink(PROC / str(number) / "fd" / file) == str(lock.resolve()):
                return number
    return None  # another process has the number of a dead run now


class Machine:
    """Readings that need the previous one."""

    def __init__(self) -> None:
        self._spent: dict[int, tuple[float, float]] = {}  # process -> time of the last reading, CPU seconds then
        self._gpus: tuple[float, list[dict[str, Any]]] = (0.0, [])

    def process(self, number: int) -> dict[str, Any]:
        """Return the share of one CPU since the last reading (at first: since the start), and bytes of memory."""
        try:
            fields = (PROC / str(number) / "stat").read_text().rpartition(")")[2].split()
            ticks = os.sysconf("SC_CLK_TCK")
            spent, began = (int(fields[11]) + int(fields[12])) / ticks, int(fields[19]) / ticks
            now = float((PROC / "uptime").read_text().split()[0])
            memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            return {"process": number, "cpu": None, "memory": None}
        before, spent_before = self._spent.get(number, (began, 0.0))
        if now - before > 0.5:
            self._spent[number] = now, spent
        share = (spent - spent_before) / (now - before) if now > before else None
        return {"process": number, "cpu": share, "memory": memory}

    def whole(self) -> dict[str, Any]:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return {"cores": os.cpu_count(), "load": load, "gpus": self._gpus_now()}

    def _gpus_now(self) -> list[dict[str, Any]]:
        asked, gpus = self._gpus
        if not asked or time.monotonic() - asked > GPU_EVERY:
            gpus = read_gpus(_ask_nvidia_smi())
            self._gpus = time.monotonic(), gpus
        return gpus


def _ask_nvidia_smi() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def read_gpus(answer: str) -> list[dict[str, Any]]:
    """Parse the output of nvidia-smi, one line for each GPU.

    >>> read_gpus("NVIDIA H200, 87, 1024, 143771\\n")
    [{'name': 'NVIDIA H200', 'use': 0.87, 'memory': 1073741824, 'memory_total': 150754820096}]
    """
    found: list[Mapping[str, Any]] = []
    for line in answer.splitlines():
        name, *numbers = (part.strip() for part in line.split(","))
        try:
            use, memory, total = map(float, numbers)
        except ValueError:
            continue  # "[N/A]": not supported by this GPU
        found.append({"name": name, "use": use / 100, "memory": int(memory) << 20, "memory_total": int(total) << 20})
    return [dict(each) for each in found]
