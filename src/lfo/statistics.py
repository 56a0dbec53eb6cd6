"""Intervals of success rates. Standard library only, so that environments can import it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Z = 1.96  # standard deviations of a 95 % interval


def wilson(rate: float, n: float, z: float = Z) -> tuple[float, float]:
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


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> dict[str, Any]:
    """Return how many more of the same tasks the first agent solves than the second, with Agresti and Min's interval.

    Tasks that both or neither solve do not distinguish the agents, so pairing needs far fewer tasks than two separate
    rates. The interval adds half a task to each kind of pair, so that it has a width even if all tasks agree.

    >>> paired_difference([True] * 8 + [False] * 2, [True] * 5 + [False] * 4 + [True])["difference"]
    0.2
    """
    pairs = list(zip(first, second, strict=True))
    only_first = sum(a and not b for a, b in pairs)
    only_second = sum(b and not a for a, b in pairs)
    n, discordant, surplus = len(pairs) + 2, only_first + only_second + 1, only_first - only_second
    margin = Z * math.sqrt(discordant - surplus**2 / n) / n
    return {
        "rate": sum(second) / len(pairs),
        "difference": surplus / len(pairs),
        "interval": [max(-1.0, surplus / n - margin), min(1.0, surplus / n + margin)],
        "only_first": only_first,
        "only_second": only_second,
    }
