"""A base class for environments: tools are typed methods, messages and observations are text.

A subclass implements its tools as typed methods and its reward as a function of the final state. This base class parses
the policy's message, validates the call against the type hints and counts mistakes.

    class Lamp(ToolEnvironment):
        def tasks(self, split): return [LampTask(id="1")]
        def start(self, task): self.on = False; return [Message(role="user", content="Light the lamp.")]
        def reward(self): return float(self.on)
        def finished(self): return self.on

        @tool
        def switch(self, state: Literal["on", "off"]) -> str:
            '''Turn the lamp on or off.

            state: what the lamp should be
            '''
            self.on = state == "on"
            return f"The lamp is {state}."

`step` never raises because of what a policy writes: an invalid call gets one sentence as reply and counts as a mistake,
and the rollout continues. Text of a policy is repeated only through `quote`.

`lfo.protocol` turns messages into tokens, not this module.
"""

from __future__ import annotations

import difflib
import inspect
import re
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar

from lfo.errors import UsageError
from lfo.protocol.hermes import MAX_QUOTE_CHARS, Mistake, parse_tool_call, quote
from lfo.types import Message, StepResult

MAX_ARGUMENT_CHARS = 1_000  # of any string in the arguments


# --- typed methods as tools ------------------------------------------------------------------------------------------

Method = TypeVar("Method", bound=Callable[..., str])


def tool(method: Method) -> Method:
    """Make a typed method a tool; the model reads its docstring.

    The first paragraph describes the tool. A later line `argument: text`, with the indented lines below it, describes
    an argument. `ToolEnvironment.tool_text` fills the `{placeholders}` that it names; others stay. Arguments may be
    str, int, float, bool, list[str], dict[str, str] or a Literal of strings, also `| None`, and may have a default.
    """
    method.__dict__["is_tool"] = True
    return method


Problem = Callable[[Any], str | None]  # the error of a value, as the end of "argument x ...", or None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tool:
    """What is known about a tool when its class is created."""

    name: str
    method: Callable[..., str]
    schema: Mapping[str, Any]  # OpenAI format, with placeholders
    problems: Mapping[str, Problem]
    required: tuple[str, ...]

    def call(self, environment: ToolEnvironment, arguments: Mapping[str, Any]) -> str:
        problems = self.problems
        for name, value in arguments.items():
            problem_of = problems.get(name)
            if problem_of is None:
                known = ", ".join(problems) or "none"
                raise Mistake(f"{self.name} has no argument {quote(name)}; its arguments are: {known}.")
            problem = problem_of(value)
            if problem is not None:
                raise Mistake(f"Argument {name} of {self.name} {problem}.")
        for name in self.required:
            if name not in arguments:
                raise Mistake(f"{self.name} needs the argument {name}.")
        return self.method(environment, **arguments)


