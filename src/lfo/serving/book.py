"""Which conversation a request continues: open conversations grow by prefix.

A client sends its whole conversation with every request. A request that begins with all messages of an open
conversation, its last answer included, continues it; any other is a new conversation, as when a client goes back and
tries something else. System messages are not compared: many contain the time.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lfo.play.chat_logs import calls_of, function_of, role_of, text_of

MOST_OPEN_BYTES = 256_000_000  # of all open conversations; the oldest are closed first
REMEMBERED = 65_536  # closed conversations whose end, and ids for later outcomes, are known

Chat = Sequence[Mapping[str, Any]]


@dataclass(slots=True, eq=False)  # one is equal only to itself
class OpenConversation:
    conversation: str = field(default_factory=lambda: secrets.token_hex(8))  # its random name in the logs
    messages: list[Mapping[str, Any]] = field(default_factory=list)  # with the last answer
    tools: list[Any] | None = None
    model: str = ""
    name: str = ""  # given by the client
    touched: float = 0.0
    size: int = 0
    outcome: float | None = None
    continues: str | None = None  # the conversation in the logs that is its beginning
    ids: list[str] = field(default_factory=list)  # of its completions
    end: str = ""  # the digest of its messages
    imagined: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)  # (number of messages before it, it)


class Book:
    """The open conversations. Used by one thread."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, OpenConversation] = OrderedDict()  # the one that was silent longest first
        self._by_end: dict[str, list[OpenConversation]] = {}  # several, where clients got the same words
        self._closed_by_end: OrderedDict[str, str] = OrderedDict()
        self._names: OrderedDict[str, str] = OrderedDict()  # id of a completion, or a name -> conversation
        self._size = 0

    def __len__(self) -> int:
        return len(self._open)

    def heard(self, messages: Chat, answer: Mapping[str, Any], *, now: float, size: int) -> OpenConversation:
        """Add an answered request to its conversation and return that."""
        digests = digests_of([*messages, answer])
        ends = [digests[at] for at in reversed(range(len(messages))) if messages[at].get("role") == "assistant"]
        found = next((self._by_end[end][-1] for end in ends if end in self._by_end), None)
        if found is None:
            closed = (self._closed_by_end.pop(end, None) for end in ends)
            found = OpenConversation(continues=next(filter(None, closed), None))
        else:
            self._forget_end(found)
        found.messages = [*messages, answer]
        found.touched, self._size, found.size = now, self._size + size - found.size, size
        found.end = digests[-1]
        self._by_end.setdefault(found.end, []).append(found)
        self._open[found.conversation] = found
        self._open.move_to_end(found.conversation)
        return found

    def _forget_end(self, conversation: OpenConversation) -> None:
        same = self._by_end[conversation.end]
        same.remove(conversation)
        if not same:
            del self._by_end[conversation.end]

    def call_it(self, conversation: OpenConversation, *names: str | None) -> None:
        """Let an open conversation be found by these names, such as the id of its completion."""
        for name in filter(None, names):
            self._names[name] = conversation.conversation
            self._names.move_to_end(name)
        while len(self._names) > REMEMBERED:
            self._names.popitem(last=False)

    def find(self, name: str) -> tuple[str | None, OpenConversation | None]:
        """Return the conversation of a name, and itself while it is open."""
        number = self._names.get(name)
        return number, self._open.get(number) if number else None

    def close(self, conversation: OpenConversation) -> OpenConversation:
        del self._open[conversation.conversation]
        self._size -= conversation.size
        self._forget_end(conversation)
        self._closed_by_end[conversation.end] = conversation.conversation
        while len(self._closed_by_end) > REMEMBERED:
            self._closed_by_end.popitem(last=False)
        return conversation

    def due(self, *, silent_since: float) -> Iterator[OpenConversation]:
        """Close and yield the conversations that are silent since then, and the oldest if all are too large."""
        while self._open:
            oldest = next(iter(self._open.values()))
            if oldest.touched > silent_since and self._size <= MOST_OPEN_BYTES:
                return
            yield self.close(oldest)


def digests_of(messages: Chat) -> list[str]:
    """Return for each message the digest of the conversation up to it."""
    digest, found = hashlib.blake2b(digest_size=16), []
    for message in messages:
        if role_of(message) != "system":
            calls = [(call.get("id"), *function_of(call)) for call in calls_of(message)]
            said = [role_of(message), text_of(message), calls, message.get("tool_call_id")]
            digest.update(json.dumps(said, sort_keys=True, default=str).encode("utf-8", errors="replace"))
        found.append(digest.hexdigest())
    return found
