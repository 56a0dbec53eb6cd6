#!/usr/bin/env python3
"""Check that a code change does not change results: train six steps of many variants before and after, and compare.

    scripts/compare_metrics.py record ../before/src /tmp/before        trains with the code in that folder
    scripts/compare_metrics.py record src /tmp/after
    scripts/compare_metrics.py compare /tmp/before /tmp/after          exits with 1 if a metric or an adapter differs

    scripts/compare_metrics.py resume ../before/src src /tmp/resumed   starts with the first code, kills it in the
    scripts/compare_metrics.py compare /tmp/before /tmp/resumed        middle with SIGKILL and resumes with the second

Rows of `metrics.jsonl` must be bit-equal, except for times, and so must the weights of the adapters. Make all
recordings on the same machine. `--only NAME,NAME` trains some of the variants; settings must be known to both codes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEPS = ("steps=6", "eval.every=3", "eval.tasks=24", "checkpoint_every=2")
DAPO = ("algo=dapo", "policy.learning_rate=1e-3", "levels=1")
# The rounding of a server's log-probs depends on which requests come together: let the trainer compute its own.
VERL = ("verl.algorithm.rollout_correction.bypass_mode=false",)
VARIANTS: dict[str, tuple[str, ...]] = {
    "dual-lora": (),
    "levels-2-4": ("levels=2,3,4",),
    "dapo": DAPO,
    "dapo-shaped": ("algo=dapo", "levels=1", "policy.overlong_buffer=300", "policy.max_resamples=1"),
    "shared": ("coupling=shared",),
    "inline": ("coupling=shared", "world_model.input=inline", "lookahead=off"),
    "blind": ("lookahead=off",),
    "memory": ("lookahead_source=memory",),
    "memory-first": ("lookahead_source=memory_first",),
    "shuffled": ("lookahead_source=shuffled",),
    "truth": ("lookahead_source=truth",),
    "drafts": ("imagine.drafts=4",),
    "surprise": ("surprise=0.1", "levels=1"),
    "alternating": ("world_model.replay=false", "world_model.schedule=alternating"),
    "world-first": ("world_model.schedule=world_model_first:2", "levels=1"),
    "hierarchical": ("world_model.schedule=hierarchical:3", "levels=1"),
    "explore-first": ("world_model.schedule=explore_first:2", "levels=1"),
    "adaptive": ("world_model.schedule=adaptive", "levels=1"),
    "frozen": ("policy.frozen=true",),
    "oracle-codes": ("env=oracle-codes", "world_model.predict=all"),
    "frozen-lake": ("env=gymnasium:FrozenLake-v1", "world_model.predict=all"),
    "internalise": ("algo=internalise", "lookahead_source=truth", "internalise.rows=2"),
    "phases": ("lookahead_source=truth", "internalise.rows=2", "internalise.until=5", "internalise.swap_names=0.5"),
    "hindsight": ("internalise.rows=2", "internalise.teacher=hindsight"),
    "feedback": ("algo=dapo", "feedback=own", "internalise.rows=2"),
    "both": ("feedback=own", "internalise.rows=2", "internalise.teacher=policy"),
    "verl-dapo": ("engine=verl", *DAPO, *VERL),
    "verl-dual-lora": ("engine=verl", *VERL),
}
TIMES = ("seconds/", "tokens_per_second")
KILLED_AFTER = 3  # rows of steps
_START = "import sys; from lfo.cli import main; sys.argv = sys.argv[1:]; main()"


def start(source: Path, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
    """Start `lfo train` with the code in a folder, in a group of its own."""
    environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
    command = [sys.executable, "-c", _START, "lfo", "train", *arguments]
    with log.open("ab") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def settings_of(name: str, folder: Path) -> tuple[str, ...]:
    return ("preset=tiny", *STEPS, *VARIANTS[name], f"output_dir={folder.resolve() / name}")


def finish(process: subprocess.Popen[bytes], name: str, log: Path) -> None:
    if process.wait():
        sys.exit(f"{name} failed: see {log}")


def record(source: Path, folder: Path, only: list[str]) -> None:
    for name in only:
        print(name, flush=True)
        log = folder / f"{name}.log"
        finish(start(source, *settings_of(name, folder), log=log), name, log)


def resume(before: Path, after: Path, folder: Path, only: list[str]) -> None:
    for name in only:
        run, log = folder / name, folder / f"{name}.log"
        process = start(before, *settings_of(name, folder), log=log)
        while process.poll() is None and len(steps_of(run)) < KILLED_AFTER:
            time.sleep(0.05)
        done = len(steps_of(run))
        if process.poll() is not None:
            sys.exit(f"{name} ended before it was killed: see {log}")
        os.killpg(process.pid, 9)
        process.wait()
        print(f"{name}: killed after {done} steps", flush=True)
        finish(start(after, "--resume", str(run), log=log), name, log)


def steps_of(run: Path) -> list[str]:
    """Return the whole lines of a run's metrics so far, without that of the untrained policy."""
    file = run / "metrics.jsonl"
    return file.read_text(encoding="utf-8").split("\n")[1:-1] if file.exists() else []


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run without times, and without the gap that verl's servers leave."""
    beside = (*TIMES, *(("logprob_gap",) if run.name.startswith("verl") else ()))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith(beside)} for line in lines]


def adapters_of(run: Path) -> dict[str, bytes]:
    files = sorted((run / "adapters").glob("*/adapter_model.safetensors"))
    return {file.parent.name: file.read_bytes() for file in files}


def compare(before: Path, after: Path, only: list[str]) -> bool:
    """Print the result of each variant; return whether all are equal."""
    equal = True
    for name in only:
        if missing := [folder for folder in (before, after) if not (folder / name / "metrics.jsonl").is_file()]:
            print(f"{name:16} MISSING in {missing[0]}")
            equal = False
            continue
        one, other = rows_of(before / name), rows_of(after / name)
        pairs = zip(one, other, strict=False)
        differing = {key for old, new in pairs for key in old.keys() & new.keys() if old[key] != new[key]}
        names = [{key for row in rows for key in row} for rows in (one, other)]
        adapters, others = adapters_of(before / name), adapters_of(after / name)
        differing |= {f"adapter {each}" for each in adapters.keys() | others.keys() if adapters[each] != others[each]}
        same = len(one) == len(other) and not differing and bool(adapters)
        equal = equal and same
        only_one = [f"; {word}: {', '.join(sorted(some))}" for word, some in _unshared(*names) if some]
        verdict = "equal" if same else f"DIFFERENT: {', '.join(sorted(differing))}"
        print(f"{name:16} {len(one)} rows, {len(adapters)} adapters  {verdict}{''.join(only_one)}")
    return equal


def _unshared(before: set[str], after: set[str]) -> list[tuple[str, set[str]]]:
    return [("no longer measured", before - after), ("newly measured", after - before)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("record", "compare", "resume"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--only", default=",".join(VARIANTS))
    options = parser.parse_args()
    only, (first, second, *third) = options.only.split(","), options.paths
    if len(third) != (options.verb == "resume"):
        parser.error(f"{options.verb} needs {'three' if options.verb == 'resume' else 'two'} folders")
    if options.verb == "compare":
        return 0 if compare(first, second, only) else 1
    folder = (second, *third)[-1]
    folder.mkdir(parents=True, exist_ok=True)
    if options.verb == "resume":
        resume(first, second, folder, only)
    else:
        record(first, folder, only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
