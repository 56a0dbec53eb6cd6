"""Which tasks a step draws, and how each of their rollouts is asked for. Functions of the settings and the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lfo.config import RunConfig
from lfo.env.interface import Environment, tasks_of
from lfo.rollout.row import MOST_IMAGINED, RolloutRequest

BLIND: Mapping[str, Any] = {"blind": True}


def draw_tasks(config: RunConfig, environment: Environment, step: int, draw: int) -> Sequence[Any]:
    """The tasks of one draw of one step. Environments with an endless stream never repeat a task."""
    count = config.rollout.prompts
    first = (step * config.policy.draws + draw) * count
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
    """The rollouts of one draw: those of one task side by side, the explorers of each first."""
    size = config.rollout.group_size
    explorers, in_turns = round(size * config.exploration.blind_share), True
    if step < config.exploration.blind_steps:  # all are blind; the policy's own questions would be look-ahead
        explorers, in_turns = size, config.lookahead == "environment"
    sights = [_sight(config, member, explorers=explorers, in_turns=in_turns) for member in range(size)]
    return [
        RolloutRequest(
            task=task,
            seeds=(config.seed, step, draw, place, member),
            **(BLIND if config.internalise.over(step) else sight),
            untrained=_acts_untrained(config, step, explores=member < first_wave(config) and sight["blind"]),
        )
        for place, task in enumerate(draw_tasks(config, environment, step, draw))
        for member, sight in enumerate(sights)
    ]


def first_wave(config: RunConfig) -> int:
    """How many rollouts of a group go first: the explorers; with feedback and nobody to explore, half of them."""
    size = config.rollout.group_size
    return round(size * config.exploration.blind_share) or (size // 2 if config.has_feedback else 0)


def _acts_untrained(config: RunConfig, step: int, *, explores: bool) -> bool:
    """Whether the base acts in place of the policy.

    A policy that knows what to do makes no informative call any more, and the world model would hear nothing new. The
    base still makes it, in the words that the policy began with. It also goes on using what it is shown, which a policy
    that was trained to do without learns to ignore.
    """
    settings = config.internalise
    if not settings.rows or settings.over(step):
        return False
    return settings.teacher != "policy" or explores


def _sight(config: RunConfig, member: int, *, explorers: int, in_turns: bool) -> dict[str, Any]:
    """What one rollout of a group may imagine.

    A blind policy that cannot go on after a failed call only ever hears the reply to the first call that others
    imagine. So explorers take turns: they imagine 0, 1, ... calls and then make the next one for real. Proposed by the
    policy, they say it in its own words; proposed by the environment, the call is made for them.
    """
    if not config.looks_ahead or member >= explorers:
        return {"blind": not config.looks_ahead}
    if config.lookahead == "environment":
        return {"blind": True, "inquiry": member if in_turns else 0}
    # A rollout that alone may imagine so much has no peers, so there are two of each kind at least.
    kinds = max(1, min(MOST_IMAGINED, explorers // 2))
    imagined = member % kinds if in_turns else 0
    return {"blind": imagined == 0, "imagine": imagined or None, "picks": imagined == 0 and config.imagine.drafts > 1}
