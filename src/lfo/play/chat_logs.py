"""Conversations in OpenAI's chat format as records of rollouts, text only.

    messages = [{"role": "user", "content": "Open the safe."},
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "a", "content": "A red safe."}]
    chat_record(messages)["turns"][0]["observation"]       # "A red safe."

It reads what agents in production send, so it refuses nothing: what is no text is named in brackets, and a call that
cannot be read stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lfo.play.records import ROLES, rollout_from_texts
from lfo.protocol.hermes import OPENING, format_tool_call
from lfo.types import Message, Rollout, ToolCall

Chat = Sequence[Mapping[str, Any]]
Hide = Callable[[str], str]  # a text -> the text without what must not be written
_ROLES = {"developer": "system", "function": "tool"}  # others of OpenAI's roles
_CLOSE = "</tool_call>"
_MOST_DEEP = 64  # levels of arguments; deeper ones are kept as text


class Exchange(NamedTuple):
    """One turn as text; `tool` is None if the message calls none."""

    action: str
    observation: str
    tool: str | None


def as_is(text: str) -> str:
    return text


def chat_record(messages: Chat, hide: Hide = as_is) -> dict[str, Any]:
    """Return the opening and the turns of a conversation, as `read_rollouts` reads them."""
    opening, rest = _parts(messages)
    turns = [{"predicted": False, "taken_back": False, **exchange._asdict()} for exchange in _exchanges(rest, hide)]
    return {"opening": [{"role": role_of(each), "content": text_of(each, hide)} for each in opening], "turns": turns}


def chat_rollout(messages: Chat) -> Rollout:
    """Return a conversation as a rollout without tokens."""
    opening, rest = _parts(messages)
    exchanges = [(each.action, each.observation) for each in _exchanges(rest, as_is)]
    spoken = [Message(role=role_of(each), content=text_of(each)) for each in opening]  # type: ignore[arg-type]
    return rollout_from_texts(None, task_id="", opening=spoken, exchanges=exchanges)


def role_of(message: Mapping[str, Any]) -> str:
    role = str(message.get("role"))
    role = _ROLES.get(role, role)
    return role if role in ROLES else "user"


def text_of(message: Mapping[str, Any], hide: Hide = as_is) -> str:
    """Return the text of a message.

    >>> text_of({"content": [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {}}]})
    'What is this?[image_url]'
    """
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    return hide(whole("".join(map(_text_of_part, parts))))


def _text_of_part(part: Any) -> str:
    if part is None or isinstance(part, str):
        return part or ""
    text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    if isinstance(text, str):
        return text
    return f"[{part.get('type', 'object')}]" if isinstance(part, dict) else json.dumps(part)


def whole(text: str) -> str:
    """Replace halves of surrogate pairs, where somebody has cut a text."""
    return text.encode("utf-8", errors="replace").decode()


def calls_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the calls of a message; a call of the older format, which has no id, is one too."""
    calls = message.get("tool_calls")
    found: list[Mapping[str, Any]] = (
        [each for each in calls if isinstance(each, dict)] if isinstance(calls, list) else []
    )
    older = message.get("function_call")
    return found or ([{"function": older}] if isinstance(older, dict) else [])


def function_of(call: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the arguments of a call: a mapping if they can be read, else the text as it is."""
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments or "{}")
            arguments = read if isinstance(read, dict) else arguments
        except (ValueError, RecursionError):
            pass
    return str(function.get("name")), {} if arguments is None else arguments


def action_of_call(call: Mapping[str, Any], hide: Hide = as_is) -> str:
    """Return a call in Hermes format; what is hidden in its arguments leaves valid JSON."""
    name, arguments = function_of(call)
    if isinstance(arguments, dict):
        try:
            return whole(format_tool_call(ToolCall(name=name, arguments=hidden(arguments, hide))))
        except (ValueError, TypeError):  # NaN, or nested too deep
            arguments = json.dumps(arguments, default=str)
    return whole(f"{OPENING}\n{name} {hide(str(arguments))}\n{_CLOSE}")


def hidden(value: Any, hide: Hide, depth: int = _MOST_DEEP) -> Any:
    """Return a JSON value in which something is hidden in texts, keys and numbers."""
    if depth == 0:
        raise ValueError("nested too deep")
    if isinstance(value, dict):
        return {hide(str(key)): hidden(inner, hide, depth - 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [hidden(inner, hide, depth - 1) for inner in value]
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, bool) or value is None:
        return value
    return value if hide(str(value)) == str(value) else hide(str(value))


def _parts(messages: Chat) -> tuple[Chat, Chat]:
    """Return the messages before the first of the assistant, and the others."""
    first = next((index for index, each in enumerate(messages) if each.get("role") == "assistant"), len(messages))
    return messages[:first], messages[first:]


def _exchanges(messages: Chat, hide: Hide) -> Iterator[Exchange]:
    """Yield the turns of a conversation from its first message of the assistant on, one for each call."""
    index = 0
    while index < len(messages):
        said, index = messages[index], index + 1
        start = index
        while index < len(messages) and messages[index].get("role") != "assistant":
            index += 1
        yield from _turns(said, messages[start:index], hide)


def _turns(said: Mapping[str, Any], after: Chat, hide: Hide) -> Iterator[Exchange]:
    text, calls = text_of(said, hide), calls_of(said)
    replies = [each for each in after if role_of(each) == "tool"] if calls else []
    others = [each for each in after if not any(each is reply for reply in replies)]
    for number, call in enumerate(calls):
        action = action_of_call(call, hide)
        by_id = [each for each in replies if call.get("id") and each.get("tool_call_id") == call.get("id")]
        nameless = [replies[number]] if not call.get("id") and number < len(replies) else []
        observation = "\n".join(text_of(each, hide) for each in by_id or nameless)
        yield Exchange(f"{text}\n{action}" if text and number == 0 else action, observation, function_of(call)[0])
    if others or not calls:
        yield Exchange("" if calls else text, "\n".join(text_of(each, hide) for each in others), None)
