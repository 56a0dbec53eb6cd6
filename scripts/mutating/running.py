"""Run test files in a copy of the tree, and find out which of them execute which functions.

`measure` runs each test file once as `python running.py TARGET TEST_FILE`, which traces calls. Calls of processes that
a test starts are not seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not verl")  # tests that start clusters take too long
LONGEST = 400.0  # seconds of a test file with tracing; slower ones are not used
BUDGET = 240.0  # seconds of test files for one change
PATIENCE, LEAST_PATIENCE = 8, 120.0  # a test file that takes so many times as long, and these seconds, does not end
MEMORY = 8 << 30  # bytes of a test run: a change may fill a list without end


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a test file does when nothing is changed."""

    digest: str  # of the test file
    seconds: float  # of the CPU, so that a busy machine changes little
    functions: Mapping[str, Collection[str]]  # the qualified names of those it executes, by source file; none: not used

    def focus(self, path: str) -> float:
        """Return which share of what it executes is in one file."""
        return len(self.functions.get(path, ())) / max(1, sum(map(len, self.functions.values())))

    def executes(self, path: str, function: str) -> bool:
        return (function or "<module>") in self.functions.get(path, ())


def measure(tests: Sequence[Path], tree: Path, known: Path) -> dict[str, Measured]:
    """Run the test files that are new or have changed since the last measurement; return all by name."""
    found = json.loads(known.read_bytes()) if known.exists() else {}
    files = {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in tests}
    for file, digest in files.items():
        if found.get(file, {}).get("digest") == digest and found[file]["functions"]:
            continue
        target, begin = tree / "functions.json", _cpu_seconds()
        ended = run([sys.executable, str(Path(__file__).resolve()), str(target), file], tree, LONGEST)
        functions = json.loads(target.read_bytes()) if ended == "passed" else {}
        seconds = _cpu_seconds() - begin
        print(f"{file}: {seconds:.0f} s" if functions else f"{file}: not used: {ended}", file=sys.stderr)
        found[file] = asdict(Measured(digest=digest, seconds=seconds, functions=functions))
        known.write_text(json.dumps(found))
    return {file: Measured(**found[file]) for file in files}


def tests_of(path: str, function: str, measured: Mapping[str, Measured]) -> dict[str, float]:
    """Return test files that execute a function, with their seconds, the fastest first. If all would take too long,
    those that are most about its source file."""
    chosen: dict[str, float] = {}
    able = [(each.focus(path), file) for file, each in measured.items() if each.executes(path, function)]
    for _, file in sorted(able, reverse=True):
        if sum(chosen.values()) + measured[file].seconds <= BUDGET:
            chosen[file] = measured[file].seconds
    return dict(sorted(chosen.items(), key=lambda item: item[1]))


def first_failure(tests: Mapping[str, float], tree: Path) -> str | None:
    """Return the first test that fails, or the file that does not end; None if all pass."""
    for file, seconds in tests.items():
        command = [sys.executable, "-m", "pytest", *OPTIONS, file]
        ended = run(command, tree, max(LEAST_PATIENCE, PATIENCE * seconds))
        if ended != "passed":
            return f"{file}: {ended}"
    return None


def run(command: Sequence[str], tree: Path, limit: float) -> str:
    """Run a command in the tree with one thread; return "passed", the first test that failed, or why it was ended."""
    more = {
        "PYTHONPATH": str(tree / "src"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # a .pyc is compared by size and second, which a change may keep
        "CI": "true",  # for hypothesis: no deadlines, the same examples each time
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins take longer to import than most tests
    }
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=tree,
            env=os.environ | more,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY)),
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"not ended after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.wait()
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    failed = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), f"exit code {status}")
    return "passed" if status == 0 else failed


def trace(target: str, test: str) -> int:
    """Run a test file and write the names of the functions of `src` that it executes, by source file."""
    import pytest

    root, seen = f"{os.getcwd()}/", set[tuple[str, str]]()

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(f"{root}src/"):
            seen.add((code.co_filename.removeprefix(root), code.co_qualname))

    threading.settrace(note)
    sys.settrace(note)
    status = pytest.main([*OPTIONS, test])
    sys.settrace(None)
    functions = {file: sorted(name for each, name in seen if each == file) for file, _ in seen}
    Path(target).write_text(json.dumps(functions))
    return int(status)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(trace(*sys.argv[1:]))
