"""The phone-call world for a policy that cannot speak: whatever it says, the next call of a script is made.

    lfo train engine=verl env=lfo.env.scripted:ScriptedCalls model=FOLDER ...

For measuring what a step costs at sizes for which there are only random weights. Tasks, prompts, replies and turns are
the real ones; rewards alternate, so that every group trains the policy. engine=verl lets the policy speak as long as a
turn may be, and puts the words of the script in the place of what it said, so that rows hold calls and replies.
"""

from __future__ import annotations

import itertools
from typing import Any, cast

from lfo.env.phone_calls import PhoneCalls
from lfo.env.players import PLAYERS
from lfo.env.tasks import Task
from lfo.types import StepResult

_rollouts = itertools.count()  # of a process, in the order in which they begin


class _Heard:
    """An environment that notes what is said to it."""

    def __init__(self, environment: PhoneCalls) -> None:
        self._environment = environment
        self.said: list[str] = []

    def step(self, message: str) -> StepResult:
        self.said.append(message)
        return self._environment.step(message)


class ScriptedCalls(PhoneCalls):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._options = options

    def reset(self, task: Task) -> Any:
        twin = PhoneCalls(**self._options)
        twin.reset(task)
        heard = _Heard(twin)
        PLAYERS["informed"](cast(PhoneCalls, heard), task)
        self._script, self._turn, self._reward = heard.said, 0, float(next(_rollouts) % 2)
        return super().reset(task)

    @property
    def words(self) -> str:
        """What the script says next."""
        return self._script[min(self._turn, len(self._script) - 1)]

    def step(self, message: str) -> StepResult:
        said = self.words
        self._turn += 1
        return super().step(said)

    def reward(self) -> float:
        return self._reward

    def check(self) -> None:
        pass  # the reward says nothing of the state
