"""Hand-written cases for a world model: a state, a call, and conditions on the predicted reply.

    cases:
      - name: without details the rep asks for some
        task: I need the invoice copy from Acme Bank. Limits: 4 details, 3 calls, 1 failed check.
        before:                                  # earlier calls and replies, oldest first; optional
          - call: search_company
            arguments: {name: Acme Bank}
            reply: "Acme Bank, bank\\nBilling 555-1000: invoice copy, payment change"
        call: make_phone_call
        arguments: {phone_number: 555-1000, auth_info: {}}
        expect:                                  # at least one of these; all must hold
          category: auth_failure                 # by the environment's describe_reply
          reply: your (account|card) number      # a regular expression that must match, case ignored
          not: invoice copy                      # one that must not match
        assumes: ...                             # an assumption of the case; shown

States are built by the same function as in training. A failed case is a finding about the model, not an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lfo.env.interface import DescribesReplies, Environment, describe_with
from lfo.errors import DataError, UsageError
from lfo.play.records import rollout_from_texts
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import WorldModelState, state_of
from lfo.types import Message, ToolCall

_KEYS = frozenset({"name", "task", "before", "call", "arguments", "expect", "assumes"})
_NEEDED = ("name", "task", "call", "expect")
_EXPECTATIONS = frozenset({"category", "reply", "not"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeCase:
    name: str
    task: str
    before: tuple[tuple[ToolCall, str], ...]  # (call, reply)
    call: ToolCall
    category: str | None = None
    wanted: re.Pattern[str] | None = None
    unwanted: re.Pattern[str] | None = None
    assumes: str = ""

    def state(self, environment: Environment) -> WorldModelState:
        """Return the state after a rollout with the exchanges `before`."""
        rollout = rollout_from_texts(
            environment,
            task_id=self.name,
            opening=(Message(role="user", content=self.task),),
            exchanges=[(format_tool_call(call), reply) for call, reply in self.before],
        )
        return state_of(rollout.opening, rollout.turns)

    def problems(self, reply: str, environment: Environment) -> list[str]:
        """Return the violated conditions of a predicted reply; none if the case has passed."""
        found = []
        if self.category is not None:
            if not isinstance(environment, DescribesReplies):
                raise UsageError(
                    f"the case {self.name!r} expects a category, but this environment has no describe_reply"
                )
            meaning = describe_with(environment, reply)
            if meaning is None:
                found.append(f"wanted the category {self.category}, but the environment would not say this")
            elif meaning.category != self.category:
                found.append(f"wanted the category {self.category}, not {meaning.category}")
        if self.wanted is not None and not self.wanted.search(reply):
            found.append(f"wanted {self.wanted.pattern!r}, which is not in it")
        if self.unwanted is not None and (match := self.unwanted.search(reply)):
            found.append(f"must not say {match[0]!r}")
        return found


def read_cases(path: str | Path) -> list[ProbeCase]:
    """Read the cases of a YAML file; an error names the file and the case."""
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        raise DataError(f"{path}{f', line {mark.line + 1}' if mark else ''} is not valid YAML") from error
    cases = tree.get("cases") if isinstance(tree, dict) else None
    if not isinstance(cases, list) or not cases:
        raise DataError(f"{path} contains no cases; it needs a list of them under `cases`")
    read: list[ProbeCase] = []
    for number, each in enumerate(cases, start=1):
        name = each.get("name") if isinstance(each, dict) else None
        label = f"case {number}" if name is None else f"case {number} ({name})"
        try:
            read.append(_case(each))
        except ValueError as error:
            raise DataError(f"{path}, {label}: {error}") from error
        if any(other.name == read[-1].name for other in read[:-1]):
            raise DataError(f"{path}, {label}: another case has this name")
    return read


def _case(tree: Any) -> ProbeCase:
    _refuse_unknown(tree, _KEYS, "a case")
    if missing := [key for key in _NEEDED if key not in tree]:
        raise ValueError(f"{missing[0]} is missing")
    expect = tree["expect"]
    _refuse_unknown(expect, _EXPECTATIONS, "expect")
    if not expect:
        raise ValueError("expect needs category, reply or not")
    return ProbeCase(
        name=_text(tree, "name"),
        task=_text(tree, "task"),
        before=tuple((_call(step), _text(step, "reply")) for step in _steps(tree.get("before", []))),
        call=_call(tree),
        category=_text(expect, "category") if "category" in expect else None,
        wanted=_pattern(expect, "reply"),
        unwanted=_pattern(expect, "not"),
        assumes=_text(tree, "assumes") if "assumes" in tree else "",
    )


def _steps(value: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise ValueError("before must be a list of call, arguments and reply")
    for step in value:
        _refuse_unknown(step, frozenset({"call", "arguments", "reply"}), "a step of before")
    return value


def _call(tree: Mapping[str, Any]) -> ToolCall:
    arguments = tree.get("arguments", {})
    if not isinstance(arguments, dict) or not all(isinstance(name, str) for name in arguments):
        raise ValueError("arguments must be a mapping of names to values")
    call = ToolCall(name=_text(tree, "call"), arguments=arguments)
    try:
        format_tool_call(call)
    except (TypeError, ValueError) as error:  # such as a date, which YAML has and JSON does not
        raise ValueError(
            f"the arguments of {call.name} cannot be written as JSON ({error}); put texts in quotes"
        ) from None
    return call


def _pattern(tree: Mapping[str, Any], key: str) -> re.Pattern[str] | None:
    if key not in tree:
        return None
    try:
        return re.compile(_text(tree, key), re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"{key} is not a valid regular expression: {error}") from error


def _text(tree: Mapping[str, Any], key: str) -> str:
    value = tree.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} must be a text, not {value!r}")
    return value


def _refuse_unknown(tree: Any, known: frozenset[str], what: str) -> None:
    if not isinstance(tree, dict):
        raise ValueError(f"{what} must be a mapping of {', '.join(sorted(known))}")
    if unknown := [key for key in tree if key not in known]:
        raise ValueError(f"{what} has no {unknown[0]!r}; it may have {', '.join(sorted(known))}")
