#!/usr/bin/env python3
"""Test the faults of engine=verl: a worker or a server killed in a step, a full disk, Ctrl-C.

    scripts/verl_faults.py FOLDER                                        on a CPU, about five minutes on two cores
    scripts/verl_faults.py FOLDER device=cuda verl.actor_rollout_ref.rollout.name=vllm

One run is broken by each fault in turn and resumed each time. For each fault, the script prints the exit code, the last
line on stderr and the number of remaining processes. At the end it compares the metrics with those of an undisturbed
run: equal with our own servers; with vLLM, which uses its own random numbers, only steps and tasks are compared. The
full disk is a small tmpfs, which only root can mount; otherwise that fault is skipped.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from lfo.rundir import latest_checkpoint, read_metrics

SETTINGS = (
    "engine=verl",
    "preset=tiny",
    "levels=1",
    "rollout.prompts=2",
    "rollout.group_size=4",
    "eval.every=0",
    "checkpoint_every=1",
)
PATIENCE = 600.0
CLOSE = 1e-4


def lfo(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", "from lfo.cli import main; main()", "train", *arguments]
    # A separate process group, as in a terminal: Ctrl-C goes to all of it.
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def named(process: subprocess.Popen[str], *words: str) -> list[psutil.Process]:
    return [each for each in family(process) if any(word in " ".join(each.cmdline()) for word in words)]


def kill(*words: str) -> Callable[[subprocess.Popen[str], Path], None]:
    def work(process: subprocess.Popen[str], run: Path) -> None:
        named(process, *words)[0].send_signal(signal.SIGKILL)

    return work


def fill_the_disk(process: subprocess.Popen[str], run: Path) -> None:
    with (run.parent / "ballast").open("wb") as file:
        try:
            while True:
                file.write(b"x" * 65536)
                file.flush()
        except OSError:
            pass


def interrupt(process: subprocess.Popen[str], run: Path) -> None:
    os.killpg(process.pid, signal.SIGINT)


FAULTS: dict[str, Callable[[subprocess.Popen[str], Path], None]] = {
    "worker killed": kill("WorkerDict"),
    "server killed": kill("SamplerServer", "DualLoraServer"),
    "disk full": fill_the_disk,
    "Ctrl-C": interrupt,
}


def left_behind(before: list[psutil.Process]) -> int:
    """Return how many of these processes are alive after a short wait."""
    _, alive = psutil.wait_procs(before, timeout=20)
    return len([each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE])


def broken(fault: str, run: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Start or resume the run, wait for a new checkpoint, and break it."""
    first = checkpoint.step if (checkpoint := latest_checkpoint(run)) else 0
    process = lfo(*arguments)
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if (checkpoint := latest_checkpoint(run)) and checkpoint.step > first:
            break
        time.sleep(0.1)
    members = family(process)
    FAULTS[fault](process, run)
    _, error = process.communicate(timeout=PATIENCE)
    left = left_behind(members)
    (run.parent / "ballast").unlink(missing_ok=True)
    return {"fault": fault, "code": process.returncode, "said": error.strip().splitlines()[-1], "left": left}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE)
    return one == other


def differences(run: Path, whole: Path, *, sampled_alike: bool) -> list[str]:
    """Return where the rows of the broken run differ from those of the undisturbed one."""
    rows, others = read_metrics(run), read_metrics(whole)
    found = [] if len(rows) == len(others) else [f"{len(rows)} rows instead of {len(others)}"]
    for row, other in zip(rows, others, strict=False):
        names = [name for name in other if "second" not in name] if sampled_alike else ["step", "tasks_seen"]
        found += [f"step {other['step']}: {name}" for name in names if not same(row.get(name), other[name])]
    return found


def main() -> int:
    folder, settings = Path(sys.argv[1]), (*SETTINGS, *sys.argv[2:])
    small = folder / "small"
    small.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "lfo-faults", str(small)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    run, failed = small / "run", False
    try:
        arguments: tuple[str, ...] = (*settings, "steps=1000", f"output_dir={run}")
        for fault in FAULTS:
            if fault == "disk full" and not mounted:
                print("disk full: left out, only root can mount a small disk")
                continue
            seen = broken(fault, run, arguments)
            arguments = ("--resume", str(run))
            failed |= seen["left"] > 0 or seen["code"] not in (1, 130)
            print(f"{fault}: exit code {seen['code']}, {seen['left']} processes left\n    {seen['said']}", flush=True)
        checkpoint = latest_checkpoint(run)
        assert checkpoint is not None
        last = f"steps={checkpoint.step + 1}"
        for command in ((*arguments, last), (*settings, last, f"output_dir={folder / 'whole'}")):
            process = lfo(*command)
            _, error = process.communicate(timeout=PATIENCE)
            if process.returncode:
                print(error)
                return 1
        alike = not any("rollout.name=vllm" in each for each in settings)
        found = differences(run, folder / "whole", sampled_alike=alike)
        print(f"resumed to {last}: " + (", ".join(found[:8]) or "all metrics are those of an unbroken run"))
        return int(failed or bool(found))
    finally:
        if mounted:
            shutil.copytree(small, folder / "kept", ignore_dangling_symlinks=True)
            subprocess.run(["umount", str(small)], check=False)


if __name__ == "__main__":
    sys.exit(main())
