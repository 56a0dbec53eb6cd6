"""Tasks and their ceiling: drawn from visible facts and the law, solvable within their limits."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest

from lfo.env.worlds.phone import tasks as tasks_module
from lfo.env.worlds.phone.ceiling import best_form, ceiling, lawful_requirements, mean_ceiling
from lfo.env.worlds.phone.fields import ALTERNATIVE, FIELDS, PLAIN_FIELDS, REFERENCE
from lfo.env.worlds.phone.players import informed_form
from lfo.env.worlds.phone.rules import DEVIATION, Requirement, deviation_pool
from lfo.env.worlds.phone.tasks import LEVEL, SPLITS, Task, TaskStream
from lfo.env.worlds.phone.world import HELD_OUT_RULES, INDUSTRIES, UNSEEN, company
from lfo.errors import UsageError

DRAWN: dict[str, list[Task]] = {split: TaskStream(split=split).take(400) for split in SPLITS}
ALL = [task for split in SPLITS for task in DRAWN[split]]


def rules(task: Task) -> set[tuple[str, str]]:
    return {(INDUSTRIES[task.company % len(INDUSTRIES)], errand.kind) for errand in task.errands}


def test_the_limits_are_those_of_the_table() -> None:
    table = {
        level: (limits.departments, limits.max_fields, limits.failures_to_lock, limits.calls)
        for level, limits in LEVEL.items()
    }
    assert table == {
        1: ((1, 1), 3, 2, 4),
        2: ((1, 1), 4, 1, 3),
        3: ((2, 2), 6, 1, 4),
        4: ((1, 2), 6, 1, 4),
        5: ((3, 3), 8, 1, 6),
        6: ((1, 1), 4, 1, 3),
    }


@pytest.mark.parametrize("task", ALL[::7], ids=lambda task: task.id)
def test_a_task_can_be_done_within_its_limits(task: Task) -> None:
    limits = task.limits
    low, high = limits.departments
    assert low <= len(task.errands) <= high
    assert len(informed_form(task)) <= limits.max_fields
    assert len(best_form(task)) <= limits.max_fields
    assert len(task.errands) + limits.moved <= limits.calls
    for place, errand in enumerate(task.errands):
        own = [name for name in errand.requires if name != REFERENCE]
        assert len(own) in ((2,) if task.level == 1 else (2, 3))
        assert (REFERENCE in errand.requires) == (limits.chained and place > 0)
        assert f"the {errand.service}" in task.goal
        for name in own:  # itself, or what is accepted in its place
            assert name in task.profile or ALTERNATIVE[name] in task.profile
    wishes = [task.goal.index(f"the {errand.service}") for errand in task.errands]
    assert wishes == sorted(wishes)


def test_profiles_have_most_fields_and_level_4_lacks_one_that_the_law_asks_for() -> None:
    assert all(len(FIELDS) - 6 <= len(task.profile) < len(FIELDS) for task in ALL)
    for task in ALL:
        lawful = {name for requirement in lawful_requirements(task) for name in requirement.fields}
        replaced = [name for name in lawful if name in ALTERNATIVE and name not in task.profile]
        if task.level == 4:
            assert any(ALTERNATIVE[name] in task.profile for name in replaced)


def test_splits_are_disjoint() -> None:
    ids = Counter(task.id for task in ALL)
    assert max(ids.values()) == 1
    trained = set().union(*(rules(task) for split in ("train", "val") for task in DRAWN[split]))
    assert not trained & HELD_OUT_RULES
    assert all(rules(task) & HELD_OUT_RULES for task in DRAWN["test_unseen_rules"])
    assert all((task.company >= UNSEEN) == (task.split == "test_unseen_companies") for task in ALL)
    shown = {split: {(task.goal, tuple(task.profile.values())) for task in DRAWN[split]} for split in SPLITS}
    assert all(not shown[a] & shown[b] for a, b in itertools.combinations(SPLITS, 2))


def test_levels_take_turns_and_any_task_can_be_drawn_alone() -> None:
    supply = TaskStream(levels=(2, 4), stream_seed=9)
    first = supply.take(20)
    assert [task.level for task in first] == [2, 4] * 10
    assert list(itertools.islice(supply, 20)) == first
    assert supply.task(17) == first[17]
    assert TaskStream(levels=(2, 4), stream_seed=8).take(20) != first


@pytest.mark.parametrize("level", LEVEL)
def test_a_small_world_serves_every_level(level: int) -> None:
    assert len(TaskStream(levels=(level,), companies=12, unseen_companies=6).take(50)) == 50


def test_a_world_that_cannot_serve_a_level_says_so() -> None:
    with_alternative = {"security", "records"}  # the only kinds of a bank that can serve level 4; company 0 is a bank
    world = next(
        world
        for world in range(100)
        if not with_alternative & {department.kind for department in company(world, 0).departments}
    )
    with pytest.raises(UsageError, match="No company can serve level 4 of train: 1 companies"):
        TaskStream(world=world, levels=(4,), companies=1).task(0)


@pytest.mark.parametrize("number", range(40))
def test_a_deviation_changes_nothing_that_is_visible(number: int) -> None:
    """The same draw in a world without deviations: same goal, same departments, same limits."""
    task = TaskStream().task(number)
    where = company(0, task.company)
    lawful = dataclasses.replace(
        where,
        departments=tuple(
            dataclasses.replace(
                each,
                rules=tuple(
                    tasks_module.law(where.industry, each.kind, sensitive=service.sensitive)
                    for service in each.services
                ),
            )
            for each in where.departments
        ),
    )
    twin = tasks_module.draw_task(world=0, where=lawful, level=task.level, split="train", number=number, stream_seed=0)
    assert twin is not None
    visible = ("id", "level", "company", "company_name", "goal", "moved_kind", "moved_number")
    assert [getattr(twin, name) for name in visible] == [getattr(task, name) for name in visible]
    assert [(each.kind, each.service) for each in twin.errands] == [(each.kind, each.service) for each in task.errands]


# --- the ceiling -----------------------------------------------------------------------------------------------------


def test_the_ceiling_of_level_1_is_certainty() -> None:
    assert mean_ceiling(task for task in ALL if task.level == 1) == 1.0


def test_the_ceiling_of_one_department_by_hand() -> None:
    task = next(task for task in ALL if task.level == 2 and len(lawful_requirements(task)[0].fields) == 3)
    industry = INDUSTRIES[task.company % len(INDUSTRIES)]
    pool = deviation_pool(industry, task.errands[0].kind)
    form = best_form(task)
    assert len(form) == 4  # three lawful fields and one guess
    assert form[3] in pool
    assert ceiling(task) == pytest.approx(0.9 + 0.1 / len(pool))


def chance(form: set[str], cases: list[tuple[Requirement, tuple[str, ...]]]) -> float:
    """The chance of a form, added up over everything that may happen in each department."""
    total = 1.0
    for requirement, pool in cases:
        # No deviation; or one of two parts is replaced by a field of the pool.
        whole = (1 - DEVIATION) * (set(requirement.fields) <= form)
        for part in ("identifier", "proof"):
            kept = set(requirement.fields) - {getattr(requirement, part)}
            whole += DEVIATION / 2 * (kept <= form) * len(form.intersection(pool)) / len(pool)
        total *= whole
    return total


@pytest.mark.parametrize("level", [2, 3, 4])
def test_no_other_form_is_better(level: int) -> None:
    """By enumeration: exchanging any one or two fields of the best form never raises the chance."""
    for task in [task for task in ALL if task.level == level][:4]:
        industry = INDUSTRIES[task.company % len(INDUSTRIES)]
        pools = [deviation_pool(industry, errand.kind) for errand in task.errands]
        cases = list(zip(lawful_requirements(task), pools, strict=True))
        best = set(best_form(task))
        # An alternative that the user may need is no guess: leave those in, exchange the others.
        fixed = {ALTERNATIVE[name] for name in best if name in ALTERNATIVE and level == 4}
        assert chance(best, cases) == pytest.approx(ceiling(task))
        for count in (1, 2):
            for out in itertools.combinations(sorted(best - fixed), count):
                for into in itertools.combinations(sorted(set(PLAIN_FIELDS) - best)[:12], count):
                    assert chance(best - set(out) | set(into), cases) <= ceiling(task) + 1e-12
