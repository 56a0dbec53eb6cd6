"""Dual-LoRA: a world model learns to predict replies, and look-ahead shows its predictions to the policy."""

from __future__ import annotations

from dataclasses import replace

from lfo.config import RunConfig
from lfo.objectives.schedule import active_losses, exploring_steps
from lfo.types import MOST_IMAGINED, Seat, StepPlan


def adapt(plan: StepPlan, config: RunConfig) -> StepPlan:
    """Return the plan with a world model, and with look-ahead if the run has it."""
    if not config.has_world_model:
        return plan
    world = config.world_model
    active = active_losses(world.schedule, plan.step)
    return replace(
        plan,
        seats=_seats(config, plan.step) if config.looks_ahead else plan.seats,
        # A run that learns from logs needs no rollouts: the replay buffer already holds every reply.
        draws=0 if world.from_logs else plan.draws,
        reinforces=plan.reinforces and active.policy,
        predicts=active.world_model and world.predict != "none",
    )


def _seats(config: RunConfig, step: int) -> tuple[Seat, ...]:
    """Return the seats of a group: explorers first, then those with look-ahead.

    A blind policy that fails after its first call only ever gets the reply to the first call that others imagine. So
    explorers differ: they imagine 0, 1, ... calls and make the next one for real.
    """
    size = config.rollout.group_size
    explorers, in_turns = round(size * config.exploration.blind_share), True
    if step < exploring_steps(config.world_model.schedule):  # all are blind; explorers that imagine would look ahead
        explorers, in_turns = size, False
    # Advantages need peers with the same condition, so there are at least two of each kind.
    kinds = max(1, min(MOST_IMAGINED, explorers // 2)) if in_turns else 1
    return tuple(_explorer(config, member % kinds) if member < explorers else Seat() for member in range(size))


def _explorer(config: RunConfig, imagined: int) -> Seat:
    return Seat(blind=imagined == 0, imagine=imagined or None, picks=imagined == 0 and config.imagine.drafts > 1)
