#!/usr/bin/env python3
"""Print which files of src run in one training step, and how many functions of each: scripts/trace_step.py

Two short runs on a CPU: dual-LoRA with look-ahead, and plain DAPO. Start, evaluation and checkpoints do not count, nor
does the first step, which fills caches: what counts are the files of which a function runs in a later step, in any
thread. The files of the world that is played are counted apart, because users bring worlds of their own. Exit with 1 if
a step passes more files than it may.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from lfo.config import load_config
from lfo.engines import train
from lfo.train.loop import Trainer

SOURCE = Path(__file__).resolve().parent.parent / "src" / "lfo"
# Files. Of dual-lora six watch over changed rules and fit texts into states in linear time; without them it has 34.
MOST = {"dual-lora": 40, "dapo": 24}
WORLD = ("env/worlds/", "env/seeds.py", "env/tool_environment.py")
# Every group trains the policy, whatever it achieved.
SETTINGS = ("preset=tiny", "steps=3", "levels=1", "eval.every=0", "policy.max_resamples=-1")


class Traced:
    """The code that has run while this was entered, in all threads."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()

    def __enter__(self) -> None:
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _seen(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.codes.add(frame.f_code)

    @property
    def functions(self) -> dict[str, set[str]]:
        """The functions of `SOURCE` that have run, by file; what is inside of a function counts as that function."""
        found: dict[str, set[str]] = defaultdict(set)
        for code in self.codes:
            path = Path(code.co_filename).resolve()
            if path.is_relative_to(SOURCE):
                found[str(path.relative_to(SOURCE))].add(code.co_qualname.split(".<locals>")[0])
        return dict(sorted(found.items()))


def trace(algo: str, others: list[str]) -> dict[str, set[str]]:
    """Train with `algo`; return the functions that ran in its steps after the first, by file."""
    traced, untraced = Traced(), Trainer.step

    def traced_step(self: Trainer, step: int) -> dict[str, Any]:
        with traced if step else nullcontext():
            return untraced(self, step)

    with tempfile.TemporaryDirectory() as folder:
        config = load_config([*SETTINGS, f"algo={algo}", f"output_dir={folder}/run", *others])
        Trainer.step = traced_step
        try:
            train(config)
        finally:
            Trainer.step = untraced
    return traced.functions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="other settings of the runs, such as internalise.rows=2")
    parser.add_argument("--names", action="store_true", help="print the names of the functions too")
    options, too_many = parser.parse_args(), False
    for algo, most in MOST.items():
        functions = trace(algo, options.settings)
        world = {name for name in functions if name.startswith(WORLD)}
        for name, some in functions.items():
            marks = " (world)" if name in world else ""
            print(f"{len(some):5} {name}{marks}{'  ' + ' '.join(sorted(some)) if options.names else ''}")
        files, ours = len(functions) - len(world), sum(len(functions[name]) for name in functions.keys() - world)
        print(f"      {algo}: {ours} functions in {files} files, at most {most}, and {len(world)} files of the world\n")
        too_many |= files > most
    return int(too_many)


if __name__ == "__main__":
    sys.exit(main())
