#!/usr/bin/env python3
"""Damage checkpoints, open hostile run folders, play hostile environments and send hostile requests; print what held.

    scripts/break_it.py FOLDER                        every kind of trial
    scripts/break_it.py FOLDER damage requests        only these, of: damage folders environments requests interrupts
    scripts/break_it.py FOLDER --short --json         the few trials that the test suite runs, one JSON object a line

FOLDER is created and must be empty. The exit code is 1 if a trial did not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

KINDS = ("damage", "folders", "environments", "requests", "interrupts")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an empty folder for what the trials need")
    parser.add_argument("kinds", nargs="*", help=f"of: {' '.join(KINDS)}; default: all")
    parser.add_argument("--short", action="store_true", help="only the few trials that the test suite runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    options = parser.parse_intermixed_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"unknown kind {sorted(unknown)[0]!r}; choose from {', '.join(KINDS)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    if any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty")
    return run(options.kinds or KINDS, options.folder, short=options.short, as_json=options.json)


def run(kinds: tuple[str, ...] | list[str], folder: Path, *, short: bool, as_json: bool) -> int:
    """Run the trials of each kind, print each as it ends, and return the exit code."""
    summary, failed = [], 0
    for kind in kinds:
        begin, total, broken = time.monotonic(), 0, 0
        for outcome in import_module(f"breaking.{kind}").trials(folder / kind, short=short):
            total += 1
            broken += not outcome.held
            if as_json:
                print(json.dumps({"kind": kind, **asdict(outcome)}), flush=True)
            else:
                figures = "".join(f"  {name} {value:.3g}" for name, value in outcome.figures.items())
                print(f"{'held  ' if outcome.held else 'BROKEN'} {outcome.trial}{figures}", flush=True)
                if outcome.said:
                    print(f"       {outcome.said}", flush=True)
        summary.append(f"{kind}: {total - broken} of {total} held, {time.monotonic() - begin:.0f} s")
        failed += broken
    if not as_json:
        print("\n".join(["", *summary]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
