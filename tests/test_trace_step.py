"""A training step passes few files: `scripts/trace_step.py` counts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "trace_step.py"


def test_a_step_passes_no_more_files_than_it_may():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "play/look_ahead.py" in done.stdout.partition("dual-lora:")[0]
    assert "play/look_ahead.py" not in done.stdout.partition("dual-lora:")[2]
