"""Use our environments in TRL: tools as methods, tasks as rows, for `GRPOTrainer(environment_factory=...)`.

    GRPOTrainer(
        model, args=..., processing_class=tokenizer,
        environment_factory=trl_environment(OracleCodes), train_dataset=Dataset.from_list(trl_rows(OracleCodes)),
    )

A TRL environment cannot end a rollout: after the end, each tool returns that it is over. The reward is the sum of our
environment's rewards, including the reward for stopping if the policy stopped early. This module does not import TRL.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

from lfo.env.interface import FAREWELL, Environment, EnvironmentFactory, tasks_of
from lfo.errors import UsageError
from lfo.protocol.hermes import format_tool_call
from lfo.types import ToolCall

OVER = "It is over."
_TYPES: Mapping[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}


def trl_rows(factory: EnvironmentFactory, split: str = "train", count: int | None = None) -> list[dict[str, Any]]:
    """Return tasks as dataset rows: the opening messages as the prompt, and the id of the task."""
    rows = []
    for task in tasks_of(factory(), split)[:count]:
        opening = factory().reset(task)
        prompt = [{"role": message.role, "content": message.content} for message in opening]
        rows.append({"prompt": prompt, "task_id": str(task.id), "split": split})
    return rows


def started(factory: EnvironmentFactory, split: str, task_id: str | None) -> Environment:
    """Return a new environment with the task of a row."""
    environment = factory()
    task = next((task for task in tasks_of(environment, split) if str(task.id) == task_id), None)
    if task is None:
        raise UsageError(f"split {split} has no task {task_id}; make the rows with trl_rows")
    environment.reset(task)
    return environment


def trl_environment(factory: EnvironmentFactory) -> type:
    """Return a class whose methods are the tools of the environment, with the signatures and docstrings for TRL."""
    tools = [tool["function"] for tool in factory().tools()]
    if reserved := sorted({"reset", "get_reward"} & {tool["name"] for tool in tools}):
        raise UsageError(f"a tool cannot be named {reserved[0]} in TRL, which reserves this name; rename it")
    methods = {tool["name"]: _method(tool) for tool in tools}
    return type("TrlEnvironment", (_TrlEnvironment,), {**methods, "_factory": staticmethod(factory)})


class _TrlEnvironment:
    """Plays one rollout after the other, because TRL reuses its environments."""

    _factory: Any
    _environment: Any = None
    _reward = 0.0
    _done = True

    def reset(self, task_id: str | None = None, split: str = "train", **_: Any) -> None:
        """Start the task of a row; its opening messages are the prompt of the row."""
        self._environment, self._reward, self._done = started(self._factory, split, task_id), 0.0, False

    def get_reward(self) -> float:
        if not self._done:
            self._step(FAREWELL)
        return self._reward

    def _step(self, message: str) -> str:
        if self._done:
            return OVER
        result = self._environment.step(message)
        self._reward += float(result.reward)
        self._done = bool(result.done)
        return result.observation


def _method(tool: Mapping[str, Any]) -> Any:
    """Return a function that calls the tool, with a signature and docstring made from the schema."""
    name, schema = tool["name"], tool.get("parameters") or {}
    required = schema.get("required", ())
    hints = {argument: _hint(part) for argument, part in schema.get("properties", {}).items()}

    def method(self: _TrlEnvironment, **arguments: Any) -> str:
        given = {key: value for key, value in arguments.items() if key in required or value is not None}
        return self._step(format_tool_call(ToolCall(name=name, arguments=given)))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(
            argument, kind, annotation=hint, default=inspect.Parameter.empty if argument in required else None
        )
        for argument, hint in sorted(hints.items(), key=lambda each: each[0] not in required)
    ]
    own = inspect.Parameter("self", kind)
    method.__name__ = method.__qualname__ = name
    method.__signature__ = inspect.Signature([own, *parameters], return_annotation=str)  # type: ignore[attr-defined]
    method.__annotations__ = {**hints, "return": str}
    described = [
        f"    {argument}: {' '.join(str(part.get('description') or argument).split())}"
        for argument, part in schema.get("properties", {}).items()
    ]
    about = " ".join(str(tool.get("description") or name).split())
    method.__doc__ = "\n".join(
        [about, "", *(["Args:", *described, ""] if described else []), "Returns:", "    the reply"]
    )
    return method


def _hint(schema: Mapping[str, Any]) -> Any:
    schema = next((part for part in schema.get("anyOf", ()) if part.get("type") != "null"), schema)
    if choices := schema.get("enum"):
        return Literal[tuple(choices)]
    kind = schema.get("type", "string")
    hint = _TYPES.get(kind if isinstance(kind, str) else "string", str)
    items = schema.get("items")
    if hint is list and items:
        return list[_hint(items)]  # type: ignore[misc]
    return dict[str, str] if hint is dict else hint
