"""The tokens of a conversation, including imagined exchanges, from the messages of a request.

A client sends the whole conversation with every request, without imagined exchanges. So the server keeps the tokens up
to each answered turn, by the random id of its call. A request with such an id, after exactly the same messages, extends
them, as in a rollout. Any other request is encoded from its messages: after a restart, if a client has edited
messages, or if too many other conversations have come since.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import one_by_one, read_tool_call
from lfo.serving.wire import ChatRequest
from lfo.types import Message, Turn

KEPT = 1024  # the newest conversations


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """A conversation up to the point where the policy speaks."""

    opening: tuple[Message, ...]  # all messages before the first message of the policy
    tokens: Sequence[int]
    turns: tuple[Turn, ...]  # of the policy so far, including imagined ones
    transcript: tuple[Message, ...]  # what the policy has seen, including imagined messages
    slot: int | None = None  # the sampler's slot in which it was continued last


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """A conversation that ends with a message of the policy."""

    messages: tuple[Message, ...]  # as the client sees them
    tools: str  # the key of its tools
    context: Context


class Conversations:
    """The newest answered conversations. Used by one thread."""

    def __init__(self) -> None:
        self._answered: OrderedDict[str, Answered] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answered)

    def keep(self, call_id: str, answered: Answered) -> None:
        self._answered[call_id] = answered
        while len(self._answered) > KEPT:
            self._answered.popitem(last=False)

    def context(self, request: ChatRequest, codec: ChatCodec, tools: str) -> Context:
        """Return the context after which a request is answered."""
        for index in reversed(range(len(request.messages))):
            call_id = request.call_ids[index]
            answered = self._answered.get(call_id) if call_id else None
            said, rest = request.messages[: index + 1], request.messages[index + 1 :]
            if answered and call_id and answered.messages == said and answered.tools == tools and _alternates(rest):
                self._answered.move_to_end(call_id)
                return _grown(answered.context, rest, codec)
        return _written(request.messages, codec)


def packed(tokens: Sequence[int]) -> Sequence[int]:
    """Return token ids as four bytes each."""
    return array("i", tokens)


def _alternates(messages: Sequence[Message]) -> bool:
    """Whether these messages after one of the policy alternate between others and the policy.

    A message of others is one user message, or one reply for each call.
    """
    parts = [[each.role for each in part] for part in _parts(messages)]
    replies = all(part == ["user"] or set(part) == {"tool"} for part in parts[::2])
    return replies and all(part == ["assistant"] for part in parts[1::2]) and len(parts) % 2 == 1


def _parts(messages: Sequence[Message]) -> list[list[Message]]:
    """Group messages into alternating parts of the policy and of others."""
    return [list(part) for _, part in groupby(messages, key=lambda message: message.role == "assistant")]


def _grown(context: Context, rest: Sequence[Message], codec: ChatCodec) -> Context:
    """Extend a context that ends with a finished message of the policy by the messages after it."""
    tokens, turns = list(context.tokens), list(context.turns)
    said = context.transcript[-1].content
    for part in _parts(rest):
        if part[0].role == "assistant":
            said = part[0].content
            tokens += [*codec.encode_message(said), codec.end_of_turn]
            continue
        replies = [message.content for message in part]
        if part[0].role == "user":
            tokens += codec.after_action_by_user(*replies).ids
        else:
            tokens += codec.after_action(*replies, stopped=True).ids
        turns += _turns(said, replies)
    return replace(context, tokens=tokens, turns=tuple(turns), transcript=(*context.transcript, *rest))


def _written(messages: Sequence[Message], codec: ChatCodec) -> Context:
    """Encode a whole conversation by the template; nothing in it was imagined."""
    first = next((index for index, each in enumerate(messages) if each.role == "assistant"), len(messages))
    turns = [
        turn
        for said, after in pairwise(_parts(messages))
        if said[0].role == "assistant"
        for turn in _turns(said[-1].content, [message.content for message in after])
    ]
    tokens = codec.opening(messages).ids
    return Context(opening=tuple(messages[:first]), tokens=tokens, turns=tuple(turns), transcript=tuple(messages))


def _turns(said: str, replies: Sequence[str]) -> list[Turn]:
    """Return the exchanges of one message, one for each call with a reply; without spans, which only training needs."""
    spans = dict.fromkeys(("action_start", "action_end", "observation_start", "observation_end"), 0)
    return [
        Turn(action=action, observation=observation, call=read_tool_call(action), **spans)
        for action, observation in zip(one_by_one(said), replies, strict=False)
    ]
