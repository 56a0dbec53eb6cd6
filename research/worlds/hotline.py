"""A hotline: the customer's plan decides the letter of the code, the product its digit. The plan must be looked up."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Literal

from lfo.env.tool_environment import quote, tool
from lfo.protocol.hermes import Mistake
from lfo.types import Message, ToolCall
from research.worlds.one_try import Answer, Case, OneTry, Rule, Task, draw_people, held_out, matched

PLANS = ("Basic", "Family", "Student", "Business")
PRODUCTS = ("router", "phone", "television", "doorbell")
REGIONS = ("North", "South", "East", "West")
LETTERS = ("K", "T")
DIGITS = ("1", "2", "3", "4")


class Tickets(OneTry):
    system = "You work on a hotline. Close the customer's ticket with the right code."
    case_words = ("plan", "product")
    answer_words = ("code",)
    draw_names = staticmethod(draw_people)
    requests = (
        "{name} is on the line: the {product} does not work.",
        "New ticket from {name}. Subject: {product} is broken.",
        "Please handle the ticket of {name} about a {product}.",
        "The {product} of {name} has a fault. Close the ticket, please.",
    )
    val_requests = (
        "A customer called {name} complains again, this time because of a dead {product}.",
        "Hi, {name} speaking. Since last night my {product} stays dark. Can you sort it out?",
        "Could you finish this one for me? Customer {name}, trouble with the {product}.",
    )
    records = (
        "{name}: plan {plan}, region {region}.",
        "{name} has the {plan} plan and lives in the region {region}.",
        "Region {region}, plan {plan}. Customer: {name}.",
    )
    answers_of_customers = (
        {"since_when": "Since Monday.", "how_urgent": "It can wait.", "tried_restart": "Yes, twice."},
        {"since_when": "Since last week.", "how_urgent": "Very urgent.", "tried_restart": "No."},
        {"since_when": "Since today.", "how_urgent": "Not very.", "tried_restart": "Yes, it did not help."},
    )
    accepted = (
        "The ticket is closed.",
        "Closed. The customer says thank you.",
    )
    refused = (
        "Rejected. A {product} on the {plan} plan is closed with {code}.",
        "The ticket went to a manager: it needed the code {code}.",
        "Wrong code. The right one was {code}.",
        "That was not right, {code} was needed here.",
        "The customer complained. With {code} the ticket would have been closed.",
    )

    def draw_rule(self, dice: Random) -> Rule:
        letters, digits = matched(PLANS, LETTERS * 2, dice), matched(PRODUCTS, DIGITS, dice)
        answers: dict[Case, Answer] = {(a, b): (letters[a] + digits[b],) for a, b in product(letters, digits)}
        return Rule(answers=answers, unseen=frozenset((a + b,) for a, b in held_out(LETTERS, DIGITS, dice)))

    def start(self, task: Task) -> list[Message]:
        self.asked = False
        return super().start(task)

    def solution(self, task: Task) -> list[ToolCall]:
        return [
            ToolCall(name="search_customer", arguments={"name": task.name}),
            ToolCall(name="close_ticket", arguments={"code": task.answer[0], "note": "Done."}),
        ]

    @tool
    def search_customer(self, name: str) -> str:
        """Search a customer; returns plan and region.

        name: first and last name
        """
        if name.strip().casefold() != self.task.name.casefold():
            raise Mistake(f"There is no customer {quote(name)}.")
        return self.say(self.records, region=REGIONS[self.task.talk % len(REGIONS)])

    @tool
    def ask_customer(self, question: Literal["since_when", "how_urgent", "tried_restart"]) -> str:
        """Ask the customer one question. A customer who is asked a second one hangs up, and the ticket is lost.

        question: what to ask
        """
        if self.asked:
            self.over = True
            return "The customer hangs up: one question was enough."
        self.asked = True
        return self.answers_of_customers[self.task.talk % len(self.answers_of_customers)][question]

    @tool
    def close_ticket(self, code: Literal["K1", "K2", "K3", "K4", "T1", "T2", "T3", "T4"], note: str) -> str:
        """Close the ticket. There is one try only.

        code: the code of the solution
        note: a short note about the ticket
        """
        return self.attempt(code)
