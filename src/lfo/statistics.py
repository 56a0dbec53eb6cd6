"""Intervals of success rates. Standard library only, so that environments can import it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
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


BETS = (0.05, 0.1, 0.2, 0.4, 0.8)  # shares of the capital


class Bet:
    """A test that may be looked at after every number: is the mean of numbers within -1..1 above what was named?

    Somebody bets on it at fair odds, part of the capital each time. If the mean is not above, the capital reaches
    1 / p at some time in at most the share p of all cases, however often one looks (Ville's inequality). The capital is
    spread over bets of several sizes, because nobody knows how far the mean is above.

    >>> bet = Bet()
    >>> for _ in range(12):
    ...     bet.add(0.5, above=0.0)
    >>> round(bet.capital)
    14
    """

    def __init__(self) -> None:
        self._logs = [0.0] * len(BETS)

    def add(self, value: float, *, above: float) -> None:
        """Bet that the mean of `value` is above; `above` may depend on what came before."""
        for index, bet in enumerate(BETS):
            self._logs[index] += math.log1p(bet * (value - above) / (1 + above))

    @property
    def capital(self) -> float:
        return sum(math.exp(min(log, 700.0)) for log in self._logs) / len(BETS)


SURE = 20  # a capital that is reached without reason in at most one case of so many
MOST = 256  # differences after which what is still not shown to help is taken not to


@dataclass(slots=True)
class GainTest:
    """Whether differences within -1..1 have a mean above 0, judged as soon as they show that or the contrary.

    `helps` is True if a mean of 0 is refuted, False if one of `worth` is, and None until then.
    """

    helps: bool | None = None
    after: int = 0  # differences until it was decided
    gains: list[float] = field(default_factory=list)
    _gain: Bet = field(default_factory=Bet)
    _no_gain: Bet = field(default_factory=Bet)

    def add(self, gain: float, worth: float) -> None:
        self.gains.append(gain)
        if self.helps is not None:
            return
        self._gain.add(gain, above=0.0)
        self._no_gain.add(-gain, above=-worth)
        shown, refuted = self._gain.capital >= SURE, self._no_gain.capital >= SURE
        if shown or refuted or len(self.gains) >= MOST:
            self.helps, self.after = shown, len(self.gains)

    def pays(self, worth: float, count: int) -> bool:
        """Whether the last `count` differences leave a mean of `worth` possible (one-sided, 1 %)."""
        lately = self.gains[-count:]
        if len(lately) < count:
            return True
        mean = fmean(lately)
        spread = max(fmean((gain - mean) ** 2 for gain in lately), 0.03)
        return mean + 2.33 * math.sqrt(spread / count) >= worth
