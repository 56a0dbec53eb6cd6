"""A permit office: the kind of request decides the form, the district decides the fee."""

from __future__ import annotations

from random import Random

from lfo.env.tool_environment import tool
from lfo.types import ToolCall
from research.worlds.one_try import OneTry, Rule, Task, crossed, draw_people, matched

KINDS = ("a fence", "a market stall", "a street party", "a garage", "a film shoot")
DISTRICTS = ("Northgate", "Millbrook", "Oldtown", "Riverside")
LETTERS = "ACDEFGHKLMNPRST"  # no B: the example in the tool's description is never right
NUMBERS = range(11, 99)
FEES = range(20, 100, 5)


class Office(OneTry):
    system = "You work in a permit office. File the request of your visitor with the tool."
    case_words = ("kind", "district")
    answer_words = ("form", "fee")
    draw_names = staticmethod(draw_people)
    requests = (
        "Hello, I am {name}. I need a permit for {kind} in {district}.",
        "Please file a permit for {kind}. It is in {district}, and my name is {name}.",
        "I would like to ask for a permit: {kind} in {district}. My name is {name}.",
        "{name} needs a permit for {kind} in {district}. Can you file it?",
    )
    val_requests = (
        "I live in {district} and plan {kind}. Please make it legal! Yours, {name}",
        "Is {kind} allowed in {district}? If it takes a permit, get me one. Thanks, {name}",
        "{name} here. We want {kind}. The place is in {district}, so please do the paperwork.",
    )
    accepted = (
        "Filed. The permit is granted.",
        "Everything is in order, here is the permit.",
    )
    refused = (
        "Rejected. For {kind} in {district} it takes form {form} and a fee of {fee}.",
        "The request came back: it needed form {form} with a fee of {fee}.",
        "Not granted. The right form was {form}, the right fee {fee}.",
        "That was wrong. A fee of {fee} and form {form} were needed.",
        "No permit. This has to be form {form}, and the fee is {fee}.",
    )

    def draw_rule(self, dice: Random) -> Rule:
        letters, numbers = matched(KINDS, LETTERS, dice), matched(KINDS, NUMBERS, dice)
        forms = {kind: f"{letters[kind]}-{numbers[kind]}" for kind in KINDS}
        return crossed(forms, matched(DISTRICTS, FEES, dice), dice)

    def solution(self, task: Task) -> list[ToolCall]:
        form, fee = task.answer
        return [ToolCall(name="file_request", arguments={"form": form, "fee": fee})]

    @tool
    def file_request(self, form: str, fee: int) -> str:
        """File the request. There is one try only.

        form: the code of the form, a letter and a number, such as B-17
        fee: the fee in euros, a whole number
        """
        return self.attempt(form.strip().upper(), fee)
