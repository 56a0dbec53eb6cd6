"""A parcel desk: the destination decides the carrier, the contents decide the label."""

from __future__ import annotations

from random import Random
from typing import Literal

from lfo.env.tool_environment import tool
from lfo.types import ToolCall
from research.worlds.one_try import OneTry, Rule, Task, crossed, draw_people, matched

CONTENTS = ("books", "glasses", "batteries", "seeds")
PLACES = ("Norway", "Chile", "Japan", "Kenya")
CARRIERS = ("Heron", "Falcon", "Swift", "Robin")
LABELS = ("green", "red", "white", "blue")


class Desk(OneTry):
    system = "You work at a parcel desk. Ship the parcel of your customer with the tool."
    case_words = ("place", "contents")
    answer_words = ("carrier", "label")
    draw_names = staticmethod(draw_people)
    requests = (
        "Hello, I am {name}. I want to send {contents} to {place}.",
        "Please send my {contents} to {place}. My name is {name}.",
        "I have a parcel with {contents} for {place}. The sender is {name}.",
        "Can you ship {contents} to {place} for {name}?",
    )
    val_requests = (
        "{name} here. A friend in {place} needs {contents}, so please post them today.",
        "This box goes to {place}. There are {contents} in it, and it is from {name}.",
        "My sister moved to {place} and forgot her {contents}. Get them there, please! Yours, {name}",
    )
    accepted = (
        "Accepted. The parcel is on its way.",
        "All right, the parcel has left.",
    )
    refused = (
        "Refused. A parcel with {contents} to {place} needs {carrier} and a {label} label.",
        "The parcel came back: it had to go with {carrier} and a {label} label.",
        "Not accepted. The right carrier was {carrier}, the right label {label}.",
        "That was wrong. With a {label} label, {carrier} would have taken it.",
        "It cannot go like this. Only {carrier} takes it, with a {label} label.",
    )

    def draw_rule(self, dice: Random) -> Rule:
        return crossed(matched(PLACES, CARRIERS, dice), matched(CONTENTS, LABELS, dice), dice)

    def solution(self, task: Task) -> list[ToolCall]:
        carrier, label = task.answer
        return [ToolCall(name="ship_parcel", arguments={"carrier": carrier, "label": label})]

    @tool
    def ship_parcel(
        self,
        carrier: Literal["Heron", "Falcon", "Swift", "Robin"],
        label: Literal["green", "red", "white", "blue"],
    ) -> str:
        """Ship the parcel. There is one try only.

        carrier: who carries the parcel
        label: the colour of the label on the parcel
        """
        return self.attempt(carrier, label)
