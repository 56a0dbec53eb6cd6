"""Fixed tasks -> rollouts -> how often the policy succeeds, and how it behaves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lfo.env.check import wilson as wilson_of_rate
from lfo.types import Rollout


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
    stops: dict[str, int] = defaultdict(int)
    for rollout in rollouts:
        stops[rollout.stop.value] += 1
    metrics["stops"] = dict(sorted(stops.items()))
    return metrics
