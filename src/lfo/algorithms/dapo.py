"""DAPO: the policy learns from the rewards of its own rollouts, and from nothing else. All algorithms begin with it."""

from __future__ import annotations

from lfo.config import RunConfig
from lfo.objectives.schedule import rate_of
from lfo.types import Seat, StepPlan


def plan(config: RunConfig, step: int) -> StepPlan:
    """Return the plan of plain DAPO; a frozen policy plays and does not learn."""
    optimizer = config.optimizer
    until = config.internalise.until  # a second phase begins its schedule of rates again
    rate = rate_of(step, warmup=optimizer.warmup_steps, total=config.steps, until=until, constant=optimizer.constant)
    seats = (Seat(blind=True),) * config.rollout.group_size
    return StepPlan(step=step, seats=seats, draws=config.policy.draws, reinforces=not config.policy.frozen, rate=rate)
