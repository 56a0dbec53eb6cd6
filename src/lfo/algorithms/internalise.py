"""Internalise: the policy imitates successes, with what they were shown cut out, and then acts alone.

ask           the world model learns; the policy, if it acts itself, learns by DAPO what to ask
internalise   once enough tasks have a success: the policy imitates successes, the world model keeps learning
reinforce     from step `internalise.until` on (0: never): DAPO alone, without look-ahead and world model
"""

from __future__ import annotations

from dataclasses import replace

from lfo.algorithms.dapo import rate_in
from lfo.config import RunConfig
from lfo.types import Seat, Situation, StepPlan

FIRST_TASKS = 24  # imitation begins once this many tasks, or half of all, have a success


def adapt(plan: StepPlan, config: RunConfig, situation: Situation) -> StepPlan:
    """Return the plan with imitation, or the last phase, if it has begun."""
    internalise = config.internalise
    plan = replace(plan, phase="ask", rate=rate_in(config, plan.step, until=internalise.until))
    if 0 < internalise.until <= plan.step:
        return _reinforce(plan, config)
    if not internalise.rows:
        return plan
    taught = internalise.teacher != "policy"
    # The policy cannot learn from rollouts of the base. While it imitates it should not: with both losses in one
    # step, success without look-ahead grew half as fast.
    asking = replace(
        plan,
        seats=_seats(plan, config, base_acts=taught),
        reinforces=plan.reinforces and not taught,
    )
    if situation.success_tasks < first_tasks(situation.train_tasks):
        return asking
    return replace(asking, phase="internalise", reinforces=False, imitates=plan.reinforces)


def first_tasks(train_tasks: int | None) -> int:
    """Return how many tasks must have a success before imitation begins."""
    return FIRST_TASKS if train_tasks is None else min(FIRST_TASKS, -(-train_tasks // 2))


def _seats(plan: StepPlan, config: RunConfig, *, base_acts: bool) -> tuple[Seat, ...]:
    """Return the seats with the base in place of the policy: in all of them, or in explorers without look-ahead.

    A policy that has internalised what to do makes no informative calls, so the world model would receive nothing new.
    The base still makes them, in the same words as the untrained policy. The base also keeps using predicted replies,
    which a policy trained to act without them learns to ignore.
    """
    first = config.first_wave
    return tuple(
        replace(seat, player="base") if base_acts or (member < first and not seat.look_ahead) else seat
        for member, seat in enumerate(plan.seats)
    )


def _reinforce(plan: StepPlan, config: RunConfig) -> StepPlan:
    return replace(
        plan,
        seats=(Seat(look_ahead=False),) * len(plan.seats),
        feedback="off",
        reinforces=not config.policy.frozen,  # whatever the schedule says
        predicts=False,
        listens=False,
        looks_ahead=False,
        phase="reinforce",
    )
