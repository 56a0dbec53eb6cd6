"""Translate between OpenAI's chat format and our types. Pure functions that validate everything a client sends.

    request = parse_request(body, model="x")       a `ChatRequest`, or `RefusedRequest` with one sentence
    completion(reply, model="x")                   the response
    chunks(reply, model="x")                       the response as events of a stream

An option that would change the reply but is not supported is rejected; unknown options are ignored.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

from lfo.errors import UsageError
from lfo.protocol.hermes import format_tool_call, has_half_character, nests_deeper
from lfo.serving.options import unsupported
from lfo.types import Message, Role, ToolCall, Turn

MAX_MESSAGES = 512
MAX_TOOLS = 128
MAX_NESTING = 64  # of JSON inside a request
GREEDY_BELOW = 0.01  # lower temperatures mean greedy decoding
SPEAKERS = ("system", "developer", "user", "assistant", "tool")
MAX_DIGITS = 308  # of a whole number, which then fits into a 64-bit float


class RefusedRequest(UsageError):
    """A request that is rejected, with one sentence for the client."""

    def __init__(self, sentence: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(sentence)
        self.param, self.code, self.status = param, code, status

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A request for the next message of a conversation."""

    messages: tuple[Message, ...]
    call_ids: tuple[str | None, ...]  # of each message: the id of the first call in it
    tools: tuple[Mapping[str, Any], ...] | None = None  # None: the tools of training
    temperature: float | None = None  # None: the run's
    max_tokens: int | None = None
    seed: int | None = None
    stream: bool = False
    usage_in_stream: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The agent's next message: `Reply(content="", calls={"call_5f": ToolCall(...)}, finish="tool_calls")`."""

    content: str
    calls: Mapping[str, ToolCall] = field(default_factory=dict)  # by id, in order
    finish: str = "stop"  # or tool_calls, length
    prompt_tokens: int = 0
    completion_tokens: int = 0
    imagined: Sequence[Turn] = field(default=())  # imagined exchanges before the message