class ToolEnvironment(ABC):
    """An environment whose actions are calls of its `@tool` methods. Single-use: one object plays one rollout.

    A rollout ends when the policy writes a message without a call, when `finished()` returns True, or after
    `max_mistakes` mistakes. Its reward is then computed once, from the state.
    """

    max_mistakes: int = 8
    mistakes: int = 0

    _tools: ClassVar[Mapping[str, _Tool]] = {}
    _phase: Literal["new", "playing", "done"] = "new"

    # A subclass implements these.

    @abstractmethod
    def tasks(self, split: str) -> Sequence[Any]:
        """Return the tasks of a split, each with an `id`."""

    @abstractmethod
    def start(self, task: Any) -> Sequence[Message]:
        """Set up the state for a task and return the opening messages."""

    @abstractmethod
    def reward(self) -> float:
        """Return the reward of the current state; called once, at the end."""

    @abstractmethod
    def finished(self) -> bool:
        """Whether the environment ends the rollout; called after every step."""

    def info(self) -> dict[str, Any]:
        """Return structured facts about the state; the policy never sees them."""
        return {}

    def tool_text(self) -> Mapping[str, str]:
        """Return the texts of the `{placeholders}` in tool docstrings."""
        return {}

    def check(self) -> None:  # noqa: B027 - optional in a subclass
        """Raise an AssertionError if the state is inconsistent; for tests."""

    # The rest of the system calls these.

    def tools(self) -> list[dict[str, Any]]:
        texts = self.tool_text()
        return [_fill(known.schema, texts) for known in self._tools.values()]

    def reset(self, task: Any) -> Sequence[Message]:
        if self._phase != "new":
            raise UsageError("An environment plays one rollout; make a new one for the next.")
        messages = tuple(self.start(task))
        self._phase = "playing"
        return messages

    def step(self, message: str) -> StepResult:
        if self._phase != "playing":
            raise UsageError("step() needs a rollout that was reset and is not done.")
        name = None
        mistake = done = False
        try:
            call = parse_tool_call(message)
            if call is None:
                observation, done = "", True
            elif call.name not in self._tools:
                raise Mistake(self._no_such_tool(call.name))
            else:
                name = call.name
                observation = self._tools[name].call(self, call.arguments)
        except Mistake as error:
            observation, mistake = str(error), True
            self.mistakes += 1
        done = done or self.mistakes >= self.max_mistakes or self.finished()
        result = StepResult(
            observation=observation,
            reward=self.reward() if done else 0.0,
            done=done,
            info={"tool": name, "mistake": mistake, "mistakes": self.mistakes, **self.info()},
        )
        if done:
            self._phase = "done"
        return result

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
        methods = {name: getattr(cls, name, None) for name in names}
        try:
            cls._tools = {
                name: _build_tool(name, method)
                for name, method in methods.items()
                if inspect.isfunction(method) and method.__dict__.get("is_tool")
            }
        except TypeError as error:
            raise TypeError(f"class {cls.__name__}: {error}") from None

    def _no_such_tool(self, name: str) -> str:
        nearest = difflib.get_close_matches(name[:MAX_QUOTE_CHARS], self._tools, n=1, cutoff=0.0)
        return f"There is no tool {quote(name)}" + (f"; did you mean {nearest[0]}?" if nearest else ".")


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _build_tool(name: str, method: Callable[..., str]) -> _Tool:
    hints = typing.get_type_hints(method)
    if hints.pop("return", None) is not str:
        raise TypeError(f"tool {name} must be annotated to return str")
    if not method.__doc__:
        raise TypeError(f"tool {name} needs a docstring, because the model reads it")
    description, descriptions = _read_docstring(inspect.cleandoc(method.__doc__), tuple(hints))
    problems: dict[str, Problem] = {}
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in list(inspect.signature(method).parameters.values())[1:]:  # without self
        if parameter.name not in hints or parameter.kind not in _BY_NAME:  # calls name their arguments
            raise TypeError(f"tool {name}: parameter {parameter.name} must be a named one with a type hint")
        schema, problems[parameter.name] = _read_hint(name, parameter.name, hints[parameter.name])
        if parameter.name in descriptions:
            schema["description"] = descriptions[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            schema["default"] = parameter.default
        properties[parameter.name] = schema
    parameters = {"type": "object", "properties": properties, "required": required}
    schema = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
    return _Tool(name=name, method=method, schema=schema, problems=problems, required=tuple(required))


def _read_docstring(text: str, parameters: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Parse a docstring into (description, description of each argument)."""
    first, _, rest = text.partition("\n\n")
    descriptions: dict[str, str] = {}
    current = None
    for line in rest.splitlines():
        name, colon, words = line.strip().partition(":")
        if colon and name in parameters:
            current = name
            descriptions[name] = words.strip()
        elif current and line[:1].isspace() and line.strip():
            descriptions[current] += " " + line.strip()
        else:
            current = None
    return " ".join(first.split()), descriptions


def _read_hint(tool_name: str, parameter: str, hint: Any) -> tuple[dict[str, Any], Problem]:
    """Return the JSON schema and the validator of a type hint."""
    if typing.get_origin(hint) is Literal and all(type(choice) is str for choice in typing.get_args(hint)):
        choices = typing.get_args(hint)
        words = "must be one of: " + ", ".join(choices)
        return (
            {"type": "string", "enum": list(choices)},
            lambda value: None if type(value) is str and value in choices else words,
        )
    parts = [part for part in typing.get_args(hint) if part is not NoneType]
    if typing.get_origin(hint) in (UnionType, typing.Union) and len(parts) == 1:  # X | None
        schema, problem_of = _read_hint(tool_name, parameter, parts[0])
        return {"anyOf": [schema, {"type": "null"}]}, lambda value: None if value is None else problem_of(value)
    for known, schema, problem in _HINTS:
        if hint == known:
            return dict(schema), problem
    supported = "str, int, float, bool, list[str], dict[str, str], a Literal of strings, and each | None"
    raise TypeError(f"tool {tool_name}: parameter {parameter} has the type hint {hint}; supported are {supported}")


_TOO_LONG = f"contains more than {MAX_ARGUMENT_CHARS} characters in one string"


def _texts(kind: type, words: str) -> Problem:
    """Return the check of a string, or of a list or an object of strings."""

    def problem(value: Any) -> str | None:
        if type(value) is not kind:
            return words
        texts = value if kind is list else [*value.values(), *value] if kind is dict else [value]
        if any(type(text) is not str for text in texts):
            return words
        return _TOO_LONG if any(len(text) > MAX_ARGUMENT_CHARS for text in texts) else None

    return problem


_HINTS: tuple[tuple[Any, Mapping[str, Any], Problem], ...] = (
    (str, {"type": "string"}, _texts(str, "must be a string")),
    (int, {"type": "integer"}, lambda value: None if type(value) is int else "must be an integer"),
    (float, {"type": "number"}, lambda value: None if type(value) in (int, float) else "must be a number"),
    (bool, {"type": "boolean"}, lambda value: None if type(value) is bool else "must be true or false"),
    (list[str], {"type": "array", "items": {"type": "string"}}, _texts(list, "must be a list of strings")),
    (
        dict[str, str],
        {"type": "object", "additionalProperties": {"type": "string"}},
        _texts(dict, "must be an object with string values"),
    ),
)


def _fill(value: Any, texts: Mapping[str, str]) -> Any:
    """Return a deep copy of a schema with filled placeholders."""
    if isinstance(value, dict):
        return {
            key: _PLACEHOLDER.sub(lambda match: texts.get(match[1], match[0]), item)
            if key == "description" and isinstance(item, str)
            else _fill(item, texts)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_fill(item, texts) for item in value]
    return value


_PLACEHOLDER = re.compile(r"\{(\w+)\}")
