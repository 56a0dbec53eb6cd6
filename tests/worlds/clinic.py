"""An animal clinic: read the chart, then prescribe. One try, two words out of lists.

The task names only a chip. The chart, which a tool returns, has species and complaint among other things: the remedy
follows from the complaint, the form from the species. Pairs of both in `test_unseen` follow from their parts.
"""

import functools
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from lfo.env.tool_environment import Mistake, ToolEnvironment, tool
from lfo.types import Message, ToolCall

from . import known_and_unseen

Remedy = Literal["aldorin", "betrisol", "cormavet", "dulcifen", "estrapan", "fumidex", "gastolene", "hydravel"]
Form = Literal["paste", "drops", "patch", "powder", "spray"]

COMPLAINTS: tuple[str, ...] = ("ear mites", "limping", "hair loss", "a cough", "fever", "poor appetite")
SPECIES: tuple[str, ...] = ("ferret", "parrot", "tortoise")
NAMES = ("Biscuit", "Pepper", "Duke", "Olive", "Ziggy", "Mango", "Clover", "Rufus", "Tilly", "Bramble")
OWNERS = ("Mr Hale", "Ms Okafor", "Mrs Lindqvist", "Dr Rossi", "Mr Tanaka", "Ms Abara", "Mrs Kowal")
WORDINGS = (
    "The patient with chip {chip} is on the table. Prescribe what it needs.",
    "Chip {chip} is waiting for a prescription.",
    "Please take care of the animal with chip {chip}: one prescription.",
)
OTHER_WORDINGS = (
    "Next, please! It wears chip {chip}. What shall it be given?",
    "There is a small visitor in room two, chip {chip}, and its owner wants a prescription.",
)


@dataclass(frozen=True)
class Patient:
    id: str
    text: str
    chip: str
    chart: str
    key: tuple[str, str]  # complaint and species
    answer: tuple[str, str]  # remedy and form


@functools.cache
def _splits(seed: int) -> dict[str, list[Patient]]:
    random = Random(f"clinic {seed}")
    remedies = dict(zip(COMPLAINTS, random.sample(get_args(Remedy), len(COMPLAINTS)), strict=True))
    forms = dict(zip(SPECIES, random.sample(get_args(Form), len(SPECIES)), strict=True))
    known, unseen = known_and_unseen(random.sample(COMPLAINTS, len(COMPLAINTS)), SPECIES)
    chips = iter(random.sample(range(10000, 100000), 1000))

    def patient(split: str, complaint: str, species: str) -> Patient:
        chip = str(next(chips))
        chart = (
            f"Chip: {chip}\nName: {random.choice(NAMES)}\nSpecies: {species}\nAge: {random.randint(1, 14)}\n"
            f"Complaint: {complaint}\nOwner: {random.choice(OWNERS)}"
        )
        return Patient(
            id=f"chip-{chip}",
            text=random.choice(OTHER_WORDINGS if split == "val" else WORDINGS).format(chip=chip),
            chip=chip,
            chart=chart,
            key=(complaint, species),
            answer=(remedies[complaint], forms[species]),
        )

    splits = {}
    for split, keys, copies in (("train", known, 25), ("val", known, 5), ("test_unseen", unseen, 8)):
        splits[split] = [patient(split, *key) for key in keys * copies]
        random.shuffle(splits[split])
    return splits


class Clinic(ToolEnvironment):
    def __init__(self, seed: int = 0):
        self.seed = seed

    def tasks(self, split):
        return _splits(self.seed)[split]

    def start(self, task):
        self.task, self.prescribed = task, None
        return [Message(role="user", content=task.text)]

    @tool
    def read_chart(self, chip: str) -> str:
        """Read the chart of an animal.

        chip: the number on its chip
        """
        if chip.strip() != self.task.chip:
            raise Mistake("There is no chart for this chip.")
        return self.task.chart

    @tool
    def prescribe(self, remedy: Remedy, form: Form) -> str:
        """Give the animal on the table its remedy. It gets one only.

        remedy: which remedy
        form: how it is given
        """
        self.prescribed = (remedy, form)
        if self.reward():
            return "Swallowed. It will be well by Sunday."
        right_remedy, right_form = self.task.answer
        return f"It refuses. An animal like this one takes {right_remedy}, and as {right_form}."

    def finished(self):
        return self.prescribed is not None

    def reward(self):
        return float(self.prescribed == self.task.answer)


def gold(task: Patient) -> list[ToolCall]:
    remedy, form = task.answer
    return [
        ToolCall(name="read_chart", arguments={"chip": task.chip}),
        ToolCall(name="prescribe", arguments={"remedy": remedy, "form": form}),
    ]
