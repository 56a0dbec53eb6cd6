"""The information ceiling: the best success probability of an agent that knows the law but no deviations.

It is exact for each task. From level 2 on a failed check is final, so the agent only chooses the set F of at most
`max_fields` fields in its one form. Departments deviate independently, each with probability p: one of two parts is
then replaced by a field drawn uniformly from a pool. If F contains everything that the law asks for,

    chance = product over departments of  (1 - p) + p * |F and pool| / |pool|

Dropping a field of the law for one more guess can only lose (1 - p against p / |pool|), so the best F is the law's form
filled up with fields of the pools. On level 1 one failed check is free: the agent calls with no details, learns what is
missing, and always succeeds. On level 6 the identifier of the law is enough, whatever the deviation.
"""

from __future__ import annotations

from collections.abc import Iterable

from lfo.env.worlds.phone.fields import PLAIN_FIELDS
from lfo.env.worlds.phone.rules import DEVIATION, Requirement, deviation_pool, law
from lfo.env.worlds.phone.tasks import Task, form_with_alternatives
from lfo.env.worlds.phone.world import INDUSTRIES, SERVICES

_SENSITIVE = {service.name: service.sensitive for pair in SERVICES.values() for service in pair}


def lawful_requirements(task: Task) -> list[Requirement]:
    """Return the requirements of this task's departments by the law."""
    return [
        law(industry_of(task), errand.kind, sensitive=_SENSITIVE[errand.service], seed=task.law)
        for errand in task.errands
    ]


def industry_of(task: Task) -> str:
    return INDUSTRIES[task.company % len(INDUSTRIES)]


def best_form(task: Task) -> tuple[str, ...]:
    """Return the best form of an agent that knows the law: the fields of the law, then guesses at deviations."""
    form = form_with_alternatives(lawful_requirements(task), alternatives=task.limits.alternatives)
    guesses = [name for name in PLAIN_FIELDS if name not in form]
    # A guess counts in each department whose pool contains it; fields outside the law of the task count in all.
    pools = [deviation_pool(industry_of(task), errand.kind, task.law) for errand in task.errands]
    guesses.sort(key=lambda name: -sum(name in pool for pool in pools))
    return (*form, *guesses[: task.limits.max_fields - len(form)])


def ceiling(task: Task) -> float:
    """Return the best expected reward on one task without knowledge of deviations."""
    if task.limits.failures_to_lock > 1 or task.limits.lenient:
        return 1.0
    form = set(best_form(task))
    chance = 1.0
    for errand in task.errands:
        pool = deviation_pool(industry_of(task), errand.kind, task.law)
        chance *= (1 - DEVIATION) + DEVIATION * len(form.intersection(pool)) / len(pool)
    return chance


def mean_ceiling(tasks: Iterable[Task]) -> float:
    values = [ceiling(task) for task in tasks]
    return sum(values) / len(values)
