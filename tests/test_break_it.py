"""The short form of `scripts/break_it.py`: damage, hostile folders, environments and requests, interruptions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
# Interruptions take minutes; tests/test_resume.py kills runs at chosen places instead.
KINDS = sorted({file.stem for file in (SCRIPTS / "breaking").glob("[a-z]*.py")} - {"interrupts"})


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_product_promises_under_damage_holds(kind: str, tmp_path: Path):
    command = [sys.executable, str(SCRIPTS / "break_it.py"), str(tmp_path / "trials"), kind, "--short", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    broken = [outcome for outcome in outcomes if not outcome["held"]]
    assert not broken, json.dumps(broken, indent=2)
    assert outcomes, done.stderr
    assert done.returncode == 0, done.stderr