def parse_request(body: bytes, *, model: str) -> ChatRequest:
    """Parse the body of a request to a server with this model."""
    try:
        wanted = _read_json(body.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise RefusedRequest("the body is not a JSON object in UTF-8") from None
    right = isinstance(wanted, dict) and not nests_deeper(wanted, MAX_NESTING)
    _require(right, f"the body must be a JSON object, nested at most {MAX_NESTING} deep")
    name, stream = _part(wanted, "model"), _part(wanted, "stream")
    _require(isinstance(name, str), f"model must be the name of the served model, {model!r}", "model")
    if name != model:
        sentence = f"there is no model {name[:80]!r}; this server has {model!r}"
        raise RefusedRequest(sentence, param="model", code="model_not_found", status=404)
    if refused := unsupported(wanted):
        raise RefusedRequest(refused[1], param=refused[0])
    _require(isinstance(stream, bool | None), "stream must be true or false", "stream")
    messages, call_ids = _read_messages(wanted.get("messages"))
    limit = _number(wanted, "max_completion_tokens", whole=True, low=1)
    if limit is None:
        limit = _number(wanted, "max_tokens", whole=True, low=1)
    temperature = _number(wanted, "temperature", low=0, high=2)
    seed = _number(wanted, "seed", whole=True)
    return ChatRequest(
        messages=messages,
        call_ids=call_ids,
        tools=() if wanted.get("tool_choice") == "none" else _read_tools(wanted.get("tools")),
        temperature=0.0 if temperature is not None and temperature < GREEDY_BELOW else temperature,
        max_tokens=None if limit is None else int(limit),
        seed=None if seed is None else int(seed) % 2**63,
        stream=stream is True,
        usage_in_stream=_part(wanted.get("stream_options"), "include_usage") is True,
    )


def _part(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _require(holds: bool, sentence: str, param: str | None = None) -> None:
    if not holds:
        raise RefusedRequest(sentence, param=param)


def _number(
    wanted: Mapping[str, Any], name: str, *, whole: bool = False, low: float = -math.inf, high: float = math.inf
) -> float | None:
    value = wanted.get(name)
    if value is None:
        return None
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    limits = [f"from {low:g}"] * (low > -math.inf) + [f"up to {high:g}"] * (high < math.inf)
    kind = "a whole number" if whole else "a number"
    _require(right and low <= value <= high, f"{name} must be {' '.join([kind, *limits])}", name)
    return value


# --- messages and tools --------------------------------------------------------------------------------------------


def _read_messages(given: Any) -> tuple[tuple[Message, ...], tuple[str | None, ...]]:
    right = isinstance(given, list) and 1 <= len(given) <= MAX_MESSAGES
    _require(right, f"messages must be a list of 1 to {MAX_MESSAGES} messages", "messages")
    called: dict[str, str] = {}  # id of a call -> name of its tool
    messages, call_ids = [], []
    for index, each in enumerate(_in_order_of_calls(given)):
        message, ids = read_message(each, called, f"messages[{index}]")
        messages.append(message)
        called |= ids
        call_ids.append(next(iter(ids), None))
    answerable = messages[-1].role != "assistant"
    _require(answerable, "the last message must not be the assistant's: there is nothing to answer", "messages")
    return tuple(messages), tuple(call_ids)


def _in_order_of_calls(given: Sequence[Any]) -> list[Any]:
    """Sort the replies to each message by its calls: a client may send them in any order.

    >>> calls = {"role": "assistant", "tool_calls": [{"id": "a"}, {"id": "b"}]}
    >>> replies = [{"role": "tool", "tool_call_id": "b"}, {"role": "tool", "tool_call_id": "a"}]
    >>> [each.get("tool_call_id") for each in _in_order_of_calls([calls, *replies])]
    [None, 'a', 'b']
    """
    ordered: list[Any] = []
    indices: dict[str, int] = {}
    for replies, group in groupby(given, key=lambda each: _part(each, "role") == "tool"):
        part = list(group)
        if replies:
            part.sort(key=lambda each: indices.get(str(each.get("tool_call_id")), len(indices)))
        else:
            calls = _part(part[-1], "tool_calls")
            calls = calls if isinstance(calls, list) else []
            indices = {str(call.get("id")): index for index, call in enumerate(calls) if isinstance(call, dict)}
        ordered += part
    return ordered


def read_message(given: Any, called: Mapping[str, str], where: str) -> tuple[Message, dict[str, str]]:
    """Return a message as the policy wrote or reads it, with the ids of its calls; calls are part of the text."""
    right = isinstance(given, dict) and given.get("role") in SPEAKERS
    _require(right, f"{where} must be an object whose role is one of {', '.join(SPEAKERS)}", where)
    speaker = given["role"]
    content = _text(given.get("content"), where, may_be_absent=speaker == "assistant")
    name, ids = None, {}
    if speaker == "assistant":
        calls = given.get("tool_calls") or []
        _require(isinstance(calls, list), f"{where}.tool_calls must be a list", where)
        read = [_read_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
        ids = {number: call.name for number, call in read}
        content = "\n".join(filter(None, [content, *(format_tool_call(call) for _, call in read)]))
    elif speaker == "tool":
        number = _part(given, "tool_call_id")
        _require(isinstance(number, str), f"{where}.tool_call_id must be the id of a call", where)
        name = called.get(number)
    role = "system" if speaker == "developer" else speaker
    return Message(role=cast(Role, role), content=content, name=name), ids


def _text(content: Any, where: str, *, may_be_absent: bool) -> str:
    if content is None and may_be_absent:
        return ""
    if isinstance(content, str):
        return _whole(content)
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) == len(content) and all(isinstance(part, str) for part in parts):
            return _whole("".join(cast(list[str], parts)))
    raise RefusedRequest(f"{where}.content must be text, or a list of parts of text", param=where)


def _whole(text: str) -> str:
    """Replace halves of surrogate pairs, where a client has cut a text."""
    return text.encode("utf-8", errors="replace").decode()


def _read_call(given: Any, where: str) -> tuple[str, ToolCall]:
    function, number = _part(given, "function"), _part(given, "id")
    right = isinstance(function, dict) and isinstance(number, str)
    _require(right, f"{where} must have an id and a function", where)
    name, read = _part(function, "name"), None
    with suppress(TypeError, ValueError, RecursionError):
        read = _read_json(_part(function, "arguments"))
    right = isinstance(name, str) and isinstance(read, dict) and not nests_deeper(read, MAX_NESTING)
    _require(right, f"{where}.function must have a name, and arguments that are a JSON object", where)
    _require(not has_half_character([name, read]), f"{where} contains half of a Unicode surrogate pair", where)
    return number, ToolCall(name=name, arguments=cast(dict[str, Any], read))


def _read_tools(given: Any) -> tuple[Mapping[str, Any], ...] | None:
    if given is None:
        return None
    right = isinstance(given, list) and len(given) <= MAX_TOOLS
    _require(right, f"tools must be a list of at most {MAX_TOOLS} tools", "tools")
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        function = _part(tool, "function") if _part(tool, "type") == "function" else None
        named = isinstance(function, dict) and isinstance(_part(function, "name"), str)
        _require(named, f"{where} must be of the type function, and its function must have a name", where)
        types = {"parameters": dict, "description": str}
        right = all(isinstance(_part(function, name), kind | None) for name, kind in types.items())
        _require(right, f"{where}.function.parameters must be an object and its description text", where)
    _require(not has_half_character(given), "tools contain half of a Unicode surrogate pair", "tools")
    return tuple(given)


# --- JSON -------------------------------------------------------------------------------------------------------------


def _read_json(text: str) -> Any:
    """Return a JSON value; its numbers fit into 64-bit floats."""
    return json.loads(text, parse_int=_integer, parse_float=_float, parse_constant=_constant)


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:  # before int(), which refuses thousands of digits
        raise RefusedRequest(f"the number {text[:40]}... in the request is too large")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise RefusedRequest(f"the number {text[:40]} in the request is too large")
    return value


def _constant(name: str) -> None:
    raise RefusedRequest(f"{name} in the request is not a JSON value")


# --- answers -------------------------------------------------------------------------------------------------------


def message_of(reply: Reply) -> dict[str, Any]:
    """Return the message of the assistant, as the client will send it back."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
    return message | ({"tool_calls": _calls_of(reply)} if reply.calls else {})


def completion(reply: Reply, *, model: str) -> dict[str, Any]:
    choice = {"index": 0, "message": message_of(reply), "logprobs": None, "finish_reason": reply.finish}
    return {**_frame(model, "chat.completion"), "choices": [choice], "usage": _usage(reply), "lfo": _about(reply)}


def chunks(reply: Reply, *, model: str, usage: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream. A turn is sent when it is final, because look-ahead may replace drafts."""
    frame = _frame(model, "chat.completion.chunk")
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": reply.content}]
    for index, call in enumerate(_calls_of(reply)):
        arguments = call["function"]["arguments"]
        call["function"]["arguments"] = ""
        deltas.append({"tool_calls": [{"index": index, **call}]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
    for delta in deltas:
        yield {**frame, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}
    end = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": reply.finish}
    yield {**frame, "choices": [end], "lfo": _about(reply)}
    if usage:
        yield {**frame, "choices": [], "usage": _usage(reply)}


def models(model: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "lfo"}]}


def _frame(model: str, kind: str) -> dict[str, Any]:
    number = f"chatcmpl-{secrets.token_hex(12)}"
    return {"id": number, "object": kind, "created": int(time.time()), "model": model}


def _calls_of(reply: Reply) -> list[dict[str, Any]]:
    def written(call: ToolCall) -> dict[str, str]:
        return {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}

    return [{"id": number, "type": "function", "function": written(call)} for number, call in reply.calls.items()]


def _usage(reply: Reply) -> dict[str, int]:
    total = reply.prompt_tokens + reply.completion_tokens
    tokens = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
    return {**tokens, "total_tokens": total}


def _about(reply: Reply) -> dict[str, Any]:
    """Return our extension of OpenAI's format: the imagined calls and their predicted replies.

    `checked`: the call does not fit its tool, and `expected` says why.
    """
    imagined = [
        {
            "name": turn.call.name if turn.call else None,
            "arguments": dict(turn.call.arguments) if turn.call else None,
            "expected": turn.observation,
            "kept": not turn.taken_back,
            "checked": turn.checked,
        }
        for turn in reply.imagined
    ]
    return {"imagined": imagined}
