"""When the last SM of a launch ends, of which a few are replayed: SMs that do the same do not end together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def last(ends: Sequence[Sequence[float]], stands_for: Sequence[float]) -> float:
    """Cycles until the last SM ends. ``ends`` has for each replayed place when it ended, in replays with other
    latencies from the same distribution; ``stands_for`` how many places it stands for.

    The ends of a place are taken as normally distributed around its mean, with one deviation for all places, and the
    last of n as the largest of n that is to be expected (Blom 1958). One replay tells no deviation."""
    means = [statistics.fmean(some) for some in ends]
    freedom = sum(len(some) - 1 for some in ends)
    squares = sum((end - mean) ** 2 for mean, some in zip(means, ends) for end in some)
    deviation = math.sqrt(squares / freedom) if freedom else 0.0
    return max(mean + deviation * largest(count) for mean, count in zip(means, stands_for))


def largest(count: float) -> float:
    """The largest that is to be expected of ``count`` standard normal values."""
    n = max(1.0, count)
    return statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
