"""Confidence interval of a success rate. Standard library only, so that environments can import it."""

from __future__ import annotations

import math


def wilson(rate: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson interval of a success rate in n independent trials; (0, 1) for no trials.

    >>> tuple(round(bound, 3) for bound in wilson(0.9, 10))
    (0.596, 0.982)
    """
    if not n:
        return 0.0, 1.0
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    margin = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    low, high = max(0.0, centre - margin), min(1.0, centre + margin)
    return min(low, rate), max(high, rate)  # rounding must not exclude a rate of 0 or 1
