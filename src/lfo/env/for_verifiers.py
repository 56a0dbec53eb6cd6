"""Use our environments in verifiers (0.1): `verifiers_environment(OracleCodes)` is a `MultiTurnEnv`.

    # oracle_env.py, a verifiers environment package
    def load_environment(**arguments):
        return verifiers_environment(partial(OracleCodes, **arguments))

Tools keep their schemas, a message without a call ends the rollout, and the reward is that of our environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import verifiers  # pyright: ignore[reportMissingImports]
from datasets import Dataset
from verifiers.types import Tool, ToolMessage  # pyright: ignore[reportMissingImports]

from lfo.env.for_trl import started, trl_rows
from lfo.env.interface import FAREWELL, EnvironmentFactory
from lfo.protocol.hermes import Mistake, format_tool_call
from lfo.types import StepResult, ToolCall


def verifiers_environment(factory: EnvironmentFactory, *, max_turns: int = 16) -> Any:
    """Return a verifiers environment with the tasks of `train` as dataset and those of `val` as evaluation set."""
    tools = [
        Tool(name=each["name"], description=each.get("description") or "", parameters=_parameters_of(each))
        for each in (tool["function"] for tool in factory().tools())
    ]
    return Wrapped(
        factory,
        dataset=_rows(factory, "train"),
        eval_dataset=_rows(factory, "val"),
        tool_defs=tools,
        rubric=verifiers.Rubric(funcs=[_reward]),
        max_turns=max_turns,
    )


def _parameters_of(function: Mapping[str, Any]) -> dict[str, Any]:
    return dict(function.get("parameters") or {"type": "object", "properties": {}})


class Wrapped(verifiers.MultiTurnEnv):
    def __init__(self, factory: EnvironmentFactory, **options: Any) -> None:
        super().__init__(**options)
        self._make = factory

    async def setup_state(self, state: Any) -> None:
        """Create one of our environments for each rollout and start the task of its row."""
        info = state["info"]
        state["lfo"], state["paid"], state["over"] = started(self._make, info["split"], info["task_id"]), 0.0, False

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        said = messages[-1]
        replies = []
        for call in said.tool_calls or ():
            if not state["over"]:
                result = _step(state, _message(call))
                replies.append(ToolMessage(content=result.observation, tool_call_id=call.id))
        if not said.tool_calls:
            _step(state, str(said.content or FAREWELL))
        if state["over"]:
            state["final_env_response"] = replies or [{"role": "user", "content": "It is over."}]
        return replies


def _step(state: Any, message: str) -> StepResult:
    result = state["lfo"].step(message)
    state["paid"] += float(result.reward)
    state["over"] = bool(result.done)
    return result


def _message(call: Any) -> str:
    """Return a call of verifiers in the format of our environments, which reply to invalid calls themselves."""
    try:
        return format_tool_call(ToolCall(name=call.name, arguments=json.loads(call.arguments)))
    except (ValueError, TypeError, Mistake):
        return f"<tool_call>{call.arguments}</tool_call>"


async def _reward(state: Any) -> float:
    """Return the reward; a rollout that ran out of turns gets the reward for stopping."""
    if not state["over"]:
        _step(state, FAREWELL)
    return state["paid"]


def _rows(factory: EnvironmentFactory, split: str) -> Dataset:
    rows = trl_rows(factory, split)
    return Dataset.from_list([{"prompt": each.pop("prompt"), "info": json.dumps(each)} for each in rows])
