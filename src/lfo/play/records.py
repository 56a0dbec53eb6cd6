"""Rollouts as JSON, for people, the report and other programs; and back, text only.

    {"opening": [{"role": "user", "content": "I need the contract end date from Acme."}],
     "turns": [{"action": "<tool_call>{...}</tool_call>", "observation": "Acme, insurance..."}]}

is the minimal form; `rollout_record` writes more. A rollout that was read from JSON has no tokens and no log-probs: a
world model can be trained on it, a policy cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from lfo.env.interface import Environment, describe_with
from lfo.env.log_folder import numbered_records
from lfo.errors import DataError
from lfo.play.look_ahead import is_asked
from lfo.protocol.hermes import read_tool_call
from lfo.types import Message, ReplyFacts, Rollout, StopReason, Turn, exchanged

ROLES = ("system", "user", "assistant", "tool")


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as JSON, without its tokens."""
    return {
        "task_id": rollout.task_id,
        "reward": rollout.reward,
        "stop": rollout.stop.value,
        "error": rollout.error,
        "blind": not rollout.look_ahead,
        "level": rollout.info.get("level"),
        "opening": [{"role": message.role, "content": message.content} for message in rollout.opening],
        "turns": [
            {
                "predicted": turn.predicted,
                "taken_back": turn.taken_back,
                **({"checked": True} if turn.checked else {}),
                "action": turn.action,
                **({"thought": turn.thought} if turn.thought else {}),
                "observation": turn.observation,
                "tool": turn.call.name if turn.call else None,
                "category": turn.facts.category if turn.facts else None,
                "facts": list(turn.facts.facts) if turn.facts else [],
            }
            for turn in in_order(rollout)
        ],
    }


def in_order(rollout: Rollout) -> list[Turn]:
    """Return all turns in order, including those that were taken back."""
    return sorted((*rollout.taken_back, *rollout.turns), key=lambda turn: (turn.action_start, not turn.taken_back))


def read_rollouts(path: str | Path, environment: Environment | None) -> list[Rollout]:
    """Read rollouts, one JSON object for each line of a file, or those in a folder of `lfo record`.

    `environment` describes the replies and names the asked calls. Without it, replies are described as the file says.
    """
    rollouts = []
    for file, number, record in numbered_records(Path(path)):
        try:
            rollouts.append(_from_record(record, environment))
        except ValueError as error:
            raise DataError(f"{file}, line {number}: {error}") from None
    return rollouts


def rollout_from_texts(
    environment: Environment | None,
    *,
    task_id: str,
    opening: Sequence[Message],
    exchanges: Iterable[tuple[str, str]],
    reward: float = 0.0,
) -> Rollout:
    """Return a rollout of real exchanges, given as (action, observation) pairs."""
    turns: list[Turn] = []
    transcript = list(opening)
    for action, observation in exchanges:
        turn = _turn(environment, transcript, action, observation)
        turns.append(turn)
        transcript += exchanged(action, observation, turn.call)
    return Rollout(
        task_id=task_id,
        opening=tuple(opening),
        turns=tuple(turns),
        reward=reward,
        stop=StopReason.DONE,
    )


def transcripts(rollout: Rollout) -> Iterator[tuple[tuple[Turn, ...], tuple[Message, ...]]]:
    """Yield the real turns before each point of a rollout, and all real messages so far."""
    real = [index for index, turn in enumerate(rollout.turns) if not turn.predicted]
    for index in (*real, len(rollout.turns)):
        yield tuple(turn for turn in rollout.turns[:index] if not turn.predicted), transcript_at(rollout, index)


def transcript_at(rollout: Rollout, index: int) -> tuple[Message, ...]:
    """Return all real messages before a turn."""
    real = (turn for turn in rollout.turns[:index] if not turn.predicted)
    exchanges = (exchanged(turn.action, turn.observation, turn.call) for turn in real)
    return (*rollout.opening, *chain.from_iterable(exchanges))


def _turn(environment: Environment | None, transcript: Sequence[Message], action: str, observation: str) -> Turn:
    call = read_tool_call(action)
    return Turn(
        action=action,
        observation=observation,
        call=call,
        asked=environment is not None and is_asked(environment, transcript, action),
        facts=describe_with(environment, observation),
    )


def _from_record(record: Any, environment: Environment | None) -> Rollout:
    """Return a rollout; raise a ValueError without file name and line, which the caller adds."""
    opening, turns = _list_of_objects(record, "opening"), _list_of_objects(record, "turns")
    for message in opening:
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise ValueError(f"each message of the opening needs a role ({', '.join(ROLES)}) and a text as content")
    for index, turn in enumerate(turns, start=1):
        for key in ("action", "observation"):
            if not isinstance(turn.get(key), str):
                raise ValueError(f"turn {index} needs a text as {key}")
    real = [turn for turn in turns if not turn.get("predicted")]
    reward = record.get("reward")
    known = isinstance(reward, int | float)
    rollout = rollout_from_texts(
        environment,
        task_id=str(record.get("task_id", "")),
        opening=[Message(role=message["role"], content=message["content"]) for message in opening],
        exchanges=[(turn["action"], turn["observation"]) for turn in real],
        reward=reward if known else 0.0,
    )
    rollout = replace(rollout, info={"outcome_known": known})
    if environment is not None:
        return rollout
    described = (replace(turn, facts=_facts(each)) for turn, each in zip(rollout.turns, real, strict=True))
    return replace(rollout, turns=tuple(described))


def _facts(turn: dict[str, Any]) -> ReplyFacts | None:
    category, facts = turn.get("category"), turn.get("facts")
    if not isinstance(category, str):
        return None
    return ReplyFacts(category=category, facts=tuple(map(str, facts if isinstance(facts, list) else ())))


def _list_of_objects(record: Any, key: str) -> list[dict[str, Any]]:
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"a rollout needs {key}, a list of objects")
    return value
