"""Confidence intervals and bounds over seeds, along the last axis."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95


def t_interval(values: Any) -> tuple[Any, Any, Any]:
    """Return mean and t-interval over the last axis; the interval is NaN without a deviation.

    >>> [round(float(each), 3) for each in t_interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    values = np.asarray(values, dtype=float)
    n = values.shape[-1]
    mean = values.mean(axis=-1)
    if n < 2:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    deviation = values.std(axis=-1, ddof=1)
    # Seeds with equal values agree because evaluations are coarse, not because nothing varies.
    deviation = np.where(deviation > 1e-12, deviation, np.nan)
    half = stdtrit(n - 1, (1 + CONFIDENCE) / 2) * deviation / math.sqrt(n)
    return mean, mean - half, mean + half


def median_bound(values: Any) -> Any:
    """Return a lower bound of the median over the last axis, for any distribution; -inf if n is too small.

    The k-th smallest of n exceeds the median only if fewer than k are below it: a tail of the fair binomial.

    >>> median_bound([3.0, 1.0, 2.0, 5.0, 4.0]), median_bound([3.0, 1.0, 2.0, 5.0])
    (1.0, -inf)
    """
    values = np.sort(np.asarray(values, dtype=float), axis=-1)
    n = values.shape[-1]
    k, tail = 0, 0.0
    while (tail := tail + math.comb(n, k) / 2**n) <= 1 - CONFIDENCE:
        k += 1
    bound = values[..., k - 1] if k else np.full(values.shape[:-1], -np.inf)
    return float(bound) if values.ndim == 1 else bound
