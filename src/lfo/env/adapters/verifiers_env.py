"""Environments of verifiers 0.1, the version of most published ones: `env=verifiers:NAME`.

NAME is an argument of `verifiers.load_environment`: an installed environment package, or a module in the current folder
with a function `load_environment`. The tools of a `ToolEnv` stay tools, and a message without a call is the final
answer; any other environment has the only tool `say(text)`. A rollout uses verifiers' own turns, stop conditions and
rubric, and the rubric gives the reward at the end. Tasks are rows of the environment's data: `train` is its dataset,
`val` its evaluation set, or every fifth row of the dataset if it has none. `env_args` go to the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import verifiers  # pyright: ignore[reportMissingImports]
from verifiers.clients import Client  # pyright: ignore[reportMissingImports]
from verifiers.types import Response, ResponseMessage  # pyright: ignore[reportMissingImports]
from verifiers.types import ToolCall as TheirCall  # pyright: ignore[reportMissingImports]

from lfo.env.adapters.foreign import ForeignEnvironment, Reaction, one_tool
from lfo.env.by_name import find_modules_here, refuse_pythons_own
from lfo.errors import ConfigError, EnvironmentFailed, first_line
from lfo.types import Message, ToolCall

HELD_OUT = 5  # without an evaluation set, every fifth row of the dataset is held out
_SAY = one_tool(
    "say",
    "Say something to the environment.",
    {"type": "object", "properties": {"text": {"type": "string", "description": "your words"}}, "required": ["text"]},
)


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One task: a row of a dataset."""

    id: str
    input: Any


class LibraryEnvironment(ForeignEnvironment):
    word = "verifiers"

    def __init__(
        self, name: str, *, max_mistakes: int = 8, reward_range: Sequence[float] | None = None, **options: Any
    ) -> None:
        super().__init__(name, max_mistakes=max_mistakes, reward_range=reward_range)
        self._library = _loaded(name, json.dumps(options, sort_keys=True))
        tools = self._library.tool_defs or ()
        self._own_tools = [part for each in tools for part in one_tool(each.name, each.description, each.parameters)]
        self._loop = asyncio.new_event_loop()

    def tools(self) -> list[dict[str, Any]]:
        return self._own_tools or _SAY

    def splits(self) -> Mapping[str, Sequence[DatasetRow]]:
        return _splits(self._library)

    def open(self, task: DatasetRow) -> Sequence[Message]:
        library = self._library
        self._state = self._wait(library.init_state(dict(task.input), client=_NoClient(None), model="lfo"))
        self._state["timing"].generation.start = time.time()
        self._wait(library.setup_state(self._state))
        self._prompt = self._wait(library.get_prompt_messages(self._state))
        return [_ours(message) for message in self._prompt]

    def act(self, call: ToolCall) -> Reaction:
        if not self._own_tools:
            return self._turn(content=call.arguments["text"])
        theirs = TheirCall(id=f"call-{self._calls}", name=call.name, arguments=json.dumps(call.arguments))
        return self._turn(tool_calls=[theirs])

    def answer(self, message: str) -> Reaction:
        reaction = self._turn(content=message)
        return reaction if reaction.done else Reaction(observation="", reward=self._score(), done=True)

    def _turn(self, **said: Any) -> Reaction:
        """Make one turn like `MultiTurnEnv.rollout`, with our message instead of a model's."""
        library, state = self._library, self._state
        message = ResponseMessage(finish_reason="stop", is_truncated=False, **said)
        response = Response(id="lfo", created=int(time.time()), model="lfo", message=message)
        self._wait(library.add_model_response(state, self._prompt, response))
        replies: list[Any] = []
        if not self._wait(library.is_completed(state)):
            before = self._prompt
            self._prompt = self._wait(library.get_prompt_messages(state))
            replies = self._prompt[len(before) + 1 :]
            if state.get("final_env_response") is not None:
                replies = replies or state["final_env_response"]
            if not self._wait(library.is_completed(state)):
                return Reaction(observation=_joined(replies))
        return Reaction(observation=_joined(replies), reward=self._score(), done=True)

    def _score(self) -> float:
        library, state = self._library, self._state
        self._wait(library.cleanup(state))
        if state.get("error") is not None:
            raise EnvironmentFailed(f"{self.spec} reports {type(state['error']).__name__}: {state['error']}"[:500])
        self._wait(library.rubric.score_rollout(state))
        return float(state["reward"] or 0)

    def _wait(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)

    def __del__(self) -> None:
        if hasattr(self, "_loop"):
            self._loop.close()


async def _refuse(*_: Any, **__: Any) -> Any:
    raise EnvironmentFailed("this environment of verifiers asks a model by itself, which is not supported")


# Replaces the model client, which our rollouts do not use.
_NoClient = type("_NoClient", (Client,), dict.fromkeys(Client.__abstractmethods__, _refuse))


@functools.cache
def _loaded(name: str, options: str) -> Any:
    """Load an environment once: it has data and tools, but no state of a rollout."""
    find_modules_here()
    try:
        refuse_pythons_own(name.rpartition("/")[2].replace("-", "_"))  # as the library makes a module of a name
        with _keeping_signals():
            library = verifiers.load_environment(name, **json.loads(options))
    except Exception as error:
        reason = first_line(error, type(error).__name__)
        raise ConfigError(f"env=verifiers:{name} cannot be loaded: {reason}") from error
    if not isinstance(library, verifiers.MultiTurnEnv):
        kind = type(library).__name__
        raise ConfigError(f"env=verifiers:{name} is a {kind}; only environments of turns (MultiTurnEnv) can be played")
    return library


@contextlib.contextmanager
def _keeping_signals() -> Iterator[None]:
    """The library replaces handlers of signals, which must stay, and which only the main thread may replace."""
    real = signal.signal
    signal.signal = lambda number, handler: signal.getsignal(number)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        signal.signal = real


_SPLITS: dict[int, dict[str, list[DatasetRow]]] = {}


def _splits(library: Any) -> dict[str, list[DatasetRow]]:
    if id(library) not in _SPLITS:
        rows = list(library.get_dataset())
        held_out = list(library.get_eval_dataset()) if library.eval_dataset is not None else []
        if not held_out and len(rows) > 1:
            places = range(HELD_OUT - 1, len(rows), HELD_OUT) or (len(rows) - 1,)
            held_out = [rows[place] for place in places]
            rows = [row for place, row in enumerate(rows) if place not in places]
        splits = {"train": rows, "val": held_out or rows}
        _SPLITS[id(library)] = {
            split: [DatasetRow(f"{split}-{index}", row) for index, row in enumerate(each)]
            for split, each in splits.items()
        }
    return _SPLITS[id(library)]


def _ours(message: Any) -> Message:
    role = message["role"]
    if role not in ("system", "user", "assistant"):
        raise EnvironmentFailed(f"a prompt of verifiers has a message of role {role}, which cannot open a rollout")
    return Message(role=role, content=_text(message))


def _joined(messages: Sequence[Any]) -> str:
    return "\n".join(_text(message) for message in messages)


def _text(message: Any) -> str:
    content = message["content"]
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(str(part["text"]) for part in content if part["type"] == "text")
