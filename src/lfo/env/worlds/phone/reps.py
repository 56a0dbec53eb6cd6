"""The replies of reps: a seeded grammar with many phrasings (`assets/phrasings.json`), and its inverse.

`describe` returns the meaning of a reply (category, facts) from its text; no loss or reward uses it. Three phrasings of
each category are held out from training, for `test_unseen_phrasing`.
"""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache
from importlib.resources import files

from lfo.env.worlds.phone.fields import ALTERNATIVE, FIELDS, REFERENCE, label_of
from lfo.types import ReplyFacts

CATEGORIES = ("auth_failure", "success", "routing_violation", "lockout", "refusal", "unclear")
HELD_OUT_PHRASINGS = 3  # the last ones of each category

# Category -> templates; a template has at most one slot.
PHRASINGS: dict[str, list[str]] = json.loads(files("lfo").joinpath("assets/phrasings.json").read_text(encoding="utf-8"))
REFERENCE_SENTENCE = " Your reference number is {reference}."
_SLOT = re.compile(r"\{(\w+)\}")


def phrasings(category: str, *, held_out: bool) -> list[str]:
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
