"""Rollouts as JSON that a person, a page or another program can read; and back.

    {"task_id": "val-L2-0-000000", "reward": 1.0, "stop": "done", "error": "", "blind": false, "level": 2,
     "opening": [{"role": "user", "content": "..."}],
     "turns": [{"predicted": false, "action": "<tool_call>...", "observation": "...", "tool": "make_phone_call",
                "asked": false, "category": "success", "facts": []}]}

A file holds one such object a line. Only `task_id`, `opening` and, of each turn, `action` and `observation` are needed
to read one, so logs of other programs are easily brought into this form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lfo.env.tool_environment import read_tool_call
from lfo.errors import DataError
from lfo.types import Message, ReplyFacts, Rollout, StopReason, Turn


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """Everything but the tokens."""
    return {
        "task_id": rollout.task_id,
        "reward": rollout.reward,
        "stop": rollout.stop.value,
        "error": rollout.error,
        "blind": rollout.blind,
        "level": rollout.info.get("level"),
        "opening": [{"role": message.role, "content": message.content} for message in rollout.opening],
        "turns": [
            {
                "predicted": turn.predicted,
                "action": turn.action,
                "observation": turn.observation,
                "tool": turn.call.name if turn.call else None,
                "asked": turn.asked,
                "category": turn.facts.category if turn.facts else None,
                "facts": list(turn.facts.facts) if turn.facts else [],
            }
            for turn in rollout.turns
        ],
    }


def rollouts_of(records: Iterable[Mapping[str, Any]], source: str | Path) -> list[Rollout]:
    """The rollouts of the records that `source` holds: `rollouts_of(read_json_lines(path), path)`."""
    rollouts = []
    for number, record in enumerate(records, start=1):
        try:
            rollouts.append(rollout_of(record))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else f"cannot be used: {error}"
            raise DataError(f"{source}, record {number}: the rollout {what}") from error
    return rollouts


def rollout_of(record: Mapping[str, Any]) -> Rollout:
    """The inverse of `rollout_record`, but for tokens and info; calls are read out of the actions again.

    A record that is none raises whatever Python raises: `rollouts_of` makes a sentence of it.
    """
    level = record.get("level")
    return Rollout(
        task_id=_text(record["task_id"]),
        opening=tuple(
            Message(role=message["role"], content=_text(message["content"])) for message in record["opening"]
        ),
        tokens=(),
        origins=(),
        logprobs=(),
        turns=tuple(_turn(turn) for turn in record["turns"]),
        reward=float(record.get("reward", 0.0)),
        stop=StopReason(record.get("stop", StopReason.DONE)),
        error=_text(record.get("error", "")),
        blind=bool(record.get("blind", False)),
        info={} if level is None else {"level": level},
    )


def _turn(turn: Mapping[str, Any]) -> Turn:
    action, category = _text(turn["action"]), turn.get("category")
    facts = tuple(_text(fact) for fact in turn.get("facts", ()))
    return Turn(
        action=action,
        observation=_text(turn["observation"]),
        call=read_tool_call(action),
        action_start=0,
        action_end=0,
        observation_start=0,
        observation_end=0,
        predicted=bool(turn.get("predicted", False)),
        asked=bool(turn.get("asked", False)),
        facts=None if category is None else ReplyFacts(category=_text(category), facts=facts),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value
