"""Which tasks a step draws, and how each of their rollouts is asked for. Functions of the settings and the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lfo.config import RunConfig
from lfo.env.interface import Environment, tasks_of
from lfo.rollout.runner import RolloutRequest


def draw_tasks(config: RunConfig, environment: Environment, step: int, draw: int) -> Sequence[Any]:
    """The tasks of one draw of one step. Environments with an endless stream never repeat a task."""
    count = config.rollout.prompts
    first = (step * (config.policy.max_resamples + 1) + draw) * count
    stream = getattr(environment, "stream", None)
    if stream is not None:
        tasks = stream("train", 1 + config.seed)
        return [tasks.task(number) for number in range(first, first + count)]
    known = tasks_of(environment, "train")
    return [
        known[np.random.default_rng([config.seed, epoch]).permutation(len(known))[place]]
        for epoch, place in (divmod(number, len(known)) for number in range(first, first + count))
    ]


def draw_requests(config: RunConfig, environment: Environment, step: int, draw: int) -> list[RolloutRequest]:
    """The rollouts of one draw: those of one task side by side, the blind ones of each first.

    A blind policy that cannot go on after a failed call only ever hears the first of look-ahead's questions
    answered. So where there are several, the blind rollouts of a task take turns in asking them.
    """
    size = config.rollout.group_size
    blind = size if step < config.exploration.blind_steps else round(size * config.exploration.blind_share)
    return [
        RolloutRequest(
            task=task,
            seeds=(config.seed, step, draw, place, member),
            blind=not config.lookahead or member < blind,
            inquiry=member if config.exploration.inquiries and member < blind else 0,
        )
        for place, task in enumerate(draw_tasks(config, environment, step, draw))
        for member in range(size)
    ]
