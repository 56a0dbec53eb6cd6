"""Tool calls as text in Hermes format, which environments, records and models with Qwen's template use.

    format_tool_call(ToolCall(name="look", arguments={}))
    -> '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'

An environment receives at most one call in a message. A call that cannot be parsed is a `Mistake`, one sentence for the
policy. `tool_calls` translates the forms of other models. Standard library only, because environments import it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lfo.types import ToolCall

MAX_MESSAGE_CHARS = 20_000  # of a message that calls a tool
MAX_NESTING = 8  # of arrays and objects inside a call
MAX_CALLS = 8  # in one message of a policy
MAX_QUOTE_CHARS = 80  # of text of a policy that a reply repeats


class Mistake(Exception):
    """A wrong use of a tool, as one sentence for the policy; raised by the parser and by tools."""


class Unreadable(str):
    """A message with a call that cannot be parsed in the form of the model, and the reason.

    Parsing it as Hermes raises the same `Mistake`. Text of a model is never of this type."""

    why: str

    def __new__(cls, text: str, why: str) -> Unreadable:
        message = super().__new__(cls, text)
        message.why = why
        return message


UNREADABLE = "<tool_call>(unreadable) "  # marks such a message in plain text; no JSON follows the tag
OPENING = "<tool_call>"
_CLOSE = "</tool_call>"
_CALL_STARTS = re.compile(OPENING + r"\s*")
_CALL_ENDS = re.compile(r"\s*" + _CLOSE)
FENCE = "```"
_BLOCK_STARTS = re.compile(FENCE + r"(?:json)?\s*")

Tools = Sequence[Mapping[str, Any]]  # schemas in OpenAI format


def parse_tool_call(message: str) -> ToolCall | None:
    """Return the call of a message, or None; raise a `Mistake` if it cannot be parsed.

    >>> parse_tool_call('<tool_call>{"name": "look", "arguments": {}}</tool_call>')
    ToolCall(name='look', arguments={})
    """
    calls = parse_tool_calls(message)
    if len(calls) > 1:
        raise Mistake("Only one tool call is allowed in a message.")
    return calls[0] if calls else None


def parse_tool_calls(message: str) -> list[ToolCall]:
    """Return all calls of a message, in order; raise a `Mistake` if one cannot be parsed."""
    if isinstance(message, Unreadable):
        raise Mistake(message.why)
    calls: list[ToolCall] = []
    end = 0
    while start := _CALL_STARTS.search(message, end):
        refuse_overlong(message, calls)
        value, end = read_json(message, start.end())
        if not _CALL_ENDS.match(message, end):
            raise Mistake(f"The tool call must end with {_CLOSE} right after its JSON object.")
        calls.append(call_of(value, message))
    return calls


def parse_with_or_without_tags(message: str, tools: Tools) -> list[ToolCall]:
    """Return all calls of a message that a model has written.

    Instruct models whose template is Hermes, above all those for code, often leave out the tags. A message that is one
    JSON object, or has one code block with it, is a call if it has the name of a tool:

        ```json
        {"name": "look", "arguments": {"at": "red"}}
        ```
    """
    calls = parse_tool_calls(message)
    if calls or OPENING in message:
        return calls
    call = _call_without_tags(message, tools)
    return [call] if call else []


def _call_without_tags(message: str, tools: Tools) -> ToolCall | None:
    """Return the call of one of `tools` that is the whole message or its only code block; other JSON is text."""
    if len(message) > MAX_MESSAGE_CHARS:
        return None
    start, block = len(message) - len(message.lstrip()), _BLOCK_STARTS.search(message)
    if block and message.count(FENCE) <= 2:
        start = block.end()
    if not message.startswith("{", start):
        return None
    try:
        value, end = read_json(message, start)
        call = call_of(value, message)
    except Mistake:
        return None
    rest = message[end:].strip()
    ended = rest.startswith(FENCE) if block else not rest
    names = {as_mapping(tool.get("function")).get("name") for tool in tools}
    return call if ended and "arguments" in value and call.name in names else None


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping, or an empty one for any other value: clients of `lfo serve` may send anything as a schema."""
    return value if isinstance(value, Mapping) else {}


def refuse_overlong(message: str, calls: list[ToolCall]) -> None:
    """Raise a `Mistake` if the message is too long or already has the maximum number of calls."""
    if len(message) > MAX_MESSAGE_CHARS:
        raise Mistake(f"The message is longer than {MAX_MESSAGE_CHARS} characters.")
    if len(calls) >= MAX_CALLS:
        raise Mistake(f"At most {MAX_CALLS} tool calls are allowed in a message.")


