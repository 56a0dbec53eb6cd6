"""Kill a run or press Ctrl-C at random moments, resume it, and compare it with the run that nobody disturbed.

The undisturbed run gives the seconds from the start of the process to its end; the moments are drawn from them. Every
run is resumed until it has ended; its metrics (except times) and adapters must then be equal to the last bit.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from compare_metrics import rows_of

from breaking import Outcome
from breaking.damage import SETTINGS, adapters_of

START = "import sys; from lfo.cli import main; sys.argv = ['lfo', *sys.argv[1:]]; main()"
MOST = 600.0  # seconds that one process may take


def trials(folder: Path, *, short: bool) -> Iterator[Outcome]:
    folder.mkdir()
    whole, chance = folder / "whole", random.Random(0)
    begin = time.monotonic()
    code, said = _run("train", *SETTINGS, f"output_dir={whole}")
    seconds = time.monotonic() - begin
    if code:
        raise RuntimeError(f"the undisturbed run failed: {said}")
    for number in range(2 if short else 20):
        kind = signal.SIGKILL if number % 2 else signal.SIGINT
        run = folder / f"{number}"
        yield _trial(whole, run, kind, moment=chance.uniform(0, 0.9 * seconds), seed=number)
        shutil.rmtree(run, ignore_errors=True)


def _trial(whole: Path, run: Path, kind: signal.Signals, *, moment: float, seed: int) -> Outcome:
    """Interrupt the run at `moment`, and its first resumption at another random moment; then let it end."""
    chance, interrupted, code, said = random.Random(seed), 0, -1, ""
    for until in (moment, chance.uniform(0, moment), MOST):
        begun = (run / "config.yaml").is_file()
        arguments = ("--resume", str(run)) if begun else (*SETTINGS, f"output_dir={run}")
        code, said = _run("train", *arguments, interrupt=(until, kind))
        interrupted += code not in (0, 1, 2)
        if code in (1, 2):
            break
    held = code == 0 and rows_of(run) == rows_of(whole) and adapters_of(run) == adapters_of(whole)
    name = "kill -9" if kind == signal.SIGKILL else "Ctrl-C"
    return Outcome(
        trial=f"{name} after {moment:.1f} s", held=held, said="" if held else said, figures={"interrupted": interrupted}
    )


def _run(*arguments: str, interrupt: tuple[float, signal.Signals] = (MOST, signal.SIGKILL)) -> tuple[int, str]:
    """Run a command in its own process and interrupt it after some seconds; return its exit code and last line."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child inherits that SIGINT is ignored
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    finally:
        signal.signal(signal.SIGINT, before)
    seconds, kind = interrupt
    try:
        said = process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        process.send_signal(kind)
        said = process.communicate()[1]
    return process.returncode, (said.strip().splitlines() or [""])[-1]
