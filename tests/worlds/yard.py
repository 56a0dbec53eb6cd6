"""A railway yard: nine tools, of which three matter. Two look-ups, then one try with a word of a list and a number.

The task names only a train. One look-up has its cargo, which decides the siding; another has its brakes, which decide
the speed. Tools answer with JSON. Pairs of cargo and brakes in `test_unseen` follow from their parts.
"""

import functools
import json
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from lfo.env.tool_environment import Mistake, ToolEnvironment, tool
from lfo.types import Message, ToolCall

from . import known_and_unseen

Siding = Literal["Alder", "Birch", "Cedar", "Hazel", "Larch", "Maple", "Rowan", "Willow"]

CARGOES: tuple[str, ...] = ("sugar", "gravel", "paper", "timber", "cattle", "cement")
BRAKES: tuple[str, ...] = ("vacuum", "drum", "disc", "block")
TOWNS = ("Ostham", "Bellmere", "Graufurt", "Pilsby", "Novara", "Tarnow")
SPEEDS = (8, 11, 14, 17, 19, 22, 26, 29)
WORDINGS = (
    "Train {train} is at the gate. Let it in.",
    "Admit train {train}, please.",
    "{train} has arrived and wants to come into the yard.",
)
OTHER_WORDINGS = (
    "We have {train} standing outside, and the driver is impatient. Get it off the main line.",
    "Your turn, yard master: {train} is next.",
)


@dataclass(frozen=True)
class Train:
    id: str
    text: str
    name: str
    origin: str
    wagons: int
    key: tuple[str, str]  # cargo and brakes
    answer: tuple[str, int]  # siding and speed


@functools.cache
def _splits(seed: int) -> dict[str, tuple[Train, ...]]:
    random = Random(f"yard {seed}")
    sidings = dict(zip(CARGOES, random.sample(get_args(Siding), len(CARGOES)), strict=True))
    speeds = dict(zip(BRAKES, random.sample(SPEEDS, len(BRAKES)), strict=True))
    known, unseen = known_and_unseen(random.sample(CARGOES, len(CARGOES)), BRAKES)
    names = iter(
        random.sample([f"{letters}{number}" for letters in ("GX", "RN", "TK") for number in range(100, 999)], 999)
    )

    def trains(split: str, keys: list[tuple[str, str]], copies: int) -> tuple[Train, ...]:
        made = []
        for cargo, brakes in keys * copies:
            name = next(names)
            made.append(
                Train(
                    id=name,
                    text=random.choice(OTHER_WORDINGS if split == "val" else WORDINGS).format(train=name),
                    name=name,
                    origin=random.choice(TOWNS),
                    wagons=random.randint(31, 60),
                    key=(cargo, brakes),
                    answer=(sidings[cargo], speeds[brakes]),
                )
            )
        return tuple(random.sample(made, len(made)))

    return {
        "train": trains("train", known, 20),
        "val": trains("val", known, 4),
        "test_unseen": trains("test_unseen", unseen, 8),
    }


class Yard(ToolEnvironment):
    def __init__(self, seed: int = 0):
        self.seed = seed

    def tasks(self, split):
        return _splits(self.seed)[split]

    def start(self, task):
        self.task, self.admitted = task, None
        return [
            Message(role="system", content="You are the yard master. A train is admitted once."),
            Message(role="user", content=task.text),
        ]

    # The three tools that matter.

    @tool
    def waybill(self, train: str) -> str:
        """Show what a train carries, and from where.

        train: its name
        """
        self._must_be_here(train)
        cargo, _ = self.task.key
        return json.dumps({"from": self.task.origin, "wagons": self.task.wagons, "cargo": cargo})

    @tool
    def brake_sheet(self, train: str) -> str:
        """Show the last test of a train's brakes.

        train: its name
        """
        self._must_be_here(train)
        _, brakes = self.task.key
        return json.dumps({"brakes": brakes, "tested_in": self.task.origin, "passed": True})

    @tool
    def admit(self, siding: Siding, speed: int) -> str:
        """Set the points and show the waiting train a green light. This cannot be undone.

        siding: where it shall stand
        speed: the most it may drive in the yard
        """
        self.admitted = (siding, speed)
        if self.reward():
            return json.dumps({"light": "green", "train": "parked"})
        right_siding, right_speed = self.task.answer
        return json.dumps({"light": "red", "reason": {"siding_must_be": right_siding, "speed_must_be": right_speed}})

    # The others.

    @tool
    def weather(self, town: str) -> str:
        """Show the weather in a town.

        town: its name
        """
        return json.dumps({"sky": Random(f"{self.task.id} {town} sky").choice(("clear", "cloudy", "rain"))})

    @tool
    def departures(self) -> str:
        """Show which passenger trains leave next."""
        towns = Random(f"{self.task.id} departures").sample(TOWNS, 2)
        return json.dumps({"next": towns[0], "then": towns[1]})

    @tool
    def radio(self, words: str) -> str:
        """Say something to the driver.

        words: what to say
        """
        return json.dumps({"driver": "Say again? I only hear the engine."})

    @tool
    def crew(self, shift: Literal["early", "late", "night"]) -> str:
        """Show who works on a shift.

        shift: which shift
        """
        return json.dumps({"crew": {"early": "Petra, Ivo", "late": "Samir, Nell", "night": "Gus, Alma"}[shift]})

    @tool
    def lamp_test(self) -> str:
        """Test the lamps of all signals."""
        return json.dumps({"lamps": "all lit"})

    @tool
    def diary(self, entry: str) -> str:
        """Write something into the diary of the yard.

        entry: what to write
        """
        return json.dumps({"diary": "noted"})

    def _must_be_here(self, train: str) -> None:
        if train.strip() != self.task.name:
            raise Mistake("No train of this name waits at the gate.")

    def finished(self):
        return self.admitted is not None

    def reward(self):
        return float(self.admitted == self.task.answer)


def gold(task: Train) -> list[ToolCall]:
    siding, speed = task.answer
    return [
        ToolCall(name="waybill", arguments={"train": task.name}),
        ToolCall(name="brake_sheet", arguments={"train": task.name}),
        ToolCall(name="admit", arguments={"siding": siding, "speed": speed}),
    ]