def read_json(message: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at an index of a message, and the index of its end."""
    try:
        return _DECODER.raw_decode(message, start)
    except json.JSONDecodeError as error:
        raise Mistake(f"The tool call is not valid JSON: {error.msg} at character {error.pos}.") from None
    except RecursionError:
        raise Mistake("The tool call is nested too deeply.") from None


def call_of(value: Any, message: str, *, key: str = "arguments", ignored: tuple[str, ...] = ()) -> ToolCall:
    """Return a JSON value as a call; its arguments are under `key`, and the keys in `ignored` may be present."""
    if type(value) is not dict:
        raise Mistake(f'The tool call must be a JSON object with "name" and "{key}".')
    name = value.get("name")
    if type(name) is not str:
        raise Mistake('The tool call must have a "name" that is a string.')
    arguments = value.get(key, {})
    if type(arguments) is not dict:
        raise Mistake(f'"{key}" of the tool call must be a JSON object.')
    if not value.keys() <= {"name", key, *ignored}:
        raise Mistake(f'The tool call may only have "name" and "{key}".')
    # The next two checks walk the arguments; a quick test of the message decides whether they are needed.
    if message.count("{") + message.count("[") > MAX_NESTING and nests_deeper(arguments, MAX_NESTING):
        raise Mistake("The tool call is nested too deeply.")
    if ("\\u" in message or not message.isascii()) and has_half_character([name, arguments]):
        raise Mistake("The tool call contains half of a Unicode surrogate pair.")
    return ToolCall(name=name, arguments=arguments)


def one_by_one(message: str) -> list[str]:
    """Return the messages for an environment: one for each call, if there are several and all can be parsed."""
    try:
        calls = parse_tool_calls(message)
    except Mistake:
        calls = []
    return [message] if len(calls) < 2 else list(map(format_tool_call, calls))


def without_calls(message: str) -> str:
    """Return the text around the calls of a message that can be parsed."""
    kept, end = "", 0
    while start := _CALL_STARTS.search(message, end):
        kept += message[end : start.start()]
        _, end = read_json(message, start.end())
        closing = _CALL_ENDS.match(message, end)
        end = closing.end() if closing else end
    return (kept + message[end:]).strip()


def read_tool_call(message: str) -> ToolCall | None:
    """Like `parse_tool_call`, but return None if the call cannot be parsed."""
    try:
        return parse_tool_call(message)
    except Mistake:
        return None


def format_tool_call(call: ToolCall) -> str:
    """Return a call as text; the inverse of `parse_tool_call`."""
    body = {"name": call.name, "arguments": dict(call.arguments)}
    return f"{OPENING}\n{json.dumps(body, ensure_ascii=False, allow_nan=False)}\n{_CLOSE}"


def quote(text: str, limit: int = MAX_QUOTE_CHARS) -> str:
    r"""Return text of the policy so that an observation may repeat it: clipped, on one line, tags and quotes escaped.

    >>> print(quote('Acme\n<|im_start|>'))
    "Acme\u000a\u003c|im_start|>"
    """
    shown, room = [], limit
    for character in text[:limit]:
        if character in '"\\':
            character = "\\" + character
        elif character == "<" or not character.isprintable():
            character = f"\\u{ord(character):04x}"
        room -= len(character)
        if room < 0:
            break
        shown.append(character)
    clipped = len(shown) < len(text)
    return '"' + "".join(shown) + ('"...' if clipped else '"')


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise Mistake("The tool call has a key twice in one object.")
    return result


def _integer(text: str) -> int:
    if len(text) > 19:  # before int(), whose time is quadratic in the length
        raise Mistake("The tool call contains a number that is too large.")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise Mistake("The tool call contains a number that is too large.")
    return value


def _constant(text: str) -> float:
    raise Mistake(f"{text} is not a JSON value.")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant)


def nests_deeper(value: dict[str, Any], depth: int) -> bool:
    """Whether the objects and arrays of a JSON object are nested more than `depth` levels deep."""
    level: list[Any] = [value]
    for _ in range(depth):
        items = [item for box in level for item in (box.values() if type(box) is dict else box)]
        level = [item for item in items if type(item) is dict or type(item) is list]
        if not level:
            return False
    return True


def has_half_character(value: Any) -> bool:
    """Whether a JSON value contains half of a Unicode surrogate pair, which is no text."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
