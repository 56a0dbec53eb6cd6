"""What changes with the step number: which losses are active, the learning rate, the world-model weight.

Steps count from 0. Everything is a function of its arguments, so a resumed run continues exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

RATE_FLOOR = 0.1  # the cosine ends at this share of the learning rate


class ActiveLosses(NamedTuple):
    """The losses that a step trains."""

    policy: bool
    world_model: bool


def active_losses(schedule: str, step: int) -> ActiveLosses:
    """Which losses step `step` trains.

    step                  0    1    2    3
    joint                 pw   pw   pw   pw
    alternating           w    p    w    p      the world model leads: it can learn from any reply
    world_model_first:2   w    w    pw   pw
    hierarchical:3        pw   p    p    pw
    """
    name, _, number = schedule.partition(":")
    match name:
        case "joint":
            return ActiveLosses(policy=True, world_model=True)
        case "alternating":
            return ActiveLosses(policy=step % 2 == 1, world_model=step % 2 == 0)
        case "world_model_first":
            return ActiveLosses(policy=step >= int(number), world_model=True)
        case "hierarchical":
            return ActiveLosses(policy=True, world_model=step % int(number) == 0)
        case _:
            raise ValueError(f"unknown schedule: {schedule!r}")


Phase = Literal["ask", "internalise", "reinforce"]


def phase_of(step: int, *, begun: bool, until: int) -> Phase:
    """What a step is for.

    ask           the world model learns, and the policy, where it acts itself, learns by DAPO what to ask
    internalise   from `begun` on: the policy imitates successes, the world model goes on
    reinforce     from step `until` on, 0 = never: DAPO alone, without look-ahead and world model
    """
    if 0 < until <= step:
        return "reinforce"
    return "internalise" if begun else "ask"


def rate_of(step: int, *, warmup: int, total: int, until: int, constant: bool = False) -> float:
    """The share of every learning rate in a step; what follows `until` warms up and falls anew. With `constant` no
    rate falls.

    >>> [round(rate_of(step, warmup=1, total=6, until=3), 2) for step in range(6)]
    [1.0, 1.0, 0.55, 1.0, 1.0, 0.55]
    """
    if 0 < until <= step:
        step, total = step - until, total - until
    elif until:
        total = until
    return learning_rate(step, base=1.0, warmup=warmup, total=total, floor=1.0 if constant else RATE_FLOOR)


def learning_rate(step: int, *, base: float, warmup: int = 10, total: int, floor: float = 0.0) -> float:
    """Linear warm-up over `warmup` steps, then a cosine from `base` down to `floor * base` at step `total`.

    The first step already learns (base / warmup), and beyond `total` the rate stays at its floor.
    """
    if step < warmup:
        return base * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return base * (floor + (1.0 - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0)


def control_weight(weight: float, accuracy: float, success: float, baseline_success: float) -> float:
    """The rule-based controller of the world-model weight; all rates are fractions between 0 and 1.

    A world model that is still poor gets full weight; one that is good while the policy is worse than the
    baseline gets less; else the weight stays. An accuracy that nobody measured (NaN) changes nothing.
    """
    if accuracy < 0.3:
        return 1.0
    if accuracy > 0.8 and success < baseline_success:
        return 0.3
    return weight


def adapted_weight(weight: float, row: Mapping[str, Any], *, best: float | None) -> float:
    """The weight after the evaluation in this row of metrics; a weight of 0 stays 0."""
    # Of the held-out calls where they were asked: in this very step the world model may not have trained.
    accuracy = row.get("world_model_eval/token_accuracy", row.get("world_model_accuracy", float("nan")))
    success = row.get("eval/val/success", 0.0)
    return control_weight(weight, accuracy, success, success if best is None else best) if weight else weight
