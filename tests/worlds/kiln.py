"""A pottery: choose flux and kiln air for a pot. One try, two words out of lists.

The flux follows from the clay, the air from the finish; both stand in the task. Pairs of clay and finish in
`test_unseen` follow from their parts.
"""

import functools
import itertools
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from lfo.env.tool_environment import ToolEnvironment, tool
from lfo.types import Message, ToolCall

from . import known_and_unseen

Flux = Literal["bone ash", "soda", "wood ash", "lithia", "borax", "whiting", "pearl ash"]
Air = Literal["smoky", "clear", "steamy", "salted", "sealed"]

CLAYS: tuple[str, ...] = ("Tarn", "Moorfoot", "Blackwater", "Osney", "Linden")
FINISHES: tuple[str, ...] = ("celadon", "tenmoku", "crackle", "matt white")
POTS = ("bowl", "jug", "teapot", "platter", "vase", "beaker")
POTTERS = ("Ines", "Gwen", "Tobias", "Marek", "Yusuf", "Freya", "Otto", "Delphine")
WORDINGS = (
    "{potter} has thrown a {pot} of {clay} clay and wants it {finish}. Fire it.",
    "Please fire the {clay} {pot} by {potter}. The finish is to be {finish}.",
    "Finish: {finish}. Clay: {clay}. It is a {pot}, made by {potter}. Into the kiln with it.",
)
OTHER_WORDINGS = (
    "We promised {potter} a {finish} {pot}; the clay is {clay}. Can you see to the firing?",
    "One {pot} for you to fire, signed {potter}: body {clay}, surface {finish}.",
)


@dataclass(frozen=True)
class Pot:
    id: str
    text: str
    key: tuple[str, str]  # clay and finish
    answer: tuple[str, str]  # flux and air


@functools.cache
def _splits(seed: int) -> dict[str, list[Pot]]:
    random = Random(f"kiln {seed}")
    flux = dict(zip(CLAYS, random.sample(get_args(Flux), len(CLAYS)), strict=True))
    air = dict(zip(FINISHES, random.sample(get_args(Air), len(FINISHES)), strict=True))
    known, unseen = known_and_unseen(random.sample(CLAYS, len(CLAYS)), FINISHES)
    splits: dict[str, list[Pot]] = {"train": [], "val": [], "test_unseen": []}
    for key in known + unseen:
        clay, finish = key
        makers = random.sample(list(itertools.product(POTS, POTTERS)), 24)
        for number, (pot, potter) in enumerate(makers):
            split = "test_unseen" if key in unseen else "train" if number < 20 else "val"
            wording = random.choice(OTHER_WORDINGS if split == "val" else WORDINGS)
            splits[split].append(
                Pot(
                    id=f"{split}-{len(splits[split])}",
                    text=wording.format(potter=potter, pot=pot, clay=clay, finish=finish),
                    key=key,
                    answer=(flux[clay], air[finish]),
                )
            )
    return {split: random.sample(pots, len(pots)) for split, pots in splits.items()}


class Kiln(ToolEnvironment):
    def __init__(self, seed: int = 0):
        self.seed = seed

    def tasks(self, split):
        return _splits(self.seed)[split]

    def start(self, task):
        self.task, self.fired = task, None
        return [
            Message(role="system", content="You run the kiln of a pottery. A pot is fired once."),
            Message(role="user", content=task.text),
        ]

    @tool
    def fire_pot(self, flux: Flux, air: Air) -> str:
        """Mix the glaze and fire the pot. It cannot be fired again.

        flux: what makes the glaze melt
        air: the air in the kiln
        """
        self.fired = (flux, air)
        if self.reward():
            return "The pot comes out whole, and just as ordered."
        right_flux, right_air = self.task.answer
        return f"The glaze has failed. This pot needed {right_flux} as its flux and {right_air} air."

    def finished(self):
        return self.fired is not None

    def reward(self):
        return float(self.fired == self.task.answer)


def gold(task: Pot) -> list[ToolCall]:
    flux, air = task.answer
    return [ToolCall(name="fire_pot", arguments={"flux": flux, "air": air})]
