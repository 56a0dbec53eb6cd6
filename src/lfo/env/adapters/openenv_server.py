"""Environments of an OpenEnv server: `env=openenv:http://127.0.0.1:8000`.

A server with tools (MCP) keeps them. The action of any other server becomes the only tool `act`, with the schema that
the server publishes. Each rollout has its own session over a WebSocket, so the server must allow as many sessions as
there are parallel rollouts (`max_concurrent_envs`). A task is a seed for the server's `reset`.
"""

from __future__ import annotations

import functools
import json
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from openenv.core.env_server.mcp_types import (  # pyright: ignore[reportMissingImports]
    CallToolAction,
    CallToolObservation,
)
from openenv.core.generic_client import GenericEnvClient  # pyright: ignore[reportMissingImports]
from openenv.core.mcp_client import MCPToolClient  # pyright: ignore[reportMissingImports]

from lfo.env.adapters.foreign import ForeignEnvironment, Reaction, SeededTask, one_tool, system_message
from lfo.errors import ConfigError
from lfo.protocol.hermes import Mistake
from lfo.types import Message, ToolCall

PATIENCE = 10.0  # seconds to wait for a server
HIDDEN_KEYS = ("done", "reward", "metadata")  # keys of an observation that the policy does not see
REFUSED = ("VALIDATION_ERROR", "INVALID_JSON")  # codes that mean a bad action


class LibraryEnvironment(ForeignEnvironment):
    word = "openenv"

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self._has_tools, self._tools = _published(name.rstrip("/"))

    def tools(self) -> list[dict[str, Any]]:
        return self._tools

    def open(self, task: SeededTask) -> Sequence[Message]:
        kind = MCPToolClient if self._has_tools else GenericEnvClient
        self._client = kind(base_url=self.name.rstrip("/")).sync()
        weakref.finalize(self, _close, self._client)  # for a rollout that ends before the environment is done
        self._client.connect()
        observation = self._client.reset(seed=task.seed).observation
        goal = Message(role="user", content=_words(observation) or "Begin.")
        return [system_message("behind this server"), goal]

    def act(self, call: ToolCall) -> Reaction:
        action = (
            CallToolAction(tool_name=call.name, arguments=dict(call.arguments))
            if self._has_tools
            else dict(call.arguments)
        )
        try:
            result = self._client.step(action)
        except RuntimeError as error:  # the client raises it if the server rejects an action
            if any(code in str(error) for code in REFUSED):
                raise Mistake("The server refused the action.") from error
            raise
        if result.done:
            _close(self._client)
        return Reaction(
            observation=_words(result.observation), reward=float(result.reward or 0), done=bool(result.done)
        )


@functools.cache
def _published(url: str) -> tuple[bool, list[dict[str, Any]]]:
    """Return whether a server has its own tools, and the tools for the policy."""
    if not url.startswith(("http://", "https://")):  # urllib would open files too
        raise ConfigError(f"env=openenv:{url}: name a server, as in openenv:http://127.0.0.1:8000")
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=PATIENCE) as answer:
            action = json.load(answer)["action"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"env=openenv:{url}: no OpenEnv server answers there ({error})") from error
    if "tool_name" not in action.get("properties", {}):
        properties = {key: value for key, value in action.get("properties", {}).items() if key != "metadata"}
        schema = {**action, "properties": properties}
        return False, one_tool("act", action.get("description") or "Take one action.", schema)
    client = MCPToolClient(base_url=url).sync()
    try:
        listed = client.list_tools()
    except Exception as error:
        raise ConfigError(f"env=openenv:{url}: the server does not list its tools ({error})") from error
    finally:
        _close(client)
    return True, [part for each in listed for part in one_tool(each.name, each.description, each.input_schema)]


def _words(observation: Any) -> str:
    """Return an observation as text: its only field, or each field with its name."""
    if isinstance(observation, CallToolObservation):
        if observation.error is not None:
            return f"Error: {observation.error.message}"
        result = observation.result
        data = result.get("data", result) if isinstance(result, Mapping) else getattr(result, "data", result)
        return _text(data)
    fields = observation if isinstance(observation, Mapping) else observation.model_dump()
    shown = {key: value for key, value in fields.items() if key not in HIDDEN_KEYS}
    if len(shown) == 1:
        return _text(next(iter(shown.values())))
    return "\n".join(f"{key}: {_text(value)}" for key, value in shown.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _close(client: Any) -> None:
    try:
        client.close()
    except Exception:  # already closed, or the server is gone
        return
