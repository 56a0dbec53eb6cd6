"""Fixed tasks -> rollouts -> how often the policy succeeds, and how it behaves."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lfo.env.check import wilson as wilson_of_rate
from lfo.types import Rollout

FAR = 0.2  # below the best evaluation, at least: less is seen in runs that are well


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson interval of a count of successes; of no trials, everything is possible.

    >>> tuple(round(bound, 3) for bound in wilson(9, 10))
    (0.596, 0.982)
    """
    return wilson_of_rate(successes / n, n, z) if n else (0.0, 1.0)


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """What a set of rollouts shows; keys that an environment does not report are left out."""
    if not rollouts:
        return {}
    metrics: dict[str, Any] = {
        "success": fmean(rollout.reward for rollout in rollouts),
        "turns": fmean(sum(not turn.predicted for turn in rollout.turns) for rollout in rollouts),
        "tokens": fmean(len(rollout.tokens) for rollout in rollouts),
    }
    by_level: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if "level" in rollout.info:
            by_level[str(rollout.info["level"])].append(rollout.reward)
    if by_level:
        metrics["success_by_level"] = {level: fmean(rewards) for level, rewards in sorted(by_level.items())}
    for key in ("mistakes", "calls", "excess_fields", "form_before_call", "department_order"):
        values = [float(rollout.info[key]) for rollout in rollouts if key in rollout.info]
        if values:
            metrics[key] = fmean(values)
    stops = Counter(rollout.stop.value for rollout in rollouts)
    return {**metrics, "stops": dict(sorted(stops.items()))}


def far_below(best: float, value: float, *, tasks: int) -> bool:
    """Whether an evaluation on so many tasks is worse than the best one by more than chance, three standard errors.

    >>> far_below(0.76, 0.5, tasks=100), far_below(0.76, 0.6, tasks=100), far_below(0.76, 0.5, tasks=20)
    (True, False, False)
    """
    return best - value >= max(FAR, 3 * math.sqrt(2 * 0.25 / tasks))


def evaluated_tasks(row: Mapping[str, Any], *, at_most: int) -> int:
    """On how many tasks of val a row's success stands: a world may have fewer than a run asks for."""
    stops = row.get("eval/val/stops")
    return sum(stops.values()) if isinstance(stops, Mapping) and stops else at_most
