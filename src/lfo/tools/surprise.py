"""Predicted and true replies with the surprise of each token, for `lfo inspect`.

    for reply in inspect_calls(agent, observed_calls(rollout, predict=None), judge=PhoneCalls): ...

The surprise of a token is -log p in nats, given the true tokens before it: 0 is certain, 0.69 a coin toss, above 3 very
unlikely. Only the reply counts, not the tags around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from lfo.agent import Agent
from lfo.env.interface import describe_with, same_meaning
from lfo.protocol.world_model import REPLY_OPEN, ObservedCall, render_state
from lfo.types import ToolCall


@dataclass(frozen=True, kw_only=True, slots=True)
class SurprisingToken:
    """`SurprisingToken(text=" pin", surprise=4.2, likeliest=" date")`"""

    text: str
    surprise: float
    likeliest: str  # the most probable token at this position


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedReply:
    """One real reply; the texts of `tokens` together are `actual`, or its beginning if it is too long."""

    state: str  # the compressed state
    call: ToolCall
    predicted: str
    actual: str
    category: str | None
    same_meaning: bool | None  # None: there is no judge, or it cannot tell
    tokens: tuple[SurprisingToken, ...]

    @property
    def surprise(self) -> float:
        """The mean surprise of the tokens."""
        return sum(token.surprise for token in self.tokens) / max(1, len(self.tokens))


def inspect_calls(agent: Agent, calls: Iterable[ObservedCall], *, judge: object = None) -> Iterator[InspectedReply]:
    """Yield the inspected reply of each call; `judge` is an environment, or its class, that describes replies."""
    for seen in calls:
        (predicted,) = agent.predict([(seen.state, seen.call)])
        facts = seen.facts or describe_with(judge, seen.reply)
        yield InspectedReply(
            state=render_state(agent.world_model_codec.compress(seen.state, seen.call)),
            call=seen.call,
            predicted=predicted,
            actual=seen.reply,
            category=facts.category if facts else None,
            same_meaning=same_meaning(judge, predicted, seen.reply),
            tokens=tuple(_of_the_reply(seen.reply, surprise_of_target(agent, seen))),
        )


def _of_the_reply(reply: str, tokens: Sequence[SurprisingToken]) -> Iterator[SurprisingToken]:
    """Yield the tokens without the tags around the reply."""
    start, end, index = len(REPLY_OPEN), len(REPLY_OPEN) + len(reply), 0
    for token in tokens:
        text = token.text[max(0, start - index) : max(0, end - index)]
        index += len(token.text)
        if text:
            yield replace(token, text=text)


@torch.no_grad()
def surprise_of_target(agent: Agent, seen: ObservedCall) -> list[SurprisingToken]:
    """Return all target tokens of the row: tags, reply and end of turn."""
    codec, model = agent.world_model_codec, agent.model
    prompt, target = codec.prompt_ids(seen.state, seen.call), codec.target_ids(seen.reply)
    row_1T = torch.tensor([[*prompt, *target]], device=model.device)
    logits_TV = model.logits(row_1T, model.world_model_adapters)[0, len(prompt) - 1 : -1].float()
    surprise_T = torch.nn.functional.cross_entropy(logits_TV, row_1T[0, len(prompt) :], reduction="none")
    likeliest = cast(list[int], logits_TV.argmax(-1).tolist())
    return [
        SurprisingToken(text=text, surprise=surprise, likeliest=agent.codec.decode([other]))
        for text, surprise, other in zip(_pieces(agent, target), surprise_T.tolist(), likeliest, strict=True)
    ]


def _pieces(agent: Agent, ids: Sequence[int]) -> Iterator[str]:
    """Yield the text of each token; bytes of an incomplete character are added to the token that completes it."""
    before = ""
    for count in range(1, len(ids) + 1):
        text = agent.codec.decode(ids[:count])
        if text.endswith("\ufffd") and count < len(ids):
            yield ""
            continue
        yield text[len(before) :]
        before = text
