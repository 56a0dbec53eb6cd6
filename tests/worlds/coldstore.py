"""A cold store for fruit: open the crate, then set the chamber. One try, two decisive numbers and a lot to repeat.

The task names only a lot. What lies in the crate, kind and ripeness, stands in prose among other remarks, and the
chamber cannot be set before. Moisture follows from the ripeness, and the chill is a sum over kind and ripeness. Pairs
in `test_unseen` follow from their parts.
"""

import functools
from dataclasses import dataclass
from random import Random

from lfo.env.tool_environment import Mistake, ToolEnvironment, tool
from lfo.types import Message, ToolCall

from . import known_and_unseen

KINDS: tuple[str, ...] = ("russets", "quinces", "damsons", "medlars", "bergamots")
STAGES: tuple[str, ...] = ("green", "firm", "mellow", "bruised")
WORDINGS = (
    "Lot {lot} has come in. Give it a chamber.",
    "Store lot {lot}, please.",
    "A truck has brought lot {lot}; set a chamber for it.",
)
OTHER_WORDINGS = (
    "Could you find a place for lot {lot} before the fruit warms up?",
    "On the ramp: lot {lot}. It should be in the cold by noon.",
)
REMARKS = (
    "The lid sticks a little.",
    "Somebody has left a glove on top.",
    "The paper smells of straw.",
    "A wasp flies out.",
    "The crate is heavier than it looks.",
    "The stamp of the grower is smudged.",
)
CONTENTS = (
    "Inside are {kind}, and they are {stage}.",
    "You see {stage} {kind}, row upon row.",
    "It is full of {kind}. All are {stage}.",
)


@dataclass(frozen=True)
class Lot:
    id: str
    text: str
    lot: str
    sight: str
    key: tuple[str, str]  # kind and ripeness
    answer: tuple[int, int]  # chill and moisture


@functools.cache
def _splits(seed: int) -> dict[str, list[Lot]]:
    random = Random(f"cold store {seed}")
    chill = dict(zip(KINDS, random.sample(range(1, 6), len(KINDS)), strict=True))
    warmer = dict(zip(STAGES, random.sample((0, 5, 10, 15), len(STAGES)), strict=True))
    moisture = dict(zip(STAGES, random.sample(range(61, 99), len(STAGES)), strict=True))
    known, unseen = known_and_unseen(random.sample(KINDS, len(KINDS)), STAGES)
    names = iter(random.sample([f"{letter}-{number}" for letter in "BFHKT" for number in range(100, 1000)], 1000))
    splits: dict[str, list[Lot]] = {"train": [], "val": [], "test_unseen": []}
    for split, keys, copies in (("train", known, 20), ("val", known, 4), ("test_unseen", unseen, 10)):
        for kind, stage in keys * copies:
            lot = next(names)
            first, last = random.sample(REMARKS, 2)
            splits[split].append(
                Lot(
                    id=lot,
                    text=random.choice(OTHER_WORDINGS if split == "val" else WORDINGS).format(lot=lot),
                    lot=lot,
                    sight=f"{first} {random.choice(CONTENTS).format(kind=kind, stage=stage)} {last}",
                    key=(kind, stage),
                    answer=(chill[kind] + warmer[stage], moisture[stage]),
                )
            )
        random.shuffle(splits[split])
    return splits


class ColdStore(ToolEnvironment):
    def __init__(self, seed: int = 0):
        self.seed = seed

    def tasks(self, split):
        return _splits(self.seed)[split]

    def start(self, task):
        self.task, self.opened, self.chosen = task, False, None
        return [
            Message(role="system", content="You are the storekeeper of a cold store. Look before you cool."),
            Message(role="user", content=task.text),
        ]

    @tool
    def open_crate(self, lot: str) -> str:
        """Open a crate of a lot and say what is in it.

        lot: the lot's name
        """
        self._refuse_other(lot)
        self.opened = True
        return self.task.sight

    @tool
    def set_chamber(self, lot: str, chill: int, moisture: int) -> str:
        """Cool a chamber and close it for the winter. The lot must have been opened before.

        lot: the lot's name
        chill: degrees above zero
        moisture: of the air, in percent
        """
        self._refuse_other(lot)
        if not self.opened:
            raise Mistake("Nobody has looked into the crate yet.")
        self.chosen = (chill, moisture)
        if self.reward():
            return "The door falls shut. In spring the fruit is as on the first day. The ramp has been painted."
        right_chill, right_moisture = self.task.answer
        kind, stage = self.task.key
        return (
            f"In spring it is all spoiled, and the mice have been at the ladder. For {kind} that are {stage} the "
            f"chamber must have a chill of {right_chill} and a moisture of {right_moisture}."
        )

    def _refuse_other(self, lot: str) -> None:
        if lot.strip() != self.task.lot:
            raise Mistake(f"On the ramp there is only lot {self.task.lot}.")

    def finished(self):
        return self.chosen is not None

    def reward(self):
        return float(self.chosen == self.task.answer)


def gold(task: Lot) -> list[ToolCall]:
    chill, moisture = task.answer
    return [
        ToolCall(name="open_crate", arguments={"lot": task.lot}),
        ToolCall(name="set_chamber", arguments={"lot": task.lot, "chill": chill, "moisture": moisture}),
    ]
