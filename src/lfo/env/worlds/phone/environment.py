"""The phone-call world as an environment: look a company up, ask the user once, call departments.

What a department requires before it helps is never shown; an agent learns it from the replies of reps. The reward is 1
if every errand of the task is done, else 0. It is computed from the state, never from text.

    environment = PhoneCalls()
    messages = environment.reset(environment.tasks("train")[0])
    result = environment.step('<tool_call>{"name": "search_company", "arguments": {"name": "Acme"}}</tool_call>')
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from lfo.env.seeds import stream
from lfo.env.tool_environment import Mistake, ToolEnvironment, quote, tool
from lfo.env.worlds.phone import reps
from lfo.env.worlds.phone.fields import ALTERNATIVE, FIELDS, REFERENCE
from lfo.env.worlds.phone.generator import load_cached
from lfo.env.worlds.phone.players import EVERY_REPLY, Player
from lfo.env.worlds.phone.tasks import LEVEL, LEVELS, SPLITS, Errand, Task, TaskStream, World
from lfo.env.worlds.phone.world import UNSEEN, Company, Department, company
from lfo.errors import UsageError
from lfo.protocol.hermes import read_tool_call
from lfo.types import Message, ReplyFacts, ToolCall

SYSTEM = "You make phone calls for your user. Search the company, ask the user once for details, then call."
DEFAULT_COUNTS = {"train": 500, "val": 300} | {split: 300 for split in SPLITS if split.startswith("test")}


@lru_cache(maxsize=8)
def _by_name(world: World) -> Mapping[str, Company]:
    indexes = [*range(world.companies), *range(UNSEEN, UNSEEN + world.unseen_companies)]
    every = (company(world.seed, index, world.law) for index in indexes)
    return {each.name.lower(): each for each in every}


@lru_cache(maxsize=32)
def _tasks(world: World, split: str, levels: tuple[int, ...], count: int) -> tuple[Task, ...]:
    return tuple(world.stream(split, levels=levels).take(count))


@lru_cache(maxsize=65536)
def _close_names(world: World, name: str) -> tuple[str, ...]:
    known = _by_name(world)
    return tuple(known[each].name for each in difflib.get_close_matches(name.lower()[:60], known, n=3, cutoff=0.5))


class PhoneCalls(ToolEnvironment):
    """One rollout in the phone-call world.

    `law` is the seed of the departments' requirements: law 0 has names that make sense, other laws are drawn. With
    `data`, a folder of `lfo generate`, world and tasks come from the folder (with its seed, law and counts); `levels`
    then selects from its levels.
    """

    predicted_tools = ("make_phone_call",)  # the other tools only show the directory or the user's profile

    def __init__(
        self,
        *,
        seed: int = 0,
        law: int = 0,
        companies: int = 100,
        unseen_companies: int = 50,
        levels: Sequence[int] | None = None,
        counts: Mapping[str, int] | None = None,
        data: str | Path | None = None,
    ) -> None:
        self._dataset = None if data is None else load_cached(str(data))
        known = tuple(LEVEL)
        if self._dataset is not None:
            options = self._dataset.options
            known = options.levels
            seed, companies, unseen_companies = options.seed, options.num_companies, options.num_unseen_companies
            law = options.law
        self.levels = (LEVELS if data is None else known) if levels is None else tuple(levels)
        if not self.levels or len({*known} & {*self.levels}) < len(self.levels):
            raise UsageError(f"levels must be some of {list(known)}, each once, not {list(self.levels)}.")
        if law < 0:
            raise UsageError(f"law must be a seed from 0 on, not {law}.")
        self.world = World(seed, companies, unseen_companies, law)
        self._counts = counts or {}

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in SPLITS:
            raise UsageError(f"There is no split {split!r}; the splits are {', '.join(SPLITS)}.")
        if self._dataset is not None:
            tasks = self._dataset.tasks[split]
            return (
                tasks if self.levels == self._dataset.options.levels else [t for t in tasks if t.level in self.levels]
            )
        count = self._counts.get(split, DEFAULT_COUNTS[split])
        return _tasks(self.world, split, self.levels, count)

    def stream(self, split: str, stream_seed: int) -> TaskStream:
        """Return an endless stream of tasks of this world and these levels."""
        return self.world.stream(split, levels=self.levels, stream_seed=stream_seed)

    def start(self, task: Task) -> Sequence[Message]:
        self.task = task
        self.company = company(self.world.seed, task.company, self.world.law)
        self.values: dict[str, str] = {}  # values from the user, and the newest reference
        self.form: tuple[str, ...] | None = None
        self.calls = 0
        self.done_errands = 0
        self.failures: dict[str, int] = {}
        self.references: list[str] = []
        self.category: str | None = None
        self.requested: tuple[str, ...] = ()
        self.order = [errand.kind for errand in task.errands]
        self.called: list[str] = []  # kinds of departments
        self.form_before_call = True  # no call was made before the form
        self.excess_fields = 0  # fields of the form that no department needs
        return (Message(role="system", content=SYSTEM), Message(role="user", content=task.goal))

    # --- tools -------------------------------------------------------------------------------------------------

    def tool_text(self) -> Mapping[str, str]:
        return {"fields": ", ".join(FIELDS)}

    @tool
    def search_company(self, name: str) -> str:
        """Look up a company's departments, phone numbers and services.

        name: the company's name
        """
        self._quiet()
        found = _by_name(self.world).get(name.strip().lower())
        if found is None:
            close = _close_names(self.world, name)
            return f"No company is called {quote(name)}." + (f" Close names: {', '.join(close)}." if close else "")
        if found.index == self.company.index and self.task.moved_number:
            return found.directory(moved=self.task.moved_kind, moved_number=self.task.moved_number)
        return found.directory()

    @tool
    def auth_info_form(self, fields: list[str]) -> str:
        """Ask the user for details by a form, once.

        fields: which of {fields}
        """
        self._quiet()
        for name in fields:
            if name not in FIELDS:
                close = difflib.get_close_matches(name[:60], FIELDS, n=1, cutoff=0.0)
                raise Mistake(f"There is no field {quote(name)}; did you mean {close[0]}?")
        if not fields:
            raise Mistake("The form needs at least one field.")
        if self.form is not None:
            raise Mistake("The user has already filled in a form and will not fill in another.")
        self.form = tuple(dict.fromkeys(fields))
        needed = {name for errand in self.task.errands for name in errand.requires}
        self.excess_fields = len(set(self.form) - needed - {ALTERNATIVE.get(name) for name in needed})
        limit = self.task.limits.max_fields
        if len(self.form) > limit:
            return f"That is more than {limit} details. I will not fill in any form."
        answers: dict[str, Any] = {name: self.task.profile[name] for name in self.form if name in self.task.profile}
        self.values |= answers
        missing = [name for name in self.form if name not in self.task.profile]
        return json.dumps(answers | ({"unavailable": missing} if missing else {}))

    @tool
    def make_phone_call(self, phone_number: str, auth_info: dict[str, str]) -> str:
        """Call a department and give it what it may ask for.

        phone_number: a number from the directory
        auth_info: details by field name
        """
        self._quiet()
        for name in auth_info:
            if name not in FIELDS and name != REFERENCE:
                close = difflib.get_close_matches(name[:60], [*FIELDS, REFERENCE], n=1, cutoff=0.0)
                raise Mistake(f"There is no field {quote(name)}; did you mean {close[0]}?")
        self.calls += 1
        self.form_before_call = self.form_before_call and self.form is not None
        return self._answer(phone_number.strip(), auth_info)

    # --- the rep at the other end ------------------------------------------------------------------------------

    def _answer(self, number: str, given: Mapping[str, str]) -> str:
        if self.task.moved_number and number == self.task.moved_number:
            return self._say("moved", number=self.company.department(self.task.moved_kind).number)
        department = next((each for each in self.company.departments if each.number == number), None)
        if department is None:
            return self._say("refusal")
        self.called.append(department.kind)
        index = next((i for i, errand in enumerate(self.task.errands) if errand.kind == department.kind), None)
        if index is None:
            return self._say("routing_violation", department=department.name)
        if index < self.done_errands:
            return self._say("refusal")
        if self.failures.get(department.kind, 0) >= self.task.limits.failures_to_lock:
            return self._say("lockout")
        return self._verify(department, index, given)

    def _verify(self, department: Department, index: int, given: Mapping[str, str]) -> str:
        errand = self.task.errands[index]
        if self.task.limits.lenient:  # the rep looks at the first detail only, so a refusal names all required ones
            missing = () if self._first_is_enough(errand, given) else errand.requires
        else:
            missing = tuple(name for name in errand.requires if not self._proven(name, index, given))
        if not missing:
            # A chained errand needs the reference of the one before it, so its order is enforced. The order of
            # independent errands is a wish of the user and is checked here.
            if index != self.done_errands:
                return self._say("routing_violation", department=department.name)
            return self._serve(errand)
        self.failures[department.kind] = self.failures.get(department.kind, 0) + 1
        vague = self.task.limits.vague
        if vague and stream(self.task.talk_seed, "vague", self.calls).random() < vague:
            return self._say("unclear")
        self.requested = missing
        said = reps.spoken_fields(missing, alternatives=self.task.limits.alternatives)
        return self._say("auth_failure", fields=said)

    def _first_is_enough(self, errand: Errand, given: Mapping[str, str]) -> bool:
        first = next(iter(given), "")
        known = first in errand.accepted(self.company.industry, self.task.law)
        return known and given[first] == self.task.profile.get(first)

    def _proven(self, name: str, index: int, given: Mapping[str, str]) -> bool:
        if name == REFERENCE:
            return 0 < index <= len(self.references) and given.get(name) == self.references[index - 1]
        accepted = (name, ALTERNATIVE[name]) if name in ALTERNATIVE else (name,)
        profile = self.task.profile
        return any(each in given and each in profile and given[each] == profile[each] for each in accepted)

    def _serve(self, errand: Errand) -> str:
        self.done_errands += 1
        reference = ""
        if self.task.limits.chained and self.done_errands < len(self.task.errands):
            reference = f"R{stream(self.task.talk_seed, 'reference', self.done_errands).randrange(1000, 10_000)}"
            self.references.append(reference)
            self.values[REFERENCE] = reference
        return self._say("success", service=errand.service, reference=reference)

    def _say(self, what: str, **slots: str) -> str:
        self.category = "routing_violation" if what == "moved" else what
        rng = stream(self.task.talk_seed, "say", self.calls)
        return reps.say(what, rng, held_out=self.task.split == "test_unseen_phrasing", **slots)

    def _quiet(self) -> None:
        """Clear the reply of the last step: no rep has spoken in this one yet."""
        self.category, self.requested = None, ()

    # --- state -------------------------------------------------------------------------------------------------

    def finished(self) -> bool:
        return self.done_errands == len(self.task.errands) or self.calls >= self.task.limits.calls

    def reward(self) -> float:
        return float(self.done_errands == len(self.task.errands))

    def info(self) -> dict[str, Any]:
        return {
            "level": self.task.level,
            "category": self.category,
            "requested": self.requested,
            "calls": self.calls,
            "done_errands": self.done_errands,
            "form_before_call": self.form_before_call,
            "excess_fields": self.excess_fields,
            "department_order": self.called == self.order[: len(self.called)],
        }

    # --- for evaluation, and for look-ahead --------------------------------------------------------------------

    def scripted_players(self) -> Sequence[Player]:
        return EVERY_REPLY

    @staticmethod
    def describe_reply(observation: str) -> ReplyFacts | None:
        return reps.describe(observation)

    def lookahead_query(self, transcript: Sequence[Message]) -> ToolCall | None:
        return lookahead_query(transcript)


_DIRECTORY_LINE = re.compile(r"(.+) (555-\d{4}): (.+)")


def lookahead_query(transcript: Sequence[Message]) -> ToolCall | None:
    """Return the call to imagine next: a call without details to a relevant department, before the form is used.

    Relevant are the departments whose service the user named, in that order, if they were neither called nor imagined
    yet. Reads only the transcript.
    """
    goal, directory, numbers = "", "", set()
    for message in transcript:
        if message.role == "user":
            goal = message.content
        elif message.role == "tool" and message.name == "search_company" and _DIRECTORY_LINE.search(message.content):
            directory = message.content
        elif message.role == "assistant":
            call = read_tool_call(message.content)
            if call is None:
                continue
            if call.name == "auth_info_form":
                return None  # the form is used: the user can no longer be asked for what a rep requires
            if call.name == "make_phone_call":
                numbers.add(call.arguments.get("phone_number"))
    offered = {
        service: match[2]
        for match in map(_DIRECTORY_LINE.fullmatch, directory.splitlines()[1:])
        if match
        for service in match[3].split(", ")
    }
    named = sorted(
        (goal.find(f"the {service}"), number) for service, number in offered.items() if f"the {service}" in goal
    )
    number = next((number for _, number in named if number not in numbers), None)
    return ToolCall(name="make_phone_call", arguments={"phone_number": number, "auth_info": {}}) if number else None
