"""Validate what environments answer, where it enters: plain and bounded values, or a failure that names environment and
method.

    opening = opening_of(environment, task)              # reset
    result = checked_step(environment, message)          # step

An environment may return anything: other types, subclasses whose methods raise, numbers of numpy, texts that no file
can hold. Everything is copied into our own types here, inside of the call that has a time limit, so one bad value costs
one rollout and never reaches the rest of the system.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from numbers import Real
from typing import Any, get_args

from lfo.env.patience import EnvironmentRaised, name_of, naming, plain_text, words_of
from lfo.errors import ConfigError, EnvironmentFailed, LfoError
from lfo.protocol.hermes import Mistake, format_tool_call, parse_tool_call
from lfo.types import Message, ReplyFacts, Role, StepResult, ToolCall

logger = logging.getLogger(__name__)

MOST_REWARD = 1e15  # of a rollout, with either sign: sums and squares of such rewards are still numbers
MOST_MESSAGES = 256  # of an opening
MOST_TOOLS = 1_000
MOST_TOOL_CHARS = 1_000_000  # of all schemas
MOST_MOVES = 10_000
MOST_ENTRIES = 1_000  # of an `info`, and of the facts of a reply; others are left out
MOST_CHARS = 1_000  # of an id, of a text in `info`, and of a fact; longer ones are cut
_LARGEST = 2**63  # whole numbers beyond it do not fit into a file or a float


class InvalidAnswer(EnvironmentFailed):
    """An answer of the wrong type or size; asking again would not help."""


def opening_of(environment: Any, task: Any) -> tuple[Message, ...]:
    """Reset an environment and return its opening messages."""
    what = f"reset of {name_of(environment)}"
    with naming(what):
        answer = environment.reset(task)
        if not isinstance(answer, Iterable) or isinstance(answer, str | bytes | Mapping):
            raise InvalidAnswer(f"{what} must return a list of Message, not {_kind(answer)}")
        messages = tuple(_message(each, what) for each in islice(answer, MOST_MESSAGES + 1))
        if not 0 < len(messages) <= MOST_MESSAGES:
            raise InvalidAnswer(f"{what} must return a list of Message: at least one, at most {MOST_MESSAGES}")
        return messages


def _message(message: Any, what: str) -> Message:
    if not isinstance(message, Message):
        raise InvalidAnswer(f"{what} must return a list of Message, not of {_kind(message)}")
    role, content, name = message.role, message.content, message.name
    if not isinstance(role, str) or plain_text(role) not in get_args(Role):
        raise InvalidAnswer(f"{what} returned the role {_shown(role)}; a role is {', '.join(get_args(Role))}")
    if not isinstance(content, str):
        raise InvalidAnswer(f"{what} returned the content {_shown(content)}; the content of a message must be text")
    if not isinstance(name, str | None):
        raise InvalidAnswer(f"{what} returned the name {_shown(name)}; the name of a message must be text or None")
    own: Any = plain_text(role)
    return Message(role=own, content=plain_text(content), name=None if name is None else plain_text(name))


def checked_step(environment: Any, message: str) -> StepResult:
    """Make one step and return its result; reward and done become a float and a bool, `info` gets plain values."""
    what = f"step of {name_of(environment)}"
    with naming(what):
        result = environment.step(message)
        if not isinstance(result, StepResult):
            raise InvalidAnswer(f"{what} must return a StepResult, not {_kind(result)}")
        if not isinstance(result.observation, str):
            raise InvalidAnswer(
                f"{what} must return a StepResult whose observation is text, not {_kind(result.observation)}"
            )
        return StepResult(
            observation=plain_text(result.observation),
            reward=_reward(result.reward, what),
            done=_done(result.done, what),
            info=_info(result.info, what),
        )


def _reward(reward: Any, what: str) -> float:
    try:
        number = float(reward) if isinstance(reward, Real) else float("nan")  # numbers of numpy are Real too
    except OverflowError:  # a whole number of hundreds of digits
        number = float("inf")
    if not abs(number) <= MOST_REWARD:
        raise InvalidAnswer(f"{what} returned the reward {_shown(reward)}; a reward is a number up to {MOST_REWARD:g}")
    return number


def _done(done: Any, what: str) -> bool:
    value = _without_numpy(done)
    if not isinstance(value, int) or int.__int__(value) not in (0, 1):
        raise InvalidAnswer(f"{what} returned {_shown(done)} as done; it must be True or False")
    return bool(int.__int__(value))


def _info(info: Any, what: str) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        raise InvalidAnswer(f"{what} returned an info that is not a mapping: {_shown(info)}")
    return plain_values(info)


def plain_values(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the truth values, finite numbers and texts of a mapping: it may contain anything, but a rollout is written
    as JSON and sent between processes.

    >>> plain_values({"level": 2, "name": "two", "board": [[0]], "share": float("nan"), 7: True})
    {'level': 2, 'name': 'two'}
    """
    plain = {
        plain_text(key)[:MOST_CHARS]: _plain_value(value)
        for key, value in islice(values.items(), MOST_ENTRIES)
        if isinstance(key, str)
    }
    return {key: value for key, value in plain.items() if value is not _OTHER}


