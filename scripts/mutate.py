#!/usr/bin/env python3
"""Change the product in small ways, one at a time, and see whether a test fails: a change that none notices is a gap.

    scripts/mutate.py --seed 7 --count 120 src/lfo/rollout src/lfo/model/learner.py src/lfo/runs/folder.py src/lfo/serving

It draws `count` of all changes of these files and folders. For each it runs test files that execute the changed
function, the fastest first, until one fails or does not end, in a temporary copy of the tree. It prints the changes
that survived, as diffs, and the share that was killed.

It measures once which functions each test file executes, which takes as long as the test suite; `--tests` measures and
uses only some. That and all outcomes stay in the folder `--work`, so that a command that was stopped continues there.
`--again` tries survivors again, for new tests. Start it in the root of the repository.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutating.changes import Change, changes_of
from mutating.running import first_failure, measure, tests_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="Python files and folders")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=120, help="how many changes to draw")
    parser.add_argument("--tests", nargs="+", type=Path, metavar="FILE", help="test files; default: all")
    parser.add_argument("--work", type=Path, default=Path("build/mutate"), help="folder of measurements and outcomes")
    parser.add_argument("--again", action="store_true", help="try the changes again that survived")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each change")
    options = parser.parse_args()
    tests = options.tests or sorted(Path("tests").glob("test_*.py"))
    os.nice(10)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the copy is removed and the tests end
    options.work.mkdir(parents=True, exist_ok=True)
    drawn = draw(options.paths, seed=options.seed, count=options.count)
    outcomes = Outcomes(options.work / "outcomes.jsonl", again=options.again)
    with tempfile.TemporaryDirectory(prefix="mutate-") as name:
        tree = Path(name)
        copy_tree(tree)
        measured = measure(tests, tree, options.work / "tests.json")
        for change in drawn:
            if change not in outcomes.known:
                outcomes.add(change, attempt(tree, change, tests_of(change.path, change.function, measured)))
            show(change, outcomes.known[change], as_json=options.json)
    killed = sum(outcomes.known[change]["killed"] for change in drawn)
    if not options.json:
        print(f"\nkilled {killed} of {len(drawn)} changes ({killed / max(1, len(drawn)):.1%})")
    return 0


def draw(paths: Sequence[Path], *, seed: int, count: int) -> list[Change]:
    """Return `count` changes that make another program, in the order of files and lines."""
    files = sorted({file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])})
    sources = {str(file): file.read_bytes() for file in files}
    possible = [change for path, source in sources.items() for change in changes_of(path, source)]
    random.Random(seed).shuffle(possible)
    drawn: list[Change] = []
    for change in possible:
        if len(drawn) < count and _is_another_program(sources[change.path], change):
            drawn.append(change)
    return sorted(drawn, key=lambda change: (change.path, change.start, change.text))


def _is_another_program(source: bytes, change: Change) -> bool:
    try:
        return ast.dump(ast.parse(change.applied(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def copy_tree(folder: Path) -> None:
    """Copy the files that git knows or would add."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if Path(name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, folder / name)


def attempt(tree: Path, change: Change, tests: Mapping[str, float]) -> dict[str, Any]:
    """Run the tests with the change in the copy."""
    source = (tree / change.path).read_bytes()
    try:
        (tree / change.path).write_bytes(change.applied(source))
        failure = first_failure(tests, tree)
    finally:
        (tree / change.path).write_bytes(source)
    return {"killed": failure is not None, "by": failure, "tests": list(tests)}


class Outcomes:
    """What happened to each change, in a file that grows by a line for each."""

    def __init__(self, path: Path, *, again: bool) -> None:
        self._path = path
        self.known: dict[Change, dict[str, Any]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            row = json.loads(line)
            self.known[Change(**row.pop("change"))] = row
        if again:
            self.known = {change: row for change, row in self.known.items() if row["killed"]}

    def add(self, change: Change, outcome: dict[str, Any]) -> None:
        self.known[change] = outcome
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"change": asdict(change), **outcome}) + "\n")


def show(change: Change, outcome: Mapping[str, Any], *, as_json: bool) -> None:
    source = Path(change.path).read_bytes()
    before, after = (text.decode().splitlines() for text in (source, change.applied(source)))
    diff = "\n".join(difflib.unified_diff(before, after, change.path, change.path, n=1, lineterm=""))
    if as_json:
        print(json.dumps({**outcome, "diff": diff}), flush=True)
    elif outcome["killed"]:
        print(f"killed   {change.path} {change.function}: {outcome['by']}", flush=True)
    else:
        print(f"SURVIVED {len(outcome['tests'])} test files\n{diff}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
