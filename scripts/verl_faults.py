#!/usr/bin/env python3
"""Test the faults of engine=verl: one of its processes killed in a step, a full disk, Ctrl-C in a step or at the start.

    scripts/verl_faults.py FOLDER                               on a CPU, about ten minutes on two cores
    scripts/verl_faults.py FOLDER worker interrupt              only these, of: start worker server loop balancer queue
                                                                storage disk interrupt
    scripts/verl_faults.py FOLDER device=cuda verl.actor_rollout_ref.rollout.name=vllm

One run is broken by each fault in turn and resumed each time. For each fault, the script prints the exit code, the last
line on stderr and the number of remaining processes. At the end it compares the metrics with those of an undisturbed
run: equal with our own servers. vLLM uses its own random numbers, so there only steps and tasks are compared: none is
missing and none occurs twice. The full disk is a small tmpfs, which only root can mount; otherwise that fault is
skipped. LIMIT sets the seconds that a start, a fault and an end may take each (600). FOLDER is emptied first.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from lfo.checkpoints import latest_checkpoint
from lfo.runs.folder import read_metrics

SETTINGS = (
    "engine=verl",
    "preset=tiny",
    "levels=1",
    "rollout.prompts=2",
    "rollout.group_size=4",
    "eval.every=0",
    "checkpoint_every=1",
)
PATIENCE = float(os.environ.get("LIMIT", "600"))
CLOSE = 1e-4


def lfo(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", "from lfo.cli import main; main()", "train", *arguments]
    # A separate process group, as in a terminal: Ctrl-C goes to all of it.
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def named(process: subprocess.Popen[str], *words: str) -> list[psutil.Process]:
    found = []
    for each in family(process):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            found += [each] if any(word in " ".join(each.cmdline()) for word in words) else []
    return found


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
    "start": interrupt,  # while the ranks start; the others come after a checkpoint
    "worker": kill("WorkerDict"),
    "server": kill("SamplerServer", "VllmServer"),
    "loop": kill("AgentLoopWorker"),
    "balancer": kill("LoadBalancer"),
    "queue": kill("TransferQueueController"),
    "storage": kill("SimpleStorageUnit"),
    "disk": fill_the_disk,
    "interrupt": interrupt,
}


def last_step(run: Path) -> int:
    checkpoint = latest_checkpoint(run)
    return checkpoint.step if checkpoint else 0


def left_behind(before: list[psutil.Process]) -> int:
    """Return how many of these processes are alive after a short wait."""
    _, alive = psutil.wait_procs(before, timeout=20)
    return len([each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE])


def broken(fault: str, run: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Start or resume the run, wait for a new checkpoint, and break it."""
    first = last_step(run)
    process, began = lfo(*arguments), time.monotonic()
    while process.poll() is None and time.monotonic() < began + PATIENCE:
        if named(process, "WorkerDict") if fault == "start" else last_step(run) > first:
            break
        time.sleep(0.1)
    else:
        return {"code": None, "said": f"no checkpoint came: {ended(process)[-1]}", "left": 0}
    members, started = family(process), time.monotonic()
    try:
        FAULTS[fault](process, run)
    except (IndexError, psutil.Error):  # nobody there to be killed
        process.terminate()
    said = ended(process)
    left = left_behind(members)
    (run.parent / "ballast").unlink(missing_ok=True)
    times = f"started in {started - began:.0f} s, ended {time.monotonic() - started:.0f} s after the fault"
    return {"code": process.returncode, "said": f"{said[-1]}\n    {times}", "left": left}


def ended(process: subprocess.Popen[str]) -> list[str]:
    """What it has said when it ends, which it is made to if it does not by itself."""
    try:
        _, error = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        for each in (*family(process), psutil.Process(process.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        _, error = process.communicate()
        error += f"\nstill running after {PATIENCE:.0f} s, and was killed"
    return error.strip().splitlines() or [f"nothing, exit code {process.returncode}"]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE)
    return one == other


def differences(run: Path, whole: Path) -> list[str]:
    """Return where the rows of the broken run differ from those of the undisturbed one."""
    rows, others = read_metrics(run), read_metrics(whole)
    found = [] if len(rows) == len(others) else [f"{len(rows)} rows instead of {len(others)}"]
    for row, other in zip(rows, others, strict=False):
        names = [name for name in other if "second" not in name]
        found += [f"step {other['step']}: {name}" for name in names if not same(row.get(name), other[name])]
    return found


def gaps(run: Path) -> list[str]:
    """What is wrong with the order of the rows: a step that is missing or there twice, tasks that do not add up."""
    rows = read_metrics(run)
    steps, tasks = [row["step"] for row in rows], [row["tasks_seen"] for row in rows]
    found = [] if steps == list(range(1, len(steps) + 1)) else [f"steps {steps}"]
    return found + ([] if tasks == [tasks[0] * step for step in steps] else [f"tasks seen {tasks}"])


def resumed(run: Path, folder: Path, arguments: tuple[str, ...], settings: tuple[str, ...]) -> list[str]:
    """One step more, and where the run is not what it would have been without the faults."""
    checkpoint = latest_checkpoint(run)
    if checkpoint is None:
        return ["no checkpoint to go on from"]
    last = f"steps={checkpoint.step + 1}"
    sampled_alike = not any("rollout.name=vllm" in each for each in settings)
    commands = [(*arguments, last), (*settings, last, f"output_dir={folder / 'whole'}")]
    for command in commands if sampled_alike else commands[:1]:
        process = lfo(*command)
        said = ended(process)
        if process.returncode:
            return [said[-1]]
    return differences(run, folder / "whole") if sampled_alike else gaps(run)


def break_and_resume(folder: Path, faults: Sequence[str], settings: tuple[str, ...], *, mounted: bool) -> int:
    run, failed = folder / "small" / "run", False
    arguments: tuple[str, ...] = (*settings, "steps=1000", f"output_dir={run}")
    for fault in faults:
        if fault == "disk" and not mounted:
            print("disk: left out, only root can mount a small disk")
            continue
        if latest_checkpoint(run):
            arguments = ("--resume", str(run))
        else:
            shutil.rmtree(run, ignore_errors=True)
        seen = broken(fault, run, arguments)
        failed |= seen["left"] > 0 or seen["code"] not in (1, 130)
        print(f"{fault}: exit code {seen['code']}, {seen['left']} processes left\n    {seen['said']}", flush=True)
    found = resumed(run, folder, ("--resume", str(run)), settings)
    print("resumed: " + (", ".join(found[:8]) or "its metrics are those of an unbroken run"))
    return int(failed or bool(found))


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a script began this in the background
    folder, given = Path(sys.argv[1]), sys.argv[2:]
    faults = [each for each in given if each in FAULTS] or list(FAULTS)
    settings = (*SETTINGS, *(each for each in given if each not in FAULTS))
    if unknown := [each for each in settings if "=" not in each]:
        sys.exit(f"{unknown[0]} is no setting, and none of the faults {', '.join(FAULTS)}")
    small = folder / "small"
    subprocess.run(["umount", str(small)], capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)
    small.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "lfo-faults", str(small)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        return break_and_resume(folder, faults, settings, mounted=mounted)
    finally:
        if mounted:
            shutil.copytree(small, folder / "kept", ignore_dangling_symlinks=True)
            subprocess.run(["umount", str(small)], check=False)


if __name__ == "__main__":
    sys.exit(main())
