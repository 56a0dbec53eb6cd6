"""The phone-call world for a policy that cannot speak: whatever it says, the next call of a script is made.

    lfo train env=lfo.env.scripted:ScriptedCalls model=FOLDER ...

For measuring what a step costs at sizes for which there are only random weights: tasks, prompts, replies and turns are
the real ones, and rewards alternate, so that every group trains the policy. No call can be read from what was said, so
there is nothing for a world model to learn; look-ahead asks about the next call of the script.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

from lfo.env.phone_calls import PhoneCalls
from lfo.env.players import PLAYERS
from lfo.env.tasks import Task
from lfo.protocol.hermes import read_tool_call
from lfo.types import Message, StepResult, ToolCall

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

    def step(self, message: str) -> StepResult:
        said = self._script[min(self._turn, len(self._script) - 1)]
        self._turn += 1
        return super().step(said)

    def reward(self) -> float:
        return self._reward

    def check(self) -> None:
        pass  # the reward says nothing of the state

    def lookahead_query(self, transcript: Sequence[Message]) -> ToolCall | None:
        asked = sum(message.predicted and message.role == "tool" for message in transcript)
        spoken = sum(message.role == "assistant" and not message.predicted for message in transcript)
        script = [call for said in self._script if (call := read_tool_call(said)) and call.name == "make_phone_call"]
        return script[0] if script and spoken == 1 and not asked else None
