"""Success and reliability over several rollouts of each task, with confidence intervals.

A rollout solves its task if its reward is 1. For a task with n rollouts, of which c solved it:

    success   c / n                         does one try succeed?
    pass^k    C(c, k) / C(n, k)             do k tries all succeed?

Both are unbiased estimates for the task; the value of a split is the mean over its tasks. pass^k measures reliability:
unlike pass@k, which needs one success in k, it falls as k grows.

Intervals are Wilson's, 95 %, with one trial for each task. Rollouts of one task are not independent, so they do not
count as separate trials; if the value of a task is a fraction, the interval is a little too wide, never too narrow.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lfo.measure.success import rollout_metrics
from lfo.statistics import wilson
from lfo.types import RolloutGroup


def pass_hat_k(passed: int, trials: int, k: int) -> float:
    """Return the share of all choices of k trials in which all succeeded.

    >>> pass_hat_k(3, 4, 2)  # 3 of the 6 pairs of trials have two that passed
    0.5
    """
    if not 1 <= k <= trials:
        raise ValueError(f"pass^{k} needs at least {k} trials of each task, not {trials}")
    return math.comb(passed, k) / math.comb(trials, k)


def judge(groups: Sequence[RolloutGroup], levels: Sequence[Any]) -> dict[str, Any]:
    """Return the results of the groups of one split; `levels` are the levels of their tasks, if there are any.

    All groups have the same number n of rollouts; `pass_k` has every k up to n, if n is more than 1.
    """
    counts = [sum(rollout.succeeded for rollout in group.rollouts) for group in groups]
    trials = len(groups[0].rollouts)
    by_level: dict[str, list[float]] = defaultdict(list)
    for level, count in zip(levels, counts, strict=True):
        if level is not None:
            by_level[str(level)].append(count / trials)
    metrics = rollout_metrics([rollout for group in groups for rollout in group.rollouts])
    result: dict[str, Any] = {
        "success": _share([count / trials for count in counts]),
        "by_level": {level: _share(rates) for level, rates in sorted(by_level.items())},
    }
    if trials > 1:
        result["pass_k"] = {
            str(k): _share([pass_hat_k(count, trials, k) for count in counts]) for k in range(1, trials + 1)
        }
    return result | {"behaviour": {name: metrics[name] for name in metrics if not name.startswith("success")}}


def _share(rates: Sequence[float]) -> dict[str, Any]:
    """Return the mean over tasks: `{"rate": 0.9, "interval": [0.83, 0.94], "tasks": 100}`."""
    return {"rate": fmean(rates), "interval": list(wilson(sum(rates) / len(rates), len(rates))), "tasks": len(rates)}
