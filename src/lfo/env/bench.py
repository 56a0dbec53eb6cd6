"""Measure the speed of the phone-call world: record rollouts of the informed player, then replay them.

lfo bench env
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lfo.env.generator import generate
from lfo.env.phone_calls import PhoneCalls
from lfo.env.players import PLAYERS
from lfo.env.tasks import Task
from lfo.types import Message, StepResult


class _Recorder(PhoneCalls):
    def start(self, task: Task) -> Sequence[Message]:
        self.messages: list[str] = []
        return super().start(task)

    def step(self, message: str) -> StepResult:
        self.messages.append(message)
        return super().step(message)


def tool_calls_per_second(*, tasks: int = 2_000, repeats: int = 5) -> float:
    """Return replies per second of CPU time, including new environments and resets; the best of a few runs."""
    scripts = []
    for task in PhoneCalls().stream("val", stream_seed=2).take(tasks):
        recorder = _Recorder()
        recorder.reset(task)
        PLAYERS["informed"](recorder, task)
        scripts.append((task, recorder.messages))
    best = min(_replay(scripts) for _ in range(repeats))
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
