"""Measure the speed of the phone-call world: record rollouts of the informed player, then replay them.

lfo bench env
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import cast

from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.env.worlds.phone.generator import generate
from lfo.env.worlds.phone.players import Recorder, informed
from lfo.env.worlds.phone.tasks import Task

TASKS, REPEATS = 2_000, 5


def tool_calls_per_second() -> float:
    """Return replies per second of CPU time, including new environments and resets; the best of a few runs."""
    scripts = []
    for task in PhoneCalls().stream("val", stream_seed=2).take(TASKS):
        recorder = Recorder(PhoneCalls())
        recorder.environment.reset(task)
        informed(cast(PhoneCalls, recorder), task)
        scripts.append((task, [message for message, _ in recorder.exchanges]))
    best = min(_replay(scripts) for _ in range(REPEATS))
    return sum(len(messages) for _, messages in scripts) / best


def _replay(scripts: list[tuple[Task, list[str]]]) -> float:
    start = time.process_time()
    for task, messages in scripts:
        environment = PhoneCalls()
        environment.reset(task)
        for message in messages:
            environment.step(message)
    return time.process_time() - start


def generate_seconds() -> float:
    """Return the wall-clock seconds to write the default data."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        generate(Path(folder) / "data")
        return time.perf_counter() - start
