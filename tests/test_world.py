"""Companies and rules: pure functions of their seeds, with a law that no single field reveals."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from lfo.env.seeds import stream
from lfo.env.worlds.phone.fields import ALTERNATIVE, FIELDS, PLAIN_FIELDS
from lfo.env.worlds.phone.rules import DEVIATION, IDENTIFIERS, PROOFS, Requirement, deviation_pool, law
from lfo.env.worlds.phone.world import HELD_OUT_RULES, INDUSTRIES, KINDS, SERVICES, UNSEEN, Company, company

WORLD = [company(0, index) for index in (*range(100), *range(UNSEEN, UNSEEN + 50))]


def deviates(where: Company, kind: str) -> bool:
    return where.department(kind).rules[0] != law(where.industry, kind, sensitive=False)


def test_a_stream_is_its_name() -> None:
    assert [stream(7, "a").random() for _ in range(2)] == [stream(7, "a").random()] * 2
    assert stream(7, "a", 1).random() != stream(7, "a1").random()


def test_the_size_of_the_world() -> None:
    assert len(INDUSTRIES) >= 6
    assert len(FIELDS) >= 20
    assert {len(each.departments) for each in WORLD} == {4, 5, 6, 7}
    assert {each.industry for each in WORLD} == set(INDUSTRIES)


def test_the_law_by_hand() -> None:
    assert law("bank", "billing", sensitive=False).fields == ("account_number", "billing_zip")
    assert law("bank", "security", sensitive=True).fields == ("card_number", "security_answer", "maiden_name")
    assert law("airline", "records", sensitive=True) == Requirement(
        identifier="booking_code", proof="tax_number", extra="passport_number"
    )


def test_names_and_numbers_are_unique() -> None:
    names = [company(0, index).name.split()[0] for index in (*range(5_000), *range(UNSEEN, UNSEEN + 2_500))]
    assert len(set(names)) == len(names)
    for each in WORLD:
        numbers = [department.number for department in each.departments]
        assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("seed", range(5))
def test_no_field_is_required_by_more_than_a_third_of_the_departments(seed: int) -> None:
    companies = [company(seed, index) for index in range(100)]
    rules = [department.rules[1] for each in companies for department in each.departments]  # the longest of each
    count = Counter(name for rule in rules for name in rule.fields)
    assert len(count) >= 20
    assert max(count.values()) <= len(rules) / 3


@pytest.mark.parametrize("seed", range(5))
def test_the_realised_rate_of_deviations_is_the_laws(seed: int) -> None:
    companies = [company(seed, index) for index in range(200)]
    flags = [deviates(each, department.kind) for each in companies for department in each.departments]
    assert sum(flags) / len(flags) == pytest.approx(DEVIATION, abs=0.015)


def test_a_deviation_changes_one_part_to_a_field_of_the_pool() -> None:
    found = 0
    for each in WORLD:
        for department in each.departments:
            for rule, sensitive in zip(department.rules, (False, True), strict=True):
                lawful = law(each.industry, department.kind, sensitive=sensitive)
                changed = set(rule.fields) - set(lawful.fields)
                assert len(changed) <= 1
                assert changed <= set(deviation_pool(each.industry, department.kind))
                assert len(rule.fields) == len(set(rule.fields)) == len(lawful.fields)
                found += bool(changed)
    assert found > 20


def test_departments_of_one_company_deviate_independently() -> None:
    pairs = [
        (deviates(each, a.kind), deviates(each, b.kind))
        for each in (company(1, index) for index in range(600))
        for a in each.departments
        for b in each.departments
        if a.kind < b.kind
    ]
    assert sum(a and b for a, b in pairs) / len(pairs) == pytest.approx(DEVIATION**2, abs=0.005)


def test_plain_fields_have_no_alternative_and_are_none() -> None:
    assert not set(PLAIN_FIELDS) & (set(ALTERNATIVE) | set(ALTERNATIVE.values()))
    assert set(ALTERNATIVE.values()) <= set(FIELDS)


def test_the_directory_shows_nothing_hidden() -> None:
    for each in WORLD:
        shown = each.directory()
        assert shown.splitlines()[0] == f"{each.name}, {each.industry}"
        for department in each.departments:
            assert f"{department.name} {department.number}: " in shown
        assert not any(name in shown or name.replace("_", " ") in shown for name in FIELDS)


def test_every_kind_is_known_and_each_industry_keeps_one_rule_back() -> None:
    assert set(PROOFS) == set(SERVICES)
    assert {industry for industry, _ in HELD_OUT_RULES} == set(IDENTIFIERS)
    for each in WORLD:
        assert {department.kind for department in each.departments} <= set(KINDS[each.industry])


def test_a_company_does_not_depend_on_the_hash_seed() -> None:
    code = "from lfo.env.worlds.phone.world import company; print([company(3, i) for i in (0, 57, 1_000_003)])"
    shown = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "12345")
    }
    assert len(shown) == 1
