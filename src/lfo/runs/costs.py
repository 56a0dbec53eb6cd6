"""The cost of training by the metrics of a run: tasks, rollouts, sampled tokens and seconds.

Rows of metrics contain all four. Rows of older runs contain only tasks: their rollouts are tasks times the group size,
and tokens and seconds are sums over steps. Evaluation does not count as cost of training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

MetricsRows = Sequence[Mapping[str, Any]]
# Cost -> the metric with the total so far.
COSTS = {
    "tasks": "tasks_seen",
    "rollouts": "rollouts_seen",
    "sampled_tokens": "sampled_tokens_seen",
    "seconds": "seconds/seen",
}


_NUMBERS = (int, float)  # a union would be made anew for each of a million values


def number(value: Any) -> float | None:
    """Return a finite number, or None for any other value in a file."""
    if isinstance(value, _NUMBERS) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def training_seconds(rows: MetricsRows) -> list[float]:
    """Return the seconds of training up to each row, without evaluation.

    >>> training_seconds([{"seconds/eval": 9.0}, {"seconds/rollout": 2.0, "seconds/update": 1.0}, {"step": 2}])
    [0.0, 3.0, 3.0]
    """
    phases = map(_seconds, rows)
    return list(accumulate(sum(each.values()) - each.get("seconds/eval", 0.0) for each in phases))


def _seconds(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of one step, by phase."""
    phases = (key for key in row if key.startswith("seconds/") and key != COSTS["seconds"])
    return {key: number(row[key]) or 0.0 for key in phases}


def spent(rows: MetricsRows, *, group_size: int) -> dict[str, dict[int, float]]:
    """Return cost -> tasks seen -> total so far; a cost that the run does not record is left out.

    >>> spent([{"tasks_seen": 0}, {"tasks_seen": 8, "seconds/update": 2.0}], group_size=4)
    {'tasks': {0: 0.0, 8: 8.0}, 'rollouts': {0: 0, 8: 32}, 'seconds': {0: 0.0, 8: 2.0}}
    """
    found: dict[str, dict[int, float]] = {cost: {} for cost in COSTS}
    tokens = accumulate(number(row.get("sampled_tokens")) or 0.0 for row in rows)
    for row, sampled, seconds in zip(rows, tokens, training_seconds(rows), strict=True):
        tasks = row.get("tasks_seen")
        if isinstance(tasks, int):
            derived = {"rollouts": tasks * group_size, "sampled_tokens": sampled, "seconds": seconds}
            for cost, key in COSTS.items():
                own = number(row.get(key))
                found[cost][tasks] = derived[cost] if own is None else own
    return {cost: amounts for cost, amounts in found.items() if any(amounts.values())}
