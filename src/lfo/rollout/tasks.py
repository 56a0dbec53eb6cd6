"""Draw the tasks of a step and make the requests of their rollouts. Pure functions of config and step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from lfo.config import RunConfig
from lfo.env.interface import Environment, tasks_of
from lfo.rollout.row import RolloutRequest
from lfo.types import StepPlan


def draw_tasks(config: RunConfig, environment: Environment, step: int, draw: int) -> Sequence[Any]:
    """Return the tasks of one draw of a step. Environments with an endless stream never repeat a task."""
    count = config.rollout.prompts
    first = (step * config.policy.draws + draw) * count
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


def draw_requests(config: RunConfig, environment: Environment, plan: StepPlan, draw: int) -> list[RolloutRequest]:
    """Return the requests of one draw: those of one task next to each other, in the order of the seats."""
    return [
        RolloutRequest(task=task, seeds=(config.seed, plan.step, draw, index, member), **dataclasses.asdict(seat))
        for index, task in enumerate(draw_tasks(config, environment, plan.step, draw))
        for member, seat in enumerate(plan.seats)
    ]
