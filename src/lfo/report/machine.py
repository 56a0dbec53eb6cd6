"""What a run's process and the machine are doing, seen from outside: `/proc`, and `nvidia-smi` where there is one.

Nothing here touches a run: its lock is found in the list of files that its process holds, and never asked for.
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
GPU_EVERY = 5.0  # seconds; asking costs some
GPU_FIELDS = ("name", "utilization.gpu", "memory.used", "memory.total")


def process_of(run: Path) -> int | None:
    """The process that writes a run now."""
    lock = run / ".lock"
    try:
        number = int(lock.read_text(encoding="utf-8"))
        os.kill(number, 0)
    except (OSError, ValueError, OverflowError):
        return None
    try:
        files = os.listdir(PROC / str(number) / "fd")
    except OSError:
        return number  # no /proc here, or somebody else's process: its number must be enough
    for file in files:
        with suppress(OSError):  # closed in the meantime
            if os.readlink(PROC / str(number) / "fd" / file) == str(lock.resolve()):
                return number
    return None  # the number of a dead run belongs to another process now


class Machine:
    """Readings that need the one before them."""

    def __init__(self) -> None:
        self._spent: dict[int, tuple[float, float]] = {}  # process -> when it was looked at, processor seconds by then
        self._gpus: tuple[float, list[dict[str, Any]]] = (0.0, [])

    def process(self, number: int) -> dict[str, Any]:
        """Share of one processor since the last look (at first: since it began), and bytes in memory."""
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
    """What nvidia-smi says, a line a GPU.

    >>> read_gpus("NVIDIA H200, 87, 1024, 143771\\n")
    [{'name': 'NVIDIA H200', 'use': 0.87, 'memory': 1073741824, 'memory_total': 150754820096}]
    """
    found: list[Mapping[str, Any]] = []
    for line in answer.splitlines():
        name, *numbers = (part.strip() for part in line.split(","))
        try:
            use, memory, total = map(float, numbers)
        except ValueError:
            continue  # "[N/A]": a GPU that does not tell
        found.append({"name": name, "use": use / 100, "memory": int(memory) << 20, "memory_total": int(total) << 20})
    return [dict(each) for each in found]
