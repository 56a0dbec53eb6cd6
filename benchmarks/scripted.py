"""The phone-call world for a policy with random weights: a script makes the calls, whatever the policy writes.

    lfo train engine=verl env=benchmarks.scripted:ScriptedCalls model=FOLDER ...

It measures the cost of a step for model sizes of which only random weights exist. Tasks, prompts, replies and turns are
real; rewards alternate, so that every group trains the policy. With engine=verl the policy samples a turn of full
length, and the words of the script then replace it, so that rows contain calls and replies.
"""

from __future__ import annotations

import itertools
from typing import Any, cast

from lfo.env.recorder import Recorder
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.env.worlds.phone.players import informed
from lfo.env.worlds.phone.tasks import Task
from lfo.types import StepResult

_rollouts = itertools.count()  # numbers the rollouts of a process


class ScriptedCalls(PhoneCalls):
    """Plays the calls of the informed player instead of the policy's messages."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._options = options

    def reset(self, task: Task) -> Any:
        twin = PhoneCalls(**self._options)
        twin.reset(task)
        recorder = Recorder(twin)
        informed(cast(PhoneCalls, recorder), task)
        self._script = [message for message, _ in recorder.exchanges]
        self._turn, self._reward = 0, float(next(_rollouts) % 2)
        return super().reset(task)

    def scripted_words(self) -> str:
        """The next message of the script."""
        return self._script[min(self._turn, len(self._script) - 1)]

    def step(self, message: str) -> StepResult:
        scripted = self.scripted_words()
        self._turn += 1
        return super().step(scripted)

    def reward(self) -> float:
        return self._reward
