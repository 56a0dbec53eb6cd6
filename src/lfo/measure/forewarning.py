"""Which failing calls of later conversations the earlier ones would have warned about. Nothing is trained.

The conversations are split in their order: what is known comes from the earlier ones, and the later ones are asked. For
each later call the reply to the most similar earlier call is recalled, as look-ahead with a memory would show it before
the call is made.

Nobody has said which calls failed, so this is judged by what followed: the agent made the same call again at once with
other arguments, or it was the last call of a conversation whose outcome is below 1. A call was warned about if most
earlier calls with the recalled reply failed too.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lfo.measure.predictability import word_f1
from lfo.play.reply_store import ReplyStore
from lfo.protocol.world_model import ObservedCall, state_of
from lfo.types import Rollout, Turn

LATER = 0.3  # share of the conversations that are asked
FEWEST = 10  # conversations, for a split
EXAMPLES = 5
COMPARED = 500  # characters of two replies that are the same
MOST = 2000  # earlier and later calls of a tool: the newest earlier ones, the first later ones


@dataclass(frozen=True, slots=True)
class JudgedCall:
    observed: ObservedCall
    failed: bool


def forewarning(rollouts: Sequence[Rollout]) -> dict[str, Any] | None:
    """Return one row for each tool and some examples; None if there are too few conversations."""
    first = len(rollouts) - round(LATER * len(rollouts))
    if len(rollouts) < FEWEST:
        return None
    earlier, later = _by_tool(rollouts[:first]), _by_tool(rollouts[first:])
    tools, examples = {}, []
    for name, asked in sorted(later.items()):
        row, found = _tool(earlier.get(name, [])[-MOST:], asked[:MOST])
        tools[name] = row
        examples += found
    counts = {"earlier": first, "later": len(rollouts) - first}
    outcomes = sum(bool(each.info.get("outcome_known")) for each in rollouts)
    return {**counts, "outcomes_known": outcomes, "tools": tools, "examples": examples[:EXAMPLES]}


def _tool(earlier: Sequence[JudgedCall], later: Sequence[JudgedCall]) -> tuple[dict[str, Any], list[dict[str, str]]]:
    store, failed, heard = ReplyStore(), Counter[str](), Counter[str]()
    store.add(each.observed for each in earlier)
    for each in earlier:
        heard[each.observed.reply[:COMPARED]] += 1
        failed[each.observed.reply[:COMPARED]] += each.failed
    usual = heard.most_common(1)[0][0] if heard else ""
    recalled = store.recall([(each.observed.state, each.observed.call) for each in later])
    warned = [2 * failed[reply[:COMPARED]] > heard[reply[:COMPARED]] for reply in recalled]
    actual = [each.observed.reply for each in later]
    row = {
        "calls": len(later),
        "by_memory": fmean(map(word_f1, recalled, actual)),
        "by_frequency": fmean(word_f1(usual, reply) for reply in actual),
        "failed": sum(each.failed for each in later),
        "warned": sum(warning and each.failed for warning, each in zip(warned, later, strict=True)),
        "false_alarms": sum(warning and not each.failed for warning, each in zip(warned, later, strict=True)),
    }
    examples = [
        {
            "call": f"{each.observed.call.name} {json.dumps(dict(each.observed.call.arguments), ensure_ascii=False)}",
            "expected": reply,
            "actual": each.observed.reply,
        }
        for warning, each, reply in zip(warned, later, recalled, strict=True)
        if warning and each.failed
    ]
    return row, examples


def _by_tool(rollouts: Sequence[Rollout]) -> dict[str, list[JudgedCall]]:
    by_tool: dict[str, list[JudgedCall]] = defaultdict(list)
    for rollout in rollouts:
        for each in _judged(rollout):
            by_tool[each.observed.call.name].append(each)
    return by_tool


def _judged(rollout: Rollout) -> Iterator[JudgedCall]:
    real = [turn for turn in rollout.turns if not turn.predicted]
    lost = bool(rollout.info.get("outcome_known")) and not rollout.succeeded
    for index, turn in enumerate(real):
        if turn.call is not None and turn.observation:
            state = state_of(rollout.opening, real[:index])
            call = ObservedCall(state=state, call=turn.call, reply=turn.observation, facts=turn.facts)
            yield JudgedCall(call, failed=_failed(turn, real[index + 1 :], lost))


def _failed(turn: Turn, after: Sequence[Turn], lost: bool) -> bool:
    assert turn.call is not None
    following = after[0].call if after else None
    if following is not None and following.name == turn.call.name:
        return following != turn.call
    return lost and all(each.call is None for each in after)
