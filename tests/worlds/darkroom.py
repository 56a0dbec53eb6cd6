"""A darkroom: develop a film by three numbers. Three strips to try; a spoiled strip names one wrong number only.

The heat follows from the developer, the tilts from the film, and the minutes are a sum over both. So somebody who only
reads knows the last number when the last strip is gone, and one number known beforehand is enough. Pairs of film and
developer in `test_unseen` follow from their parts.
"""

import functools
import json
from dataclasses import dataclass
from random import Random

from lfo.env.tool_environment import ToolEnvironment, tool
from lfo.types import Message, ToolCall

from . import known_and_unseen

FILMS = ("Halden", "Pankro", "Sirocco", "Velour", "Nordlys")
DEVELOPERS = ("Rodax", "Finol", "Metapan", "Quill")
STRIPS = 3
WORDINGS = (
    "Roll {roll}: {film} film, to be developed in {developer}. You have three strips for trials.",
    "Use {developer} on roll {roll}, which is {film}. There are three strips.",
    "{film} film in a bath of {developer}, roll {roll}; three strips may be spoiled at most.",
)
OTHER_WORDINGS = (
    "The next roll is {roll}. Someone shot it on {film}, and all that is left is {developer}. 3 strips.",
    "Get roll {roll} developed for me. Bath: {developer}. Film: {film}. Three strips, no more.",
)


@dataclass(frozen=True)
class Roll:
    id: str
    text: str
    key: tuple[str, str]  # film and developer
    answer: tuple[int, int, int]  # degrees, minutes, tilts


@functools.cache
def _splits(seed: int) -> dict[str, list[Roll]]:
    random = Random(f"darkroom {seed}")
    heat = dict(zip(DEVELOPERS, random.sample(range(18, 30), len(DEVELOPERS)), strict=True))
    delay = dict(zip(DEVELOPERS, random.sample((0, 6, 12, 18), len(DEVELOPERS)), strict=True))
    tilts = dict(zip(FILMS, random.sample(range(31, 60), len(FILMS)), strict=True))
    minutes = dict(zip(FILMS, random.sample(range(7, 13), len(FILMS)), strict=True))
    known, unseen = known_and_unseen(random.sample(FILMS, len(FILMS)), DEVELOPERS)
    rolls = iter(random.sample(range(1000, 10000), 1000))
    splits: dict[str, list[Roll]] = {"train": [], "val": [], "test_unseen": []}
    for split, keys, copies in (("train", known, 20), ("val", known, 4), ("test_unseen", unseen, 10)):
        for film, developer in keys * copies:
            roll = next(rolls)
            wording = random.choice(OTHER_WORDINGS if split == "val" else WORDINGS)
            splits[split].append(
                Roll(
                    id=f"roll-{roll}",
                    text=wording.format(roll=roll, film=film, developer=developer),
                    key=(film, developer),
                    answer=(heat[developer], minutes[film] + delay[developer], tilts[film]),
                )
            )
        random.shuffle(splits[split])
    return splits


class Darkroom(ToolEnvironment):
    def __init__(self, seed: int = 0):
        self.seed = seed

    def tasks(self, split):
        return _splits(self.seed)[split]

    def start(self, task):
        self.task, self.strips, self.developed = task, STRIPS, False
        return [Message(role="user", content=task.text)]

    @tool
    def soak(self, degrees: int, minutes: int, tilts: int) -> str:
        """Soak one strip of the roll. A good strip finishes the work, a bad one is gone.

        degrees: heat of the bath
        minutes: how long the strip stays in
        tilts: how often the tank is tilted
        """
        self.strips -= 1
        given = {"degrees": degrees, "minutes": minutes, "tilts": tilts}
        for (name, value), needed in zip(given.items(), self.task.answer, strict=True):
            if value != needed:
                spoiled = {"strip": "spoiled", "because": name, "given": value, "needed": needed}
                return json.dumps(spoiled | {"strips_left": self.strips})
        self.developed = True
        return json.dumps({"strip": "good"})

    def finished(self):
        return self.developed or self.strips == 0

    def reward(self):
        return float(self.developed)


def gold(task: Roll) -> list[ToolCall]:
    return [ToolCall(name="soak", arguments=dict(zip(("degrees", "minutes", "tilts"), task.answer, strict=True)))]
