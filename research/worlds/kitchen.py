"""A kitchen: the dish of an order decides the station, the side decides the tray. The request names only the order."""

from __future__ import annotations

from random import Random
from typing import Literal

from lfo.env.tool_environment import quote, tool
from lfo.protocol.hermes import Mistake
from lfo.types import ToolCall
from research.worlds.one_try import OneTry, Rule, Task, crossed, draw_numbers, matched

DISHES = ("soup", "fish", "pasta", "curry")
SIDES = ("rice", "bread", "salad", "beans")
DRINKS = ("tea", "water", "juice")
STATIONS = ("north", "south", "east", "west")
TRAYS = ("wood", "steel", "stone", "tin")


class Orders(OneTry):
    system = "You serve orders in a kitchen. Look up what an order contains before you serve it."
    case_words = ("dish", "side")
    answer_words = ("station", "tray")
    draw_names = staticmethod(draw_numbers)
    requests = (
        "Order {name} is next. Please serve it.",
        "Please take care of order {name}.",
        "Can you serve order {name} now?",
        "The guests wait for order {name}.",
    )
    val_requests = (
        "Table five is getting hungry, and {name} is their order. Bring it out!",
        "Number {name} came in ten minutes ago. Who does it? You, please.",
        "Next up: {name}. It has to leave the kitchen.",
    )
    contents = (
        "Order {name}: {dish} with {side}. To drink: {drink}.",
        "Order {name} contains {dish}, {side} and {drink}.",
        "They ordered {dish} with {side}, and {drink}.",
        "On the list for {name}: {drink}, {dish}, {side}.",
    )
    accepted = (
        "Served. The guests are happy.",
        "Well done, the order is at the table.",
    )
    refused = (
        "Sent back. An order of {dish} with {side} goes to the {station} station on a {tray} tray.",
        "That was wrong: it needed the {station} station and the {tray} tray.",
        "The guests left. The right station was {station}, the right tray {tray}.",
        "Not like this. A {tray} tray from the {station} station was needed.",
        "The cook is angry. This belongs on a {tray} tray at the {station} station.",
    )

    def draw_rule(self, dice: Random) -> Rule:
        return crossed(matched(DISHES, STATIONS, dice), matched(SIDES, TRAYS, dice), dice)

    def solution(self, task: Task) -> list[ToolCall]:
        station, tray = task.answer
        return [
            ToolCall(name="look_up", arguments={"order_id": task.name}),
            ToolCall(name="serve", arguments={"dish_station": station, "tray": tray}),
        ]

    @tool
    def look_up(self, order_id: str) -> str:
        """Look up what an order contains.

        order_id: the number of the order
        """
        if order_id.strip() != self.task.name:
            raise Mistake(f"There is no open order {quote(order_id)}.")
        return self.say(self.contents, drink=DRINKS[self.task.talk % len(DRINKS)])

    @tool
    def serve(
        self,
        dish_station: Literal["north", "south", "east", "west"],
        tray: Literal["wood", "steel", "stone", "tin"],
    ) -> str:
        """Serve the order. There is one try only.

        dish_station: the station that the order goes to
        tray: the tray that it goes on
        """
        return self.attempt(dish_station, tray)
