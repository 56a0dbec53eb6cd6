"""The largest part of a text that fits into a number of tokens, found with few tokenisations."""

from __future__ import annotations

from collections.abc import Callable


def largest_fit(limit: int, tokens: Callable[[int], int], budget: int) -> int:
    """Return the largest size up to `limit` that needs at most `budget` tokens, up to one token.

    Alternates interpolation, because tokens mostly grow linearly with text, with bisection, because they need not.
    """
    low, high = 0, limit
    used, over = tokens(low), tokens(high)
    if over <= budget:
        return high
    halve = False
    while high - low > 1 and used < budget:
        guess = (low + high) // 2 if halve else low + (high - low) * (budget - used) // (over - used)
        guess = min(max(guess, low + 1), high - 1)
        count = tokens(guess)
        if count <= budget:
            low, used = guess, count
        else:
            high, over = guess, count
        halve = not halve
    return low