def _plain_value(value: Any) -> Any:
    value = _without_numpy(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return plain_text(value)[:MOST_CHARS]
    if isinstance(value, int | float):
        number = int.__int__(value) if isinstance(value, int) else float.__float__(value)
        return number if abs(number) < _LARGEST else _OTHER  # which `nan` is not either
    return _OTHER


_OTHER = object()


def asked_call(environment: Any, transcript: Sequence[Message]) -> ToolCall | None:
    """Return the call that look-ahead should imagine next, or None."""
    what = f"lookahead_query of {name_of(environment)}"
    with naming(what):
        call = environment.lookahead_query(tuple(transcript))
        return None if call is None else _call(call, what)


def legal_moves(environment: Any) -> list[ToolCall]:
    """Return the calls that an environment names as legal now."""
    what = f"moves of {name_of(environment)}"
    with naming(what):
        return [_call(each, what) for each in islice(environment.moves(), MOST_MOVES)]


def _call(call: Any, what: str) -> ToolCall:
    """Return a call as a policy would write it, in plain data."""
    if not isinstance(call, ToolCall):
        raise InvalidAnswer(f"{what} must return a ToolCall or None, not {_shown(call)}")
    try:
        read = parse_tool_call(format_tool_call(call))
    except (Mistake, TypeError, ValueError, RecursionError) as error:
        raise InvalidAnswer(f"{what} returned a call that cannot be written: {words_of(error)}") from error
    assert read is not None
    return read


def described(environment: Any, reply: str) -> ReplyFacts | None:
    """Return the meaning of a reply, or None for a text that this environment never writes, or cannot describe."""
    what = f"describe_reply of {name_of(environment)}"
    try:
        with naming(what):
            answer = environment.describe_reply(reply)
            if answer is None:
                return None
            if not isinstance(answer, ReplyFacts) or not isinstance(answer.category, str):
                raise InvalidAnswer(f"{what} must return ReplyFacts or None, not {_shown(answer)}")
            facts = tuple(plain_text(str(each))[:MOST_CHARS] for each in islice(answer.facts, MOST_ENTRIES))
            return ReplyFacts(category=plain_text(answer.category)[:MOST_CHARS], facts=facts)
    except LfoError as error:  # training does not depend on it
        _warn_once(str(error)[:300])
        return None


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def id_of(task: Any, what: str = "the id of a task") -> str:
    """Return the id of a task as text."""
    with naming(what):
        found = task.id
        return plain_text(found if isinstance(found, str) else str(found))[:MOST_CHARS]


def tools_of(environment: Any) -> list[dict[str, Any]]:
    """Return the tool schemas of an environment as plain JSON; raise a `ConfigError` for what is wrong with them."""
    what = f"tools of {name_of(environment)}"
    try:
        with naming(what):
            found = list(islice(environment.tools(), MOST_TOOLS + 1))
            text = json.dumps([dict(each) for each in found], ensure_ascii=False, allow_nan=False)
            text.encode()
            tools = json.loads(text)
    except EnvironmentRaised as error:
        raise ConfigError(f"{error}; it must return a list of schemas in OpenAI's format, as JSON") from error
    if len(tools) > MOST_TOOLS or len(text) > MOST_TOOL_CHARS:
        raise ConfigError(f"{what}: more than {MOST_TOOLS:,} schemas, or {MOST_TOOL_CHARS:,} characters of them")
    for tool in tools:
        _check_tool(tool, what)
    return tools


def _check_tool(tool: Mapping[str, Any], what: str) -> None:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        needed = '{"type": "function", "function": {"name": "...", "description": "...", "parameters": {...}}}'
        raise ConfigError(f"{what}: each must be {needed}, not {_shown(tool)}")
    if not isinstance(function.get("description"), str | None):
        raise ConfigError(f"{what}: the description of {_shown(function['name'])} must be text")
    if not isinstance(function.get("parameters"), dict | None):
        raise ConfigError(f"{what}: the parameters of {_shown(function['name'])} must be a JSON schema")


def _without_numpy(value: Any) -> Any:
    """Return a scalar of numpy as a Python value; numpy is imported if there is one."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _shown(value: Any) -> str:
    """Return the beginning of a value, and its type."""
    try:
        return f"{plain_text(str(value))[:80]} ({type(value).__name__})"
    except BaseException:  # any value may refuse to be shown
        return f"a value of type {type(value).__name__}"
