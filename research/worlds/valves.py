"""A plant: the liquid decides one valve, the tank another. The refusal says the same words whatever was called."""

from __future__ import annotations

from itertools import product
from random import Random

from lfo.env.tool_environment import tool
from lfo.types import ToolCall
from research.worlds.one_try import Answer, Case, OneTry, Rule, Task, draw_numbers, matched

VALVES = ("A", "B", "C", "D", "E", "F")
LIQUIDS = ("water", "oil", "milk", "juice", "syrup", "vinegar")
TANKS = ("1", "2", "3", "4", "5", "6")


class Plant(OneTry):
    system = "You control a plant with the valves A, B, C, D, E and F. Two of them must be open for each batch."
    case_words = ("liquid", "tank")
    answer_words = ("first", "second")
    draw_names = staticmethod(draw_numbers)
    requests = (
        "Batch {name}: pump {liquid} into tank {tank}.",
        "Please fill tank {tank} with {liquid}. It is batch {name}.",
        "I need {liquid} in tank {tank} for batch {name}.",
        "Batch {name} is {liquid}. Send it to tank {tank}.",
    )
    val_requests = (
        "Tank {tank} is empty, and {name} is waiting. That batch is {liquid}, so let it flow.",
        "Next is {name}. We have {liquid} here that belongs in tank {tank}.",
        "Get the {liquid} of batch {name} out of the pipes. Tank {tank} takes it.",
    )
    accepted = ("It flows.",)
    refused = ("The pressure is wrong.",)

    def draw_rule(self, dice: Random) -> Rule:
        by_liquid, by_tank = matched(LIQUIDS, VALVES, dice), matched(TANKS, VALVES, dice)
        answers: dict[Case, Answer] = {
            (liquid, tank): tuple(sorted((by_liquid[liquid], by_tank[tank])))
            for liquid, tank in product(LIQUIDS, TANKS)
            if by_liquid[liquid] != by_tank[tank]
        }
        shuffled = dice.sample(VALVES, len(VALVES))
        unseen = frozenset(tuple(sorted(pair)) for pair in zip(shuffled[::2], shuffled[1::2], strict=True))
        return Rule(answers=answers, unseen=unseen)

    def solution(self, task: Task) -> list[ToolCall]:
        return [ToolCall(name="open_valves", arguments={"valves": list(task.answer)})]

    @tool
    def open_valves(self, valves: list[str]) -> str:
        """Open two valves and start the pump. There is one try only.

        valves: the letters of the two valves, in any order
        """
        return self.attempt(*sorted(valve.strip().upper() for valve in valves))
