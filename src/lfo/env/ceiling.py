"""The information ceiling: the best chance of an agent that knows the law but no company's deviation.

Exact, task by task. From level 2 on a failed check is final, so the agent's only choice is the set F of fields in
its one form, at most `max_fields`. Departments deviate independently, each with probability p: one of two parts
is then replaced by a field drawn evenly from a pool. When F holds everything that the law asks for,

    chance = product over departments of  (1 - p) + p * |F and pool| / |pool|

and leaving out a lawful field to guess one more can only lose (1 - p against p / |pool|), so the best F is the
law's form filled up with fields of the pools. On level 1 one failed check is free: the agent calls with nothing,
is told what is missing, and always succeeds. On level 6 the law's identifier is enough, whatever a company deviates in.
"""

from __future__ import annotations

from collections.abc import Iterable

from lfo.env.fields import PLAIN_FIELDS
from lfo.env.rules import DEVIATION, Requirement, deviation_pool, law
from lfo.env.tasks import Task, form_with_alternatives
from lfo.env.world import INDUSTRIES, SERVICES

_SENSITIVE = {service.name: service.sensitive for pair in SERVICES.values() for service in pair}


def lawful_requirements(task: Task) -> list[Requirement]:
    """What the law says that this task's departments want."""
    return [
        law(industry_of(task), errand.kind, sensitive=_SENSITIVE[errand.service], seed=task.law)
        for errand in task.errands
    ]


def industry_of(task: Task) -> str:
    return INDUSTRIES[task.company % len(INDUSTRIES)]


def best_form(task: Task) -> tuple[str, ...]:
    """What an agent that knows the law should ask for: the lawful fields, then guesses at a deviation."""
    form = form_with_alternatives(lawful_requirements(task), alternatives=task.limits.alternatives)
    guesses = [name for name in PLAIN_FIELDS if name not in form]
    # A guess counts in each department whose pool holds it; fields outside the whole law of the task count in all.
    pools = [deviation_pool(industry_of(task), errand.kind, task.law) for errand in task.errands]
    guesses.sort(key=lambda name: -sum(name in pool for pool in pools))
    return (*form, *guesses[: task.limits.max_fields - len(form)])


def ceiling(task: Task) -> float:
    """The best expected reward on one task without knowledge of deviations."""
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
