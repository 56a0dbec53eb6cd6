#!/usr/bin/env python3
"""Time the steps of two versions of the code in turns: each version takes the same step, one after the other.

    scripts/compare_steps.py ../before/src src --steps 30 algo=dual-lora
    scripts/compare_steps.py ../before/src src --steps 30 algo=dapo

Both train the same run, so if a change is bit-equal, the work of a step is the same in both. Seconds are of the CPU, of
one thread; other load slows both versions alike. Prints the ratio of the medians, after to before, for a whole step,
its rollouts and the rest, each with a 95 % interval (bootstrap over steps). The first two steps warm up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

# Runs in a process of its own with one version of the code: a step for each line of standard input.
WORKER = """
import importlib, json, sys, time
from lfo.cli import main
try:
    loop = importlib.import_module("lfo.train.loop")
except ModuleNotFoundError:  # before the rooms
    loop = importlib.import_module("lfo.training")
step, collect = loop.Trainer.step, loop.Trainer.collect
rollouts = 0.0

def timed_collect(self, *arguments):
    global rollouts
    began = time.process_time()
    found = collect(self, *arguments)
    rollouts = time.process_time() - began
    return found

def timed_step(self, number):
    sys.stdin.readline()
    began = time.process_time()
    row = step(self, number)
    print(json.dumps([time.process_time() - began, rollouts]), flush=True)
    return row

loop.Trainer.collect, loop.Trainer.step = timed_collect, timed_step
main()
"""
WARM_UP = 2


class Version:
    """One version of the code, training step by step."""

    def __init__(self, source: Path, settings: list[str], folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", WORKER, "train", "preset=tiny", "eval.every=0", *settings]
        self.log = folder.with_suffix(".log")
        self.process = subprocess.Popen(
            [*command, f"output_dir={folder}"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("wb"),
            text=True,
        )

    def step(self) -> tuple[float, float]:
        """Take a step; return its CPU seconds and those of its rollouts."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("["):
                whole, rollouts = json.loads(line)
                return whole, rollouts
        sys.exit(f"a run ended: {self.log.read_text(encoding='utf-8')[-800:]}")


def ratios(before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """Return the ratio of the medians with an interval."""
    generator = np.random.default_rng(0)
    draws = generator.integers(0, len(before), size=(2_000, len(before)))
    drawn = np.median(after[draws], axis=1) / np.median(before[draws], axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {
        "before": float(np.median(before)),
        "after": float(np.median(after)),
        "ratio": float(np.median(after) / np.median(before)),
        "low": float(low),
        "high": float(high),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a folder `src`")
    parser.add_argument("after", type=Path, help="another folder `src`")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("settings", nargs="*", help="of the run, as name=value")
    options = parser.parse_intermixed_args()
    steps = options.steps + WARM_UP
    with tempfile.TemporaryDirectory() as name:
        settings = [*options.settings, f"steps={steps}"]
        sources = (options.before, options.after)
        versions = [Version(each, settings, Path(name) / str(index)) for index, each in enumerate(sources)]
        seconds = np.zeros((2, steps, 2))
        for step in range(steps):
            for index in (0, 1) if step % 2 else (1, 0):  # neither is always first
                seconds[index, step] = versions[index].step()
        for version in versions:
            version.process.kill()
            version.process.wait()
    whole, rollouts = seconds[:, WARM_UP:, 0], seconds[:, WARM_UP:, 1]
    result: dict[str, Any] = {
        "steps": options.steps,
        "step": ratios(*whole),
        "rollouts": ratios(*rollouts),
        "rest": ratios(*(whole - rollouts)),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
