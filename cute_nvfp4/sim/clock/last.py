"""Estimates when a launch's last SM ends, from the few that are replayed: SMs with equal work do not end together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def last(ends: Sequence[Sequence[float]], stands_for: Sequence[float]) -> float:
    """Returns the cycles until the last SM ends.

    ends: when each replayed place ended, in several replays with latencies drawn from the same distribution.
    stands_for: how many places each replayed one stands for.

    The ends of a place are taken as normally distributed around its mean, with one deviation for all places. The last
    of n is the expected largest of n such values (Blom 1958). A single replay gives no deviation.
    """
    means = [statistics.fmean(some) for some in ends]
    freedom = sum(len(some) - 1 for some in ends)
    squares = sum((end - mean) ** 2 for mean, some in zip(means, ends) for end in some)
    deviation = math.sqrt(squares / freedom) if freedom else 0.0
    return max(mean + deviation * largest(count) for mean, count in zip(means, stands_for))


def largest(count: float) -> float:
    """Returns the expected largest of ``count`` standard normal values."""
    n = max(1.0, count)
    return statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
