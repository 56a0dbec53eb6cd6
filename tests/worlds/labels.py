"""A museum of insects: write the lost label of a specimen. One try, two free texts: a name and a date.

Who found a species, and when, is an accident of history: nobody can know the species of `test_unseen`. The curator
talks about other things too.
"""

import functools
from dataclasses import dataclass
from random import Random

from lfo.env.tool_environment import ToolEnvironment, tool
from lfo.types import Message, ToolCall

SPECIES = (
    *("amber weevil", "bog hawker", "cinder moth", "dune cricket", "elm sawfly", "fen skipper", "glass beetle"),
    *("heath bee", "ivory lacewing", "juniper aphid", "kelp fly", "lantern hopper", "marsh ringlet", "night mantis"),
    *("oak borer", "pine chafer", "quarry wasp", "reed midge", "sand diver", "thistle bug"),
)
UNSEEN = 4  # of these species
FIRST_NAMES = ("Maud", "Edgar", "Hester", "Cyril", "Winifred", "Basil", "Thora", "Aubrey", "Enid", "Lionel")
SURNAMES = ("Ferrel", "Quayle", "Thackray", "Dunmore", "Ibbotson", "Selwyn", "Carrow", "Pym", "Hartnoll", "Vance")
MONTHS = ("January", "March", "April", "May", "June", "July", "August", "October")
WORDINGS = (
    "Drawer {drawer}: the {species} has lost its label. Write a new one.",
    "The {species} in drawer {drawer} needs a label.",
    "Please label the {species}. You find it in drawer {drawer}.",
)
OTHER_WORDINGS = (
    "Somebody tore the label off our {species}, drawer {drawer}. Make us another, will you?",
    "In drawer {drawer} there is a {species} without any label; visitors complain. Put that right.",
)
BEFORE = (
    "The curator puts on her glasses.",
    "Rain drums on the skylight.",
    "A school class goes by, rather loudly.",
    "The curator is still cross about the tea trolley.",
)
AFTER = (
    "By the way, the lift is out of order until Friday.",
    "She asks whether you have seen her umbrella.",
    "Moths have got into the visitors' book, of all things.",
    "The guard at the door yawns.",
)


@dataclass(frozen=True)
class Specimen:
    id: str
    text: str
    key: str  # the species
    answer: tuple[str, str]  # who found it, and when


@functools.cache
def _splits(seed: int) -> dict[str, list[Specimen]]:
    random = Random(f"labels {seed}")
    names = [f"{first} {last}" for first in FIRST_NAMES for last in SURNAMES]
    finders = dict(zip(SPECIES, random.sample(names, len(SPECIES)), strict=True))
    dates = {
        species: f"{random.randint(1, 28)} {random.choice(MONTHS)} {year}"
        for species, year in zip(SPECIES, random.sample(range(1902, 1938), len(SPECIES)), strict=True)
    }
    shuffled = random.sample(SPECIES, len(SPECIES))
    unseen, known = shuffled[:UNSEEN], shuffled[UNSEEN:]
    splits: dict[str, list[Specimen]] = {}
    for split, all_species, drawers in (
        ("train", known, range(100, 900)),
        ("val", known, range(900, 960)),
        ("test_unseen", unseen, range(960, 1000)),
    ):
        wordings = OTHER_WORDINGS if split == "val" else WORDINGS
        copies = {"train": 20, "val": 4, "test_unseen": 10}[split]
        splits[split] = [
            Specimen(
                id=f"{species.replace(' ', '-')}-{drawer}",
                text=random.choice(wordings).format(species=species, drawer=drawer),
                key=species,
                answer=(finders[species], dates[species]),
            )
            for species in all_species
            for drawer in random.sample(drawers, copies)
        ]
        random.shuffle(splits[split])
    return splits


def _same(text: str, other: str) -> bool:
    return text.replace(",", " ").casefold().split() == other.casefold().split()


class Labels(ToolEnvironment):
    def __init__(self, seed: int = 0):
        self.seed = seed

    def tasks(self, split):
        return _splits(self.seed)[split]

    def start(self, task):
        self.task, self.written = task, None
        return [
            Message(role="system", content="You write labels in a museum of insects, in ink: what is written stays."),
            Message(role="user", content=task.text),
        ]

    @tool
    def write_label(self, finder: str, found_on: str) -> str:
        """Write the label of the specimen, in ink.

        finder: first name and surname of the person who found the first one
        found_on: the day of the find, as 5 December 1888
        """
        self.written = (finder, found_on)
        talk = Random(f"{self.task.id} talk")
        said = "She pins your label beside the specimen. It is correct."
        if not self.reward():
            right_finder, right_day = self.task.answer
            said = f"Your label goes into the bin: {right_finder} found the first one, on {right_day}."
        return f"{talk.choice(BEFORE)} {said} {talk.choice(AFTER)}"

    def finished(self):
        return self.written is not None

    def reward(self):
        return float(self.written is not None and all(map(_same, self.written, self.task.answer)))


def gold(task: Specimen) -> list[ToolCall]:
    finder, found_on = task.answer
    return [ToolCall(name="write_label", arguments={"finder": finder, "found_on": found_on})]
