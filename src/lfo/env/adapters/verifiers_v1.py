"""Environments of verifiers 0.4 (`verifiers.v1`): `env=verifiers:NAME`, where that version is installed.

NAME is the id of a taskset: an installed package, or a module in the current folder. A task's prompt opens the rollout,
the tools of its toolsets are called in this process, and a message without a call is the final answer. The trace is
written as verifiers would write it; the task's own stop conditions, rewards and metrics read it. Tasks that need a
container, a harness of their own or a user who answers are not supported. Every fifth task is in `val`.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from mcp.server.mcpserver import MCPServer  # pyright: ignore[reportMissingImports]
from verifiers.v1.graph import MessageNode  # pyright: ignore[reportMissingImports]
from verifiers.v1.state import state_cls  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils.decorators import invoke_all  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils.generic import concrete_type  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils.loaders import taskset_class  # pyright: ignore[reportMissingImports]

from lfo.env.adapters.foreign import ForeignEnvironment, Reaction, one_tool
from lfo.env.by_name import find_modules_here, refuse_pythons_own
from lfo.errors import ConfigError, EnvironmentFailed, UsageError
from lfo.protocol.hermes import without_calls
from lfo.types import Message, ToolCall

HELD_OUT = 5  # every fifth task is held out
MOST_TASKS = 10_000  # of a taskset without an end
_ANSWER = one_tool(
    "answer",
    "Give the final answer.",
    {"type": "object", "properties": {"text": {"type": "string", "description": "the answer"}}, "required": ["text"]},
)


@dataclass(frozen=True, slots=True)
class TasksetTask:
    id: str
    task: Any


class LibraryEnvironment(ForeignEnvironment):
    word = "verifiers"

    def __init__(
        self, name: str, *, max_mistakes: int = 8, reward_range: Sequence[float] | None = None, **options: Any
    ) -> None:
        super().__init__(name, max_mistakes=max_mistakes, reward_range=reward_range)
        self._taskset = _loaded(name, json.dumps(options, sort_keys=True))
        self._loop = asyncio.new_event_loop()
        self._trace: Any = None
        shared = type(self._taskset).toolsets(self._taskset.config)
        task_config = getattr(self._taskset.config, "task", None) or self._taskset.task_type().config_type()()
        self._servers = [*shared, *self._taskset.task_type().toolsets(task_config)]
        self._mcp = [self._wait(self._started(server)) for server in self._servers]
        self._owner: dict[str, tuple[Any, str]] = {}  # the name of a tool -> its server, and its name there
        listed = map(self._list, self._servers, self._mcp)
        self._own_tools = [tool for tools in listed for tool in tools]

    def tools(self) -> list[dict[str, Any]]:
        return self._own_tools or _ANSWER

    def tasks(self, split: str) -> Sequence[TasksetTask]:
        if split not in ("train", "val"):
            raise UsageError(f"{self.spec} has no split {split!r}; it has train, val")
        every = _tasks(self.name, self._taskset)
        held = range(HELD_OUT - 1, len(every), HELD_OUT) or range(len(every) - 1, len(every))
        return [each for place, each in enumerate(every) if (place in held) == (split == "val") or len(every) == 1]

    def open(self, task: TasksetTask) -> Sequence[Message]:
        theirs = task.task
        if theirs.NEEDS_CONTAINER:
            raise EnvironmentFailed(f"{self.spec}: its tasks need a container, which is not supported")
        self._task = theirs
        described = vf.TraceTask(type=type(theirs).__name__, data=theirs.data, key=theirs.key, hash=theirs.hash)
        agent = vf.AgentInfo(config=vf.AgentConfig())
        self._trace = vf.Trace(task=described, state=state_cls(type(theirs))(), agent=agent)
        self._wait(theirs.setup(self._trace, None))
        for server in self._servers:
            self._share_state(server)
            self._wait(server.setup_task(theirs.data))
        prompt = theirs.data.prompt
        prompt = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
        if not prompt:
            raise EnvironmentFailed(f"{self.spec}: a user opens the conversation, which is not supported")
        if theirs.data.system_prompt:
            prompt = [vf.SystemMessage(content=theirs.data.system_prompt), *prompt]
        for message in prompt:
            self._add(message)
        return [Message(role=message.role, content=_text(message)) for message in prompt]

    def act(self, call: ToolCall) -> Reaction:
        if not self._own_tools:
            return self._finished(call.arguments["text"])
        number = f"call-{self._calls}"
        theirs = vf.ToolCall(id=number, name=call.name, arguments=json.dumps(call.arguments))
        self._add(vf.AssistantMessage(content="", tool_calls=[theirs]), sampled=True)
        mcp, own_name = self._owner[call.name]
        result = self._wait(mcp.call_tool(own_name, dict(call.arguments)))
        reply = "\n".join(part.text for part in result.content if getattr(part, "text", None) is not None)
        self._add(vf.ToolMessage(tool_call_id=number, content=reply))
        hooks = self._task.hooks("stop")
        stopped = self._wait(invoke_all(hooks, {"task": self._task.data, "trace": self._trace})) if hooks else ()
        return Reaction(observation=reply, **({"reward": self._score(), "done": True} if any(stopped) else {}))

    def answer(self, message: str) -> Reaction:
        return self._finished(without_calls(message))

    def _finished(self, text: str) -> Reaction:
        self._add(vf.AssistantMessage(content=text), sampled=True)
        return Reaction(observation="", reward=self._score(), done=True)

    def _score(self) -> float:
        self._trace.is_completed = self._trace.ok = True
        self._wait(self._task.finalize(self._trace, None))
        self._wait(self._task.score(self._trace))
        return float(self._trace.reward)

    def _add(self, message: Any, *, sampled: bool = False) -> None:
        nodes = self._trace.nodes
        nodes.append(MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))

    async def _started(self, server: Any) -> MCPServer:
        await server.setup()
        mcp = MCPServer(server.server_name or type(server).__name__)
        server.register(mcp)
        return mcp

    def _list(self, server: Any, mcp: MCPServer) -> list[dict[str, Any]]:
        found = []
        for tool in self._wait(mcp.list_tools()):
            name = f"{server.server_name}_{tool.name}" if server.server_name else tool.name
            self._owner[name] = mcp, tool.name
            schema = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None) or {}
            found += one_tool(name, tool.description or "", schema)
        return found

    def _share_state(self, server: Any) -> None:
        """Let the tools of a server read and write the state of the trace, which verifiers sends over HTTP."""

        async def pull() -> Any:
            return self._trace.state

        async def push(before: bytes) -> None:
            pass  # the tools have changed the object itself

        server._pull_state, server._push_state = pull, push

    def _wait(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)

    def __del__(self) -> None:
        if hasattr(self, "_loop"):
            self._loop.close()


@functools.cache
def _loaded(name: str, options: str) -> Any:
    find_modules_here()
    try:
        refuse_pythons_own(name.rpartition("/")[2].replace("-", "_"))
        made_by = taskset_class(name)
        config_class = concrete_type(made_by, vf.TasksetConfig) or vf.TasksetConfig
        return made_by(config_class(id=name, **json.loads(options)))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"env=verifiers:{name} cannot be loaded: {reason}") from error


_TASKS: dict[int, list[TasksetTask]] = {}


def _tasks(name: str, taskset: Any) -> list[TasksetTask]:
    if id(taskset) not in _TASKS:
        bounded = taskset if taskset.bounded else taskset.take(MOST_TASKS)
        named = ((str(each.data.id or f"{name}-{place}"), each) for place, each in enumerate(bounded))
        _TASKS[id(taskset)] = [TasksetTask(*each) for each in named]
    return _TASKS[id(taskset)]


def _text(message: Any) -> str:
    content = message.content
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(part.text for part in content if getattr(part, "text", None) is not None)
