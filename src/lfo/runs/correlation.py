"""The correlation of world-model accuracy with the later gain of the policy."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

GAIN_STEPS = 50  # the gain of the policy is measured this many steps later
VAL = "eval/val/success"
LOOKAHEAD = "eval/val/lookahead_accuracy"
# Metrics of world-model accuracy at an evaluation, the best first.
ACCURACY_KEYS = ("world_model_eval/semantic_accuracy", LOOKAHEAD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Correlation:
    """World-model accuracy at a step against what the policy did in the `steps` after it, over `n` pairs."""

    accuracy: str  # the metric
    steps: int
    n: int
    with_gain: float | None  # in success on val
    with_success: float | None  # on val, `steps` later


def correlation(runs: Sequence[Sequence[Mapping[str, Any]]]) -> Correlation | None:
    """Return the Pearson correlation of world-model accuracy with the later gain of the policy, over all evaluations.

    The gain is measured 50 steps later, or half a run later in shorter runs. Evaluations of one run are not
    independent, so the result has a number of points but no significance. A policy at the ceiling gains nothing,
    however well its world model predicts; therefore the correlation with success is returned too.
    """
    key = next((key for key in ACCURACY_KEYS if all(any(key in row for row in rows) for rows in runs)), None)
    if key is None:
        return None
    steps = min(GAIN_STEPS, min(rows[-1]["step"] for rows in runs) // 2)
    pairs = []
    for rows in runs:
        points = [row for row in rows if isinstance(row.get(VAL), int | float)]
        reached = list(accumulate((row["step"] for row in points), max))  # the furthest step up to each
        for row in points:
            index = bisect_left(reached, row["step"] + steps)
            if index < len(points) and isinstance(row.get(key), int | float):
                later = points[index]
                pairs.append((row[key], later[VAL] - row[VAL], later[VAL]))
    columns = list(zip(*pairs, strict=True)) or [(), (), ()]
    return Correlation(
        accuracy=key,
        steps=steps,
        n=len(pairs),
        with_gain=pearson(columns[0], columns[1]),
        with_success=pearson(columns[0], columns[2]),
    )


def pearson(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the correlation, or None with fewer than three points or a constant side."""
    if len(one) < 3 or np.ptp(one) < 1e-12 or np.ptp(other) < 1e-12:
        return None
    return float(np.corrcoef(one, other)[0, 1])
