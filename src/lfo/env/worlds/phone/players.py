"""Scripted players of the phone-call world: what knows every rule, what reads, what guesses and what is careless.

A player uses the environment only through messages; `informed` gets the rules passed for each task. `benchmarks/` has
more of them, which show what strategies can solve this world.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lfo.env.interface import FAREWELL
from lfo.env.seeds import stream
from lfo.env.worlds.phone.fields import ALTERNATIVE, FIELDS, REFERENCE
from lfo.env.worlds.phone.reps import describe
from lfo.env.worlds.phone.tasks import Task
from lfo.protocol.hermes import format_tool_call
from lfo.types import StepResult, ToolCall

if TYPE_CHECKING:
    from lfo.env.worlds.phone.environment import PhoneCalls

Player = Callable[["PhoneCalls", Task], float]


@dataclass
class PlayerView:
    """An environment from the player's side: tools as methods, and the last result."""

    environment: Any
    task: Any
    result: StepResult | None = None

    @property
    def done(self) -> bool:
        return self.result is not None and self.result.done

    def say(self, text: str) -> str:
        self.result = result = self.environment.step(text)
        return result.observation

    def tool(self, name: str, /, **arguments: object) -> str:
        return "" if self.done else self.say(format_tool_call(ToolCall(name=name, arguments=arguments)))

    def numbers(self) -> dict[str, str]:
        """Return service -> number, as in the directory."""
        directory = self.tool("search_company", name=self.task.company_name)
        lines = re.findall(r"(555-\d{4}): (.+)", directory)
        return {service: number for number, services in lines for service in services.split(", ")}

    def form(self, fields: Iterable[str]) -> dict[str, str]:
        try:
            answers = json.loads(self.tool("auth_info_form", fields=list(fields)))
        except json.JSONDecodeError:
            return {}
        answers.pop("unavailable", None)
        return answers

    def call(self, number: str, values: Mapping[str, str]) -> tuple[str, str]:
        """Return the number that was reached at last, by following a moved line, and its reply."""
        reply = self.tool("make_phone_call", phone_number=number, auth_info=values)
        if moved := re.search(r"555-\d{4}", reply):
            number = moved[0]
            reply = self.tool("make_phone_call", phone_number=number, auth_info=values)
        return number, reply

    def call_all(self, numbers: dict[str, str], values: dict[str, str]) -> None:
        """Call for every service that the user named, in order; follow moved lines and pass references on."""
        for errand in self.task.errands:  # in the order of the goal, which names their services
            _, reply = self.call(numbers[errand.service], values)
            if reference := re.search(r"Your reference number is (\w+)\.", reply):
                values = values | {REFERENCE: reference[1]}

    def end(self) -> float:
        if not self.done:
            self.say(FAREWELL)
        return self.result.reward if self.result else 0.0


def form_then_call(fields: Callable[[Task], Sequence[str]]) -> Player:
    def play(environment: PhoneCalls, task: Task) -> float:
        view = PlayerView(environment, task)
        numbers = view.numbers()
        view.call_all(numbers, view.form(fields(task)))
        return view.end()

    return play


def informed_form(task: Task) -> tuple[str, ...]:
    names = dict.fromkeys(name for errand in task.errands for name in errand.requires if name != REFERENCE)
    if task.limits.alternatives:
        names |= dict.fromkeys(ALTERNATIVE[name] for name in tuple(names) if name in ALTERNATIVE)
    return tuple(names)


informed = form_then_call(informed_form)


def reader(environment: PhoneCalls, task: Task) -> float:
    """Call without details, read what is missing, ask the user for it and call again."""
    view = PlayerView(environment, task)
    numbers = view.numbers()
    wanted: dict[str, None] = {}
    for errand in task.errands:
        numbers[errand.service], reply = view.call(numbers[errand.service], {})
        facts = describe(reply)
        wanted |= dict.fromkeys(name for name in (facts.facts if facts else ()) if name in FIELDS)
    values = view.form(itertools.islice(wanted, task.limits.max_fields)) if wanted else {}
    view.call_all(numbers, values)
    return view.end()


def random(environment: PhoneCalls, task: Task) -> float:
    """Call valid tools in the right order with random arguments; this must not be enough."""
    rng = stream(task.talk_seed, "random player")
    view = PlayerView(environment, task)
    numbers = sorted(set(view.numbers().values()))
    values = view.form(rng.sample(sorted(FIELDS), task.limits.max_fields))
    while not view.done:
        view.tool("make_phone_call", phone_number=rng.choice(numbers), auth_info=values)
    return view.end()


def careless(environment: PhoneCalls, task: Task) -> float:
    """Collect some of the required details and call the right department, a wrong one and an unknown number."""
    rng = stream(task.talk_seed, "careless player")
    view = PlayerView(environment, task)
    numbers = view.numbers()
    needed = informed_form(task)
    values = view.form(rng.sample(needed, rng.randint(1, max(1, len(needed) - 1))))
    right = numbers[task.errands[0].service]
    wrong = rng.choice(sorted(set(numbers.values()) - {right}) or [right])
    nobody = next(n for n in iter(lambda: f"555-{rng.randrange(1000, 10_000)}", "") if n not in numbers.values())
    for number in rng.sample([right, wrong, nobody], 3):
        view.tool("make_phone_call", phone_number=number, auth_info=values)
    return view.end()


# Together these players receive every kind of reply.
EVERY_REPLY: tuple[Player, ...] = (reader, informed, random, careless)
