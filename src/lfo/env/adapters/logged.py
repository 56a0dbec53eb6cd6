"""Recorded conversations as an environment: `env=logs:FOLDER`, for those who have no other.

It knows the tools of the agent that was recorded and the openings of its conversations. Nothing acts in it: a call gets
the reply that it got when it was recorded, if it was made in this conversation. So a world model can be trained from
the logs (`world_model.from_logs`), and no policy can.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lfo.env.log_folder import numbered_records
from lfo.errors import UsageError
from lfo.protocol.hermes import read_tool_call
from lfo.types import Message, StepResult

UNRECORDED = "Nothing was recorded after this call."
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoggedTask:
    id: str
    index: int


class LibraryEnvironment:
    """One recorded conversation; `name` is the folder or file of the logs."""

    word = "logs"

    def __init__(self, name: str) -> None:
        self.name, self.spec = name, f"{self.word}:{name}"
        self._records = _records_of(name)
        self._turns: list[Record] = []

    def tools(self) -> list[dict[str, Any]]:
        found = _tools_of(self.name)
        if not found:
            raise UsageError(f"{self.spec} has no call of any tool")
        return found

    def tasks(self, split: str) -> Sequence[LoggedTask]:
        if split != "train":
            raise UsageError(f"{self.spec} has no split {split!r}: nobody can act in logs; set eval.every=0")
        return [LoggedTask(str(record.get("task_id", index)), index) for index, record in enumerate(self._records)]

    def reset(self, task: LoggedTask) -> list[Message]:
        record = self._records[task.index]
        self._turns = [turn for turn in record["turns"] if not turn.get("predicted")]
        return [Message(role=each["role"], content=each["content"]) for each in record["opening"]]

    def step(self, message: str) -> StepResult:
        call = read_tool_call(message)
        if call is None:
            return StepResult(observation="", done=True)
        for index, turn in enumerate(self._turns):
            if read_tool_call(turn["action"]) == call:
                del self._turns[: index + 1]
                return StepResult(observation=turn["observation"], done=not self._turns)
        return StepResult(observation=UNRECORDED)


@cache  # a run reads its logs once here, and once where it learns from them
def _records_of(name: str) -> list[Record]:
    found = [each.record for each in numbered_records(Path(name))]
    usable: list[Record] = [record for record in found if isinstance(record, dict) and _is_conversation(record)]
    if not usable:
        raise UsageError(f"logs:{name} contains no conversation")
    return usable


def _is_conversation(record: Record) -> bool:
    opening, turns = record.get("opening"), record.get("turns")
    if not isinstance(opening, list) or not isinstance(turns, list) or not opening:
        return False
    spoken = all(isinstance(each, dict) and isinstance(each.get("content"), str) for each in opening)
    return spoken and all(
        isinstance(each, dict) and isinstance(each.get("action"), str) and isinstance(each.get("observation"), str)
        for each in turns
    )


@cache
def _tools_of(name: str) -> list[dict[str, Any]]:
    """Return the newest schema of each tool, or one of the arguments that were used, where none was recorded."""
    schemas: dict[str, dict[str, Any]] = {}
    used: dict[str, dict[str, Any]] = {}
    for record in _records_of(name):
        for tool in _dicts(record.get("tools")):
            function = tool.get("function")
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                schemas[function["name"]] = json.loads(json.dumps(tool))
        for turn in record["turns"]:
            call = read_tool_call(turn["action"])
            if call is not None:
                used.setdefault(call.name, {}).update({key: {} for key in call.arguments})
    inferred = {
        name: {
            "type": "function",
            "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": properties}},
        }
        for name, properties in used.items()
    }
    return [*schemas.values(), *(tool for name, tool in inferred.items() if name not in schemas)]


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    return (each for each in (value if isinstance(value, list) else ()) if isinstance(each, dict))
