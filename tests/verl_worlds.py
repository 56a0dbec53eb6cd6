"""Environments for runs in other processes, which import them by name; not a test."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.play.episode import Feedback, RolloutRequest
from lfo.protocol.hermes import format_tool_call
from lfo.types import Rollout, StepResult, ToolCall

LONG = "The line is bad. " * 20  # 340 characters: verl's own tools would cut a reply at 256, in its middle


class FussyWorld(PhoneCalls):
    """The phone-call world with a reward for an arbitrary half of all forms, and a rep who takes his time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"levels": (2,), **options})

    def reward(self) -> float:
        return float(zlib.crc32(" ".join(self.form or ()).encode()) % 2)

    def check(self) -> None:
        pass


class TalkativeWorld(FussyWorld):
    def step(self, message: str) -> StepResult:
        result = super().step(message)
        if "make_phone_call" not in message:
            return result
        return replace(result, observation=LONG + result.observation)


def told_requests(requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
    """Two blind rollouts of the base in place of the policy, one of them told what another has heard."""
    told = Feedback(after=1, action=format_tool_call(ToolCall(name="make_phone_call", arguments={})), observation="No.")
    base = [replace(request, look_ahead=False, imagine=None, player="base") for request in requests[:2]]
    return [base[0], replace(base[1], feedback=told)]


def form_requests(requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
    """Four rollouts that look ahead, two of them also told what another has heard."""
    sighted = [replace(request, look_ahead=True, imagine=None, picks=False) for request in requests[::4][:4]]
    told = Feedback(after=1, action=format_tool_call(ToolCall(name="make_phone_call", arguments={})), observation="No.")
    return [*sighted[:2], *(replace(request, feedback=told) for request in sighted[2:])]


def shown(rollout: Rollout) -> list[bool]:
    return [turn.feedback for turn in rollout.turns]


class ToolWorld(TalkativeWorld):
    """The same world behind verl's tools: replies are what verl's own tool agent would hand on."""

    def __init__(self, *, limit: Any, **options: Any) -> None:
        super().__init__(**options)
        self.limit = limit

    def step(self, message: str) -> StepResult:
        from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
        from verl.experimental.agent_loop.tool_parser import FunctionCall
        from verl.tools.function_tool import FunctionTool

        result = super().step(message)
        loop = SimpleNamespace(
            tools={"call": FunctionTool("call", lambda: result.observation, cast(Any, None))},
            max_tool_response_length=self.limit.max_tool_response_length,
            tool_response_truncate_side=self.limit.tool_response_truncate_side,
        )
        call = FunctionCall(name="call", arguments="{}")
        heard, _, _ = asyncio.run(cast(Any, ToolAgentLoop)._call_tool(loop, call, {}, None))
        return replace(result, observation=heard.text)


class BreakingWorld(FussyWorld):
    """Raises in some rollouts, by what was said."""

    def step(self, message: str) -> StepResult:
        if zlib.crc32(message.encode()) % 5 == 0:
            raise RuntimeError("the line went dead")
        return super().step(message)
