"""Does a world model that predicts well come before a policy that gains?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

GAIN_STEPS = 50  # how much later the policy's gain is looked at
VAL = "eval/val/success"
LOOKAHEAD = "eval/val/lookahead_accuracy"
# What tells how good the world model was at an evaluation, the best witness first.
ACCURACY_KEYS = ("world_model_eval/semantic_accuracy", LOOKAHEAD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Correlation:
    """World-model accuracy at a step against what the policy did in the `steps` after it, over `n` pairs."""

    accuracy: str  # the metric that was taken
    steps: int
    n: int
    with_gain: float | None  # in success on val
    with_success: float | None  # on val, `steps` later


def correlation(runs: Sequence[Sequence[Mapping[str, Any]]]) -> Correlation | None:
    """Does a world model that predicts well come before a policy that gains? Pearson, over all evaluations of all runs.

    The gain is looked at 50 steps later, or in shorter runs half a run later. Evaluations of one run are not
    independent, so there is a number of points and no significance. A policy that has reached the ceiling gains
    nothing more however well its world model predicts, which is why the correlation with success itself stands beside.
    """
    key = next((key for key in ACCURACY_KEYS if all(any(key in row for row in rows) for rows in runs)), None)
    if key is None:
        return None
    steps = min(GAIN_STEPS, min(rows[-1]["step"] for rows in runs) // 2)
    pairs = []
    for rows in runs:
        points = [row for row in rows if isinstance(row.get(VAL), int | float)]
        for row in points:
            later = next((other for other in points if other["step"] >= row["step"] + steps), None)
            if later is not None and isinstance(row.get(key), int | float):
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
    """None where it says nothing: fewer than three points, or one side that does not vary."""
    if len(one) < 3 or np.ptp(one) < 1e-12 or np.ptp(other) < 1e-12:
        return None
    return float(np.corrcoef(one, other)[0, 1])
