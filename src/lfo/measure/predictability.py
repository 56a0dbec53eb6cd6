"""Measure on recorded rollouts how predictable the replies of each tool are. Nothing is trained.

For each tool, over its replies in order:

    constant      share of the most frequent reply: a world model would learn one sentence
    by_memory     how well the reply in the most similar earlier situation predicts the next one (F1 of its words)
    by_frequency  the same for the most frequent reply so far, which ignores the call
    new_words     share of a reply's words that do not occur in the transcript before it

A tool is worth predicting if its replies differ, contain something new, and earlier replies help to predict them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

from lfo.play.reply_store import ReplyStore
from lfo.protocol.world_model import ObservedCall, observed_calls
from lfo.types import Rollout

CONSTANT = 0.9  # with a more frequent reply there is nothing to learn
NEW = 0.05  # of a reply's words, at least
GAIN = 0.05  # of the reply store over the most frequent reply, at least
BATCH = 10  # calls that the reply store answers at once, before it stores their replies
FEWEST = 2 * BATCH  # replies needed for a verdict: those of the first batch are not predicted
MOST = 500  # replies of a tool that are predicted; the others are only counted
_WORD = re.compile(r"\w+")


def predictability(rollouts: Iterable[Rollout], *, length_of: Callable[[str], int] = len) -> dict[str, Any]:
    """Return one row for each tool, and the names of the tools that are worth predicting."""
    by_tool: dict[str, list[ObservedCall]] = defaultdict(list)
    for rollout in rollouts:
        for call in observed_calls(rollout):
            by_tool[call.call.name].append(call)
    tools = {name: _tool(calls, length_of) for name, calls in sorted(by_tool.items())}
    return {"tools": tools, "worth_predicting": [name for name, row in tools.items() if row["worth_predicting"]]}


def _tool(calls: Sequence[ObservedCall], length_of: Callable[[str], int]) -> dict[str, Any]:
    replies = [call.reply for call in calls]
    by_memory, by_frequency = _prediction_scores(calls[:MOST])
    row = {
        "replies": len(calls),
        "distinct": len(set(replies)),
        "constant": Counter(replies).most_common(1)[0][1] / len(replies),
        "by_memory": by_memory,
        "by_frequency": by_frequency,
        "new_words": fmean(map(_share_of_new_words, calls)),
        "length": median(map(length_of, replies)),
        "longest": max(map(length_of, replies)),
    }
    verdict = _verdict(row)
    return {**row, "verdict": verdict, "worth_predicting": verdict.startswith("yes")}


def _verdict(row: dict[str, Any]) -> str:
    if row["replies"] < FEWEST:
        return f"unknown: fewer than {FEWEST} replies"
    if row["constant"] >= CONSTANT:
        return "no: nearly all replies are the same"
    if row["new_words"] < NEW:
        return "no: replies only repeat the transcript"
    if row["by_memory"] - row["by_frequency"] < GAIN:
        return "unclear: earlier replies do not help to predict it"
    return "yes: earlier replies help to predict it"


def _prediction_scores(calls: Sequence[ObservedCall]) -> tuple[float, float]:
    """Return the mean F1 of the reply store and of the most frequent reply, each from earlier replies only."""
    store, frequent = ReplyStore(), Counter[str]()
    by_memory: list[float] = []
    by_frequency: list[float] = []
    for start in range(0, len(calls), BATCH):
        batch = calls[start : start + BATCH]
        recalled = store.recall([(call.state, call.call) for call in batch])
        usual = frequent.most_common(1)[0][0] if frequent else ""
        if start:  # there is nothing to predict the first ones from
            by_memory += [word_f1(reply, call.reply) for reply, call in zip(recalled, batch, strict=True)]
            by_frequency += [word_f1(usual, call.reply) for call in batch]
        store.add(batch)
        frequent.update(call.reply for call in batch)
    return (fmean(by_memory), fmean(by_frequency)) if by_memory else (0.0, 0.0)


def word_f1(predicted: str, true: str) -> float:
    """Return the F1 score of the words of two texts, ignoring their order.

    >>> word_f1("the door is shut", "the door is open")
    0.75
    """
    ours, theirs = Counter(_WORD.findall(predicted.lower())), Counter(_WORD.findall(true.lower()))
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * sum((ours & theirs).values()) / (sum(ours.values()) + sum(theirs.values()))


def _share_of_new_words(call: ObservedCall) -> float:
    transcript = f"{call.state.task} {call.call.name} {call.call.arguments} {call.state.actions}"
    known = set(_WORD.findall(transcript.lower()))
    words = _WORD.findall(call.reply.lower())
    return sum(word not in known for word in words) / len(words) if words else 0.0
