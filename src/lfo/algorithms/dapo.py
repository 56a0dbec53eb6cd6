"""DAPO: the policy learns from the rewards of its own rollouts, and from nothing else. All algorithms begin with it."""

from __future__ import annotations

import math
from dataclasses import replace

from lfo.config import RunConfig
from lfo.types import Seat, Situation, StepPlan

RATE_FLOOR = 0.1  # the cosine ends at this share of the learning rate


def adapt(plan: StepPlan, config: RunConfig, situation: Situation) -> StepPlan:
    """Return the plan of plain DAPO; a frozen policy plays and does not learn."""
    return replace(
        plan,
        seats=(Seat(look_ahead=False),) * config.rollout.group_size,
        draws=most_draws(config),
        reinforces=not config.policy.frozen,
        rate=rate_in(config, plan.step),
    )


def most_draws(config: RunConfig) -> int:
    """Return the largest number of draws in one step."""
    return max(1, config.policy.max_resamples + 1)


def rate_in(config: RunConfig, step: int, *, until: int = 0) -> float:
    """Return the factor of every learning rate in a step of a run; its schedule starts again at `until`."""
    optimizer = config.optimizer
    return rate_of(step, warmup=optimizer.warmup_steps, total=config.steps, until=until, constant=optimizer.constant)


def rate_of(step: int, *, warmup: int, total: int, until: int = 0, constant: bool = False) -> float:
    """Return the factor of every learning rate in a step. The schedule starts again at `until`. With `constant` the
    rate does not decay.

    >>> [round(rate_of(step, warmup=1, total=6, until=3), 2) for step in range(6)]
    [1.0, 1.0, 0.55, 1.0, 1.0, 0.55]
    """
    if 0 < until <= step:
        step, total = step - until, total - until
    elif until:
        total = until
    return learning_rate(step, base=1.0, warmup=warmup, total=total, floor=1.0 if constant else RATE_FLOOR)


def learning_rate(step: int, *, base: float, warmup: int = 10, total: int, floor: float = 0.0) -> float:
    """Return the learning rate: linear warm-up over `warmup` steps, then a cosine to `floor * base` at step `total`.

    The first step already has the rate base / warmup; after `total` the rate stays at its floor.
    """
    if step < warmup:
        return base * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return base * (floor + (1.0 - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0)
