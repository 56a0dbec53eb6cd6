"""Dual-LoRA: a world model learns to predict replies, and look-ahead shows its predictions to the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from lfo.config import RunConfig
from lfo.types import MOST_IMAGINED, Seat, Situation, StepPlan


def adapt(plan: StepPlan, config: RunConfig, situation: Situation) -> StepPlan:
    """Return the plan with a world model, and with look-ahead if the run has it."""
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

    A policy without look-ahead that fails after its first call only ever gets the reply to the first call that others
    imagine. So explorers differ: they imagine 0, 1, ... calls and make the next one for real.
    """
    size = config.rollout.group_size
    explorers, in_turns = round(size * config.exploration.blind_share), True
    if step < exploring_steps(config.world_model.schedule):  # none looks ahead; explorers that imagine would
        explorers, in_turns = size, False
    # Advantages need peers with the same condition, so there are at least two of each kind.
    kinds = max(1, min(MOST_IMAGINED, explorers // 2)) if in_turns else 1
    return tuple(_explorer(config, member % kinds) if member < explorers else Seat() for member in range(size))


def _explorer(config: RunConfig, imagined: int) -> Seat:
    picks = imagined == 0 and config.imagine.drafts > 1
    return Seat(look_ahead=imagined > 0, imagine=imagined or None, picks=picks)


# --- schedules -----------------------------------------------------------------------------------------------------


class ActiveLosses(NamedTuple):
    """The losses that a step trains."""

    policy: bool
    world_model: bool


def active_losses(schedule: str, step: int) -> ActiveLosses:
    """Return the losses that step `step` trains.

    step                  0    1    2    3
    joint                 pw   pw   pw   pw     so do adaptive (the weight changes) and explore_first (rollouts do)
    alternating           w    p    w    p      the world model first: it can learn from any reply
    world_model_first:2   w    w    pw   pw
    hierarchical:3        pw   p    p    pw
    """
    name, _, number = schedule.partition(":")
    match name:
        case "joint" | "adaptive" | "explore_first":
            return ActiveLosses(policy=True, world_model=True)
        case "alternating":
            return ActiveLosses(policy=step % 2 == 1, world_model=step % 2 == 0)
        case "world_model_first":
            return ActiveLosses(policy=step >= int(number), world_model=True)
        case "hierarchical":
            return ActiveLosses(policy=True, world_model=step % int(number) == 0)
        case _:
            raise ValueError(f"unknown schedule: {schedule!r}")


def exploring_steps(schedule: str) -> int:
    """Return the number of first steps in which every rollout explores: N of `explore_first:N`."""
    name, _, number = schedule.partition(":")
    return int(number) if name == "explore_first" else 0


def control_weight(weight: float, accuracy: float, success: float, baseline_success: float) -> float:
    """Return the next world-model weight by the rule-based controller; all rates are between 0 and 1.

    The weight is 1 if the world model is poor, and 0.3 if it is good while the policy is worse than the baseline;
    otherwise it stays. An accuracy that was not measured (NaN) changes nothing.
    """
    if accuracy < 0.3:
        return 1.0
    if accuracy > 0.8 and success < baseline_success:
        return 0.3
    return weight


def adapted_weight(weight: float, row: Mapping[str, Any], *, success: float, best: float | None) -> float:
    """Return the weight after the evaluation in this row of metrics, given its success and the best one so far. A
    weight of 0 stays 0."""
    # Prefer the accuracy on held-out calls: in this step the world model may not have been trained.
    accuracy = row.get("world_model_eval/token_accuracy", row.get("world_model_accuracy", float("nan")))
    return control_weight(weight, accuracy, success, success if best is None else best) if weight else weight
