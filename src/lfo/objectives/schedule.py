"""Schedules by step: active losses, learning rate, world-model weight.

Steps start at 0. All functions are pure, so a resumed run continues exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

RATE_FLOOR = 0.1  # the cosine ends at this share of the learning rate


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


def rate_of(step: int, *, warmup: int, total: int, until: int, constant: bool = False) -> float:
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
