"""What a step does: one file an algorithm, named like its row in `lfo.config.algorithms`.

    plan_of(config, step, Situation(success_tasks=30)) -> StepPlan

The plan follows from the settings of a run, not from `algo=`, so runs may combine algorithms: feedback with look-ahead,
imitation with either. Each algorithm that a run has part in changes the plan, in the order of their table; DAPO, the
first one, begins it. Pure functions: a resumed run makes the same plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any

import numpy as np

from lfo.algorithms.dapo import most_draws
from lfo.config import RunConfig
from lfo.config.algorithms import ALGORITHMS
from lfo.env.interface import Environment, tasks_of
from lfo.play.episode import RolloutRequest
from lfo.types import Situation, StepPlan

_FILES = {name: import_module(f"lfo.algorithms.{name.replace('-', '_')}") for name in ALGORITHMS}
BEGINNING = Situation()


def plan_of(config: RunConfig, step: int, situation: Situation = BEGINNING) -> StepPlan:
    """Return what a step does; `situation` is that of the run when the step begins."""
    plan = StepPlan(step=step)
    for name, algorithm in ALGORITHMS.items():
        if algorithm.takes_part(config):
            plan = _FILES[name].adapt(plan, config, situation)
    if plan.reinforces or config.policy.frozen:
        return plan
    return replace(plan, draws=min(1, plan.draws), selects=False)  # nobody learns from another draw


def draw_requests(config: RunConfig, environment: Environment, plan: StepPlan, draw: int) -> list[RolloutRequest]:
    """Return the requests of one draw: those of one task next to each other, in the order of the seats."""
    return [
        RolloutRequest(task=task, seeds=(config.seed, plan.step, draw, index, member), **asdict(seat))
        for index, task in enumerate(draw_tasks(config, environment, plan.step, draw))
        for member, seat in enumerate(plan.seats)
    ]


def draw_tasks(config: RunConfig, environment: Environment, step: int, draw: int) -> Sequence[Any]:
    """Return the tasks of one draw of a step. Environments with an endless stream never repeat a task."""
    count = config.rollout.prompts
    first = (step * most_draws(config) + draw) * count
    stream = getattr(environment, "stream", None)
    if stream is not None:
        tasks = stream("train", 1 + config.seed)
        return [tasks.task(number) for number in range(first, first + count)]
    known = tasks_of(environment, "train")
    return [
        known[np.random.default_rng([config.seed, epoch]).permutation(len(known))[index]]
        for epoch, index in (divmod(number, len(known)) for number in range(first, first + count))
    ]


def count_tasks(environment: Environment) -> int | None:
    """Return the number of training tasks; None for an endless stream."""
    return None if hasattr(environment, "stream") else len(tasks_of(environment, "train"))
