"""The replies of reps: a seeded grammar with many phrasings, and its inverse.

`describe` returns the meaning of a reply (category, facts) from its text; no loss or reward uses it. Three phrasings of
each category are held out from training, for `test_unseen_phrasing`.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache

from lfo.env.fields import ALTERNATIVE, FIELDS, REFERENCE, label_of
from lfo.types import ReplyFacts

CATEGORIES = ("auth_failure", "success", "routing_violation", "lockout", "refusal", "unclear")
HELD_OUT_PHRASINGS = 3  # the last ones of each category

PHRASINGS: dict[str, tuple[str, ...]] = {
    "auth_failure": (
        "For security purposes, I need {fields}.",
        "Before I can help, please give me {fields}.",
        "I could not verify you. I still need {fields}.",
        "To confirm who you are I would need {fields}.",
        "Sorry, without {fields} I cannot go on.",
        "Our system asks me for {fields}.",
        "What is missing here is {fields}.",
        "I am not allowed to continue without {fields}.",
        "Let me see: I do not have {fields}.",
        "Could you tell me {fields}, please?",
        "The check failed; next time have {fields} ready.",
        "I have to ask you for {fields}.",
        "My screen stays locked until I enter {fields}.",
    ),
    "success": (
        "Thank you, the {service} is done.",
        "All set: {service} completed.",
        "You are verified. I have taken care of the {service}.",
        "Perfect, that is everything. The {service} is arranged.",
        "Good, the {service} has gone through.",
        "That matches. Your {service} is on its way.",
        "Thanks for waiting, I finished the {service}.",
        "Great, I have just processed the {service}.",
        "Wonderful, consider the {service} settled.",
        "It worked: the {service} is in the system.",
        "Everything fits, and the {service} is complete.",
    ),
    "routing_violation": (
        "This is {department}, we do not handle that here.",
        "You have reached {department}. Another department does this.",
        "Sorry, {department} cannot do this for you.",
        "That is not something {department} takes care of.",
        "I am afraid {department} is the wrong place for it.",
        "You want a different department, this is {department}.",
        "Nobody at {department} can help with that.",
        "At {department} we have no access to such requests.",
        "Wrong desk: here is {department}.",
        "We are {department}; please look for another department.",
        "{department} speaking, this belongs elsewhere.",
    ),
    "moved": (
        "This line has moved, please dial {number}.",
        "We have a new number: {number}.",
        "That desk is now at {number}.",
        "Please call {number} instead.",
        "You will find them at {number}.",
        "The old number is closed, use {number}.",
        "Our direct line is {number}.",
        "For this, ring {number}.",
        "Kindly try {number}, they moved.",
        "The team answers on {number} these days.",
        "Dial {number}, this is the old line.",
    ),
    "lockout": (
        "This file is locked after a failed check.",
        "I cannot talk to you today, the check failed before.",
        "Your access is blocked for now.",
        "There was a failed verification, so the file is closed.",
        "The system has locked this request.",
        "Too many failed checks, I must end the call.",
        "We have stopped this request for security reasons.",
        "Access is frozen after the last attempt.",
        "I see a lock on this file and cannot lift it.",
        "Security closed this case earlier today.",
        "No further attempts are possible on this file.",
    ),
    "refusal": (
        "There is nothing left for us to do here.",
        "We have already finished this for you.",
        "No open request for you on this line.",
        "This number is not in service for you.",
        "I have no request of yours to work on.",
        "Nothing more to do, goodbye.",
        "Your request is closed on our side.",
        "I cannot open a request from this line.",
        "We will not take this any further.",
        "There is no case that I could work on.",
        "I must decline, nothing is pending.",
    ),
    "unclear": (
        "Hm, something does not fit.",
        "Sorry, I did not get that.",
        "That is not quite what we have here.",
        "I cannot say what is wrong, but it does not match.",
        "The computer just says no.",
        "I am not sure what is missing.",
        "It does not let me in, no idea why.",
        "Something is off with your details.",
        "Strange, this will not go through.",
        "I get an error and nothing else.",
        "No luck with that, I am sorry.",
    ),
}
REFERENCE_SENTENCE = " Your reference number is {reference}."
_SLOT = re.compile(r"\{(\w+)\}")


def phrasings(category: str, *, held_out: bool) -> tuple[str, ...]:
    every = PHRASINGS[category]
    return every[-HELD_OUT_PHRASINGS:] if held_out else every[:-HELD_OUT_PHRASINGS]


def spoken_fields(fields: tuple[str, ...], *, alternatives: bool) -> str:
    """`("account_number", "tax_number")` -> "your account number and your tax number or employer name"."""
    said = []
    for name in fields:
        other = ALTERNATIVE.get(name) if alternatives else None
        said.append(f"your {label_of(name)}" + (f" or {label_of(other)}" if other else ""))
    return said[0] if len(said) == 1 else ", ".join(said[:-1]) + " and " + said[-1]


def say(category: str, rng: random.Random, *, held_out: bool, reference: str = "", **slots: str) -> str:
    """Return one reply of a category with filled slots ("moved" is a routing violation that names a number)."""
    text = rng.choice(phrasings(category, held_out=held_out)).format(**slots)
    return text + REFERENCE_SENTENCE.format(reference=reference) if reference else text


_NAME_OF_LABEL = {label_of(name): name for name in (*FIELDS, REFERENCE)}


def _read_fields(text: str) -> tuple[str, ...] | None:
    names = []
    for part in re.split(r", | and ", text):
        name = _NAME_OF_LABEL.get(part.removeprefix("your ").split(" or ")[0])
        if name is None:
            return None
        names.append(name)
    return tuple(names)


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[str, str, re.Pattern[str]], ...]:
    found = []
    for category, templates in PHRASINGS.items():
        for template in templates:
            slot = _SLOT.search(template)
            pattern = re.escape(template)
            if slot:
                pattern = pattern.replace(re.escape(slot.group(0)), r"(.{1,200}?)")
            if category == "success":
                pattern += r"(?: Your reference number is (.{1,40}?)\.)?"
            found.append((category, slot.group(1) if slot else "", re.compile(pattern)))
    return tuple(found)


def describe(text: str) -> ReplyFacts | None:
    """Return the meaning of a reply, or None for a text that no rep says.

    Facts: the requested fields of an authentication failure; the new number of a moved line; else nothing.
    """
    text = text.strip()
    for category, slot, pattern in _patterns():
        match = pattern.fullmatch(text)
        if not match:
            continue
        if slot == "fields":
            fields = _read_fields(match.group(1))
            if fields is None:
                continue
            return ReplyFacts(category=category, facts=fields)
        if slot == "number":
            return ReplyFacts(category="routing_violation", facts=(match.group(1),))
        return ReplyFacts(category=category)
    return None
