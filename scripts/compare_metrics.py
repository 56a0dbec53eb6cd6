#!/usr/bin/env python3
"""Check that a code change does not change results: train six steps of many variants before and after, and compare.

    scripts/compare_metrics.py record ../before/src /tmp/before        trains with the code in that folder
    scripts/compare_metrics.py record src /tmp/after
    scripts/compare_metrics.py compare /tmp/before /tmp/after          exits with 1 if a metric differs

Rows of `metrics.jsonl` must be bit-equal, except for times. Make both recordings on the same machine. `--only
NAME,NAME` trains some of the variants.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS = ("steps=6", "eval.every=3", "eval.tasks=24", "checkpoint_every=6")
VARIANTS: dict[str, tuple[str, ...]] = {
    "default": (),
    "levels-2-4": ("levels=2,3,4",),
    "dapo": ("algo=dapo", "policy.learning_rate=1e-3", "levels=1"),
    "dapo-shaped": ("algo=dapo", "levels=1", "policy.overlong_buffer=300", "policy.max_resamples=1"),
    "shared": ("coupling=shared",),
    "inline": ("coupling=shared", "world_model.input=inline", "lookahead=false"),
    "blind": ("lookahead=false",),
    "memory": ("lookahead_source=memory",),
    "shuffled": ("lookahead_source=shuffled",),
    "truth": ("lookahead_source=truth",),
    "surprise": ("surprise=0.1", "levels=1"),
    "no-replay": ("world_model.replay=false", "world_model.schedule=alternating"),
    "frozen": ("world_model.only=true",),
    "oracle-codes": ("env=oracle-codes", "world_model.predict=all"),
    "internalise": ("lookahead_source=truth", "internalise.rows=2", "internalise.until=5"),
    "feedback": ("algo=dapo", "feedback=true", "internalise.rows=2"),
    "verl-separate": ("engine=verl", "coupling=separate"),
}


def record(source: Path, folder: Path, only: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
    for name in only:
        command = ["lfo.cli", "train", "preset=tiny", *STEPS, *VARIANTS[name], f"output_dir={folder / name}"]
        print(name, flush=True)
        subprocess.run([sys.executable, "-c", _START, *command], env=environment, check=True, stderr=subprocess.DEVNULL)


_START = "import sys; from lfo.cli import main; sys.argv = sys.argv[1:]; main()"


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run without times."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(("seconds/", "tokens_per_second"))}
        for line in lines
    ]


def compare(before: Path, after: Path, only: list[str]) -> bool:
    """Print the result of each variant; return whether all are equal."""
    equal = True
    for name in only:
        one, other = rows_of(before / name), rows_of(after / name)
        differing = sorted(
            {
                key
                for left, right in zip(one, other, strict=False)
                for key in left.keys() | right.keys()
                if left.get(key) != right.get(key)
            }
        )
        same = one == other
        equal = equal and same
        print(f"{name:16} {len(one)} rows  {'equal' if same else 'DIFFERENT: ' + ', '.join(differing)}")
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("paths", nargs=2, type=Path)
    parser.add_argument("--only", default=",".join(VARIANTS))
    options = parser.parse_args()
    (first, second), only = options.paths, options.only.split(",")
    if options.verb == "record":
        record(first, second, only)
        return 0
    return 0 if compare(first, second, only) else 1


if __name__ == "__main__":
    sys.exit(main())
