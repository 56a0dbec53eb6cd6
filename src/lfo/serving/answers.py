"""What a chat-completions server answered: its message, from the bytes of a completion or of a stream."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_UNPACKED = 64_000_000  # bytes of one answer


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatAnswer:
    message: Mapping[str, Any]  # of the assistant, as the client will send it back
    completion_id: str | None = None
    imagined: list[Mapping[str, Any]] = field(default_factory=list)  # of `lfo serve`


def read_answer(body: bytes, *, streamed: bool, encoding: str = "") -> ChatAnswer | None:
    """Return the first choice of an answer; None if it has none, or if the stream ended early."""
    try:
        text = _unpacked(body, encoding).decode()
        return _assembled(text) if streamed else _read(json.loads(text))
    except (ValueError, RecursionError, zlib.error, TypeError, AttributeError, KeyError, IndexError):
        return None


def _unpacked(body: bytes, encoding: str) -> bytes:
    if encoding.strip().lower() in ("", "identity"):
        return body
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib, by its head
    return unpacker.decompress(body, MOST_UNPACKED)


def _read(answer: Any) -> ChatAnswer | None:
    message = answer["choices"][0]["message"]
    return _answer(message, answer) if isinstance(message, dict) else None


def _answer(message: Mapping[str, Any], frame: Mapping[str, Any]) -> ChatAnswer:
    number, ours = frame.get("id"), frame.get("lfo")
    imagined = ours.get("imagined") if isinstance(ours, dict) else None
    return ChatAnswer(
        message={"role": "assistant", **message},
        completion_id=number if isinstance(number, str) else None,
        imagined=[each for each in imagined if isinstance(each, dict)] if isinstance(imagined, list) else [],
    )


def events(text: str) -> Iterator[str]:
    """Yield the data of each server-sent event.

    >>> list(events('data: {"a": 1}\\n\\n: a comment\\n\\ndata: [DONE]\\n\\n'))
    ['{"a": 1}', '[DONE]']
    """
    data: list[str] = []
    for line in [*text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), ""]:
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []


def _assembled(text: str) -> ChatAnswer | None:
    """Return the message that the deltas of a stream make together."""
    content: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    frame: dict[str, Any] = {}
    finished = False
    for data in events(text):
        if data.strip() == "[DONE]":
            finished = True
            break
        event = json.loads(data)
        frame |= {key: event[key] for key in ("id", "lfo") if key in event}
        for choice in event.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            delta = choice.get("delta") or {}
            finished = finished or choice.get("finish_reason") is not None
            if isinstance(delta.get("content"), str):
                content.append(delta["content"])
            for part in delta.get("tool_calls") or ():
                _add_call(calls, part)
    if not finished:
        return None
    message: dict[str, Any] = {"content": "".join(content) or (None if calls else "")}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return _answer(message, frame)


def _add_call(calls: dict[int, dict[str, Any]], part: Mapping[str, Any]) -> None:
    call = calls.setdefault(part.get("index", len(calls)), {"type": "function", "function": {}})
    if part.get("id"):
        call["id"] = part["id"]
    function = part.get("function") or {}
    own = call["function"]
    own["name"] = own.get("name") or function.get("name")
    own["arguments"] = own.get("arguments", "") + (function.get("arguments") or "")
