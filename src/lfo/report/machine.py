"""The load of a run's process and of the machine, from psutil and `nvidia-smi`.

Nothing here affects a run: its lock is found in the open files of its process, and never taken.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

GPU_EVERY = 5.0  # seconds between two calls of nvidia-smi
GPU_FIELDS = ("name", "utilization.gpu", "memory.used", "memory.total")


def process_of(run: Path) -> int | None:
    """Return the id of the process that writes a run."""
    lock = run / ".lock"
    try:
        number = int(lock.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    try:
        files = psutil.Process(number).open_files()
    except psutil.AccessDenied:
        return number  # a process of another user: trust the number
    except (psutil.Error, ValueError, OverflowError):
        return None
    # Otherwise another process has the number of a dead run now.
    return number if str(lock.resolve()) in (file.path for file in files) else None


class Machine:
    """Readings that need the previous one."""

    def __init__(self) -> None:
        self._spent: dict[int, tuple[float, float]] = {}  # process -> time of the last reading, CPU seconds then
        self._gpus: tuple[float, list[dict[str, Any]]] = (0.0, [])

    def process(self, number: int) -> dict[str, Any]:
        """Return the share of one CPU since the last reading (at first: since the start), and bytes of memory."""
        try:
            process = psutil.Process(number)
            spent, memory, now = sum(process.cpu_times()[:2]), process.memory_info().rss, time.time()
            before, spent_before = self._spent.get(number, (process.create_time(), 0.0))
        except psutil.Error:
            return {"process": number, "cpu": None, "memory": None}
        if now - before > 0.5:
            self._spent[number] = now, spent
        share = (spent - spent_before) / (now - before) if now > before else None
        return {"process": number, "cpu": share, "memory": memory}

    def whole(self) -> dict[str, Any]:
        return {"cores": psutil.cpu_count(), "load": psutil.getloadavg()[0], "gpus": self._gpus_now()}

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
    found = []
    for line in answer.splitlines():
        name, *numbers = (part.strip() for part in line.split(","))
        try:
            use, memory, total = map(float, numbers)
        except ValueError:
            continue  # "[N/A]": not supported by this GPU
        found.append({"name": name, "use": use / 100, "memory": int(memory) << 20, "memory_total": int(total) << 20})
    return found
