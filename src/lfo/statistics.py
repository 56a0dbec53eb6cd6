"""What a share of successes tells about the chance of success. Standard library only, for environments too."""

from __future__ import annotations

import math


def wilson(rate: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """The Wilson interval of a success rate in n independent trials; of no trials, everything is possible.

    >>> tuple(round(bound, 3) for bound in wilson(0.9, 10))
    (0.596, 0.982)
    """
    if not n:
        return 0.0, 1.0
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    margin = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    low, high = max(0.0, centre - margin), min(1.0, centre + margin)
    return min(low, rate), max(high, rate)  # at 0 and 1 rounding must not cut the rate off
