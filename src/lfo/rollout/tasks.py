"""Draw the tasks of a step and make the requests of their rollouts. Pure functions of config and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lfo.config import RunConfig
from lfo.env.interface import Environment, tasks_of
from lfo.objectives.schedule import exploring_steps
from lfo.rollout.row import MOST_IMAGINED, RolloutRequest

BLIND: Mapping[str, Any] = {"blind": True}


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


def draw_requests(config: RunConfig, environment: Environment, step: int, draw: int) -> list[RolloutRequest]:
    """Return the requests of one draw: those of one task next to each other, its explorers first."""
    size = config.rollout.group_size
    explorers, in_turns = round(size * config.exploration.blind_share), True
    if step < exploring_steps(config.world_model.schedule):  # all are blind; explorers that imagine would look ahead
        explorers, in_turns = size, False
    sights = [_sight(config, member, explorers=explorers, in_turns=in_turns) for member in range(size)]
    return [
        RolloutRequest(
            task=task,
            seeds=(config.seed, step, draw, index, member),
            **(BLIND if config.internalise.over(step) else sight),
            by_base=_base_acts(config, step, explores=member < config.first_wave and sight["blind"]),
        )
        for index, task in enumerate(draw_tasks(config, environment, step, draw))
        for member, sight in enumerate(sights)
    ]


def _base_acts(config: RunConfig, step: int, *, explores: bool) -> bool:
    """Whether the base acts instead of the policy.

    A policy that has internalised what to do makes no informative calls, so the world model would receive nothing new.
    The base still makes them, in the same words as the untrained policy. The base also keeps using predicted replies,
    which a policy trained to act without them learns to ignore.
    """
    internalise = config.internalise
    if not internalise.rows or internalise.over(step):
        return False
    return internalise.teacher != "policy" or explores


def _sight(config: RunConfig, member: int, *, explorers: int, in_turns: bool) -> dict[str, Any]:
    """Return how many exchanges one rollout of a group may imagine.

    A blind policy that fails after its first call only ever gets the reply to the first call that others imagine. So
    explorers differ: they imagine 0, 1, ... calls and make the next one for real.
    """
    if not config.looks_ahead or member >= explorers:
        return {"blind": not config.looks_ahead}
    # Advantages need peers with the same condition, so there are at least two of each kind.
    kinds = max(1, min(MOST_IMAGINED, explorers // 2))
    imagined = member % kinds if in_turns else 0
    return {"blind": imagined == 0, "imagine": imagined or None, "picks": imagined == 0 and config.imagine.drafts > 1}
