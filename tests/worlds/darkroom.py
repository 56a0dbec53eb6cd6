"""A darkroom: develop a film by three numbers. Three strips to try; a spoiled strip names one wrong number only.

The heat follows from the developer; minutes and tilts are sums over developer and film. Somebody who only reads knows
the last number when the last strip is gone, but one number known beforehand is enough. Pairs of developer and film in
`test_unseen` follow from their parts.
"""

import functools
import json
from dataclasses import dataclass
from random import Random

from lfo.env.tool_environment import ToolEnvironment, tool
from lfo.types import Message, ToolCall

from . import known_and_unseen

FILMS: tuple[str, ...] = ("Halden", "Pankro", "Sirocco")
DEVELOPERS: tuple[str, ...] = ("Rodax", "Finol", "Metapan", "Quill", "Ultrol", "Bravin")
STRIPS = 3
WORDINGS = (
    "Roll {roll}: {film} film, to be developed in {developer}. You have three strips for trials.",
    "Use {developer} on roll {roll}, which is {film}. There are three strips.",
    "{film} film in a bath of {developer}, roll {roll}; three strips may be spoiled at most.",
)
OTHER_WORDINGS = (
    "The next roll is {roll}. Someone shot it on {film}, and all that is left is {developer}. Three strips.",
    "Get roll {roll} developed for me. Bath: {developer}. Film: {film}. Three strips, no more.",
)


@dataclass(frozen=True)
class Roll:
    id: str
    text: str
    key: tuple[str, str]  # developer and film
    answer: tuple[int, int, int]  # degrees, minutes, tilts


@functools.cache
def _splits(seed: int) -> dict[str, list[Roll]]:
    random = Random(f"darkroom {seed}")
    heat = dict(zip(DEVELOPERS, random.sample(range(18, 35), len(DEVELOPERS)), strict=True))
    minutes = dict(zip(DEVELOPERS, random.sample(range(4, 34, 3), len(DEVELOPERS)), strict=True))
    longer = dict(zip(FILMS, random.sample(range(3), len(FILMS)), strict=True))
    tilts = dict(zip(DEVELOPERS, random.sample(range(35, 95, 5), len(DEVELOPERS)), strict=True))
    oftener = dict(zip(FILMS, random.sample(range(5), len(FILMS)), strict=True))
    known, unseen = known_and_unseen(random.sample(DEVELOPERS, len(DEVELOPERS)), FILMS)
    rolls = iter(random.sample(range(1000, 10000), 1000))
    splits: dict[str, list[Roll]] = {"train": [], "val": [], "test_unseen": []}
    for split, keys, copies in (("train", known, 25), ("val", known, 5), ("test_unseen", unseen, 10)):
        for developer, film in keys * copies:
            roll = next(rolls)
            wording = random.choice(OTHER_WORDINGS if split == "val" else WORDINGS)
            splits[split].append(
                Roll(
                    id=f"roll-{roll}",
                    text=wording.format(roll=roll, film=film, developer=developer),
                    key=(developer, film),
                    answer=(heat[developer], minutes[developer] + longer[film], tilts[developer] + oftener[film]),
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
