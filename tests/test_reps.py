"""Replies of reps can be parsed: every phrasing, with every content of its slots."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfo.env.seeds import stream
from lfo.env.worlds.phone.fields import FIELDS, REFERENCE
from lfo.env.worlds.phone.reps import CATEGORIES, PHRASINGS, REFERENCE_SENTENCE, describe, phrasings, say, spoken_fields
from lfo.env.worlds.phone.world import SERVICES, UNSEEN, company
from lfo.types import ReplyFacts

ALL_FIELDS = (*FIELDS, REFERENCE)
SERVICE_NAMES = [service.name for pair in SERVICES.values() for service in pair]
DEPARTMENT_NAMES = sorted({each.name for index in (*range(100), UNSEEN) for each in company(0, index).departments})


def fill(template: str) -> list[tuple[str, tuple[str, ...]]]:
    """A template with every kind of filling: (text, the facts that must be read out of it)."""
    if "{fields}" in template:
        sets = [(name,) for name in ALL_FIELDS]
        sets += [*itertools.pairwise(ALL_FIELDS), *zip(ALL_FIELDS, ALL_FIELDS[5:], ALL_FIELDS[11:], strict=False)]
        sets += [ALL_FIELDS[:4]]
        return [
            (template.format(fields=spoken_fields(names, alternatives=alternatives)), names)
            for names in sets
            for alternatives in (False, True)
        ]
    if "{number}" in template:
        return [(template.format(number=number), (number,)) for number in ("555-1000", "555-9999")]
    if "{department}" in template:
        return [(template.format(department=name), ()) for name in DEPARTMENT_NAMES]
    if "{service}" in template:
        texts = [template.format(service=name) for name in SERVICE_NAMES]
        return [(text + tail, ()) for text in texts for tail in ("", REFERENCE_SENTENCE.format(reference="R1234"))]
    return [(template, ())]


@pytest.mark.parametrize(("what", "template"), [(what, each) for what, every in PHRASINGS.items() for each in every])
def test_every_phrasing_is_read_back(what: str, template: str) -> None:
    category = "routing_violation" if what == "moved" else what
    for text, facts in fill(template):
        assert describe(text) == ReplyFacts(category=category, facts=facts), text
        assert describe(f"  {text}\n") == describe(text)


def test_there_are_enough_phrasings_and_the_held_out_ones_are_others() -> None:
    assert set(CATEGORIES) <= set(PHRASINGS)
    assert len(CATEGORIES) == 6
    for what, every in PHRASINGS.items():
        train, held_out = phrasings(what, held_out=False), phrasings(what, held_out=True)
        assert len(train) >= 8
        assert len(held_out) >= 1
        assert not set(train) & set(held_out)
        assert set(train) | set(held_out) == set(every)
    every_text = [template for every in PHRASINGS.values() for template in every]
    assert len(set(every_text)) == len(every_text)


def test_fields_are_spoken_as_a_person_would() -> None:
    assert spoken_fields(("account_number",), alternatives=False) == "your account number"
    assert (
        spoken_fields(("account_number", "billing_zip", "tax_number"), alternatives=True)
        == "your account number, your billing zip and your tax number or employer name"
    )


def test_speech_is_a_function_of_its_stream_and_uses_every_phrasing_of_its_kind() -> None:
    for held_out in (False, True):
        said = {say("lockout", stream(n), held_out=held_out) for n in range(300)}
        assert said == set(phrasings("lockout", held_out=held_out))
    assert say("success", stream(3), held_out=False, service="refund status", reference="R1").endswith(
        " Your reference number is R1."
    )


@pytest.mark.parametrize(
    "text",
    ["", "Hello.", "For security purposes, I need your shoe size.", '{"account_number": "1"}', "Thank you", "x" * 5000],
)
def test_what_no_rep_says_means_nothing(text: str) -> None:
    assert describe(text) is None


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_no_text_raises(text: str) -> None:
    describe(text)
    describe(f"For security purposes, I need {text}.")
