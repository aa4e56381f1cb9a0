"""Refuses impossible times, whoever measured them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import CallFailed

# A GEMV cannot read DRAM faster than a copy does; the factor leaves room for the noise of both measurements.
IMPLAUSIBLE_BANDWIDTH = 1.5


def check_samples(samples: Sequence[float], elapsed: float) -> None:
    """Raises CallFailed for times (ns) that are impossible in a request that took ``elapsed`` seconds."""
    if not samples or not all(np.isfinite(sample) and sample > 0 for sample in samples):
        raise CallFailed("the timer was tampered with: times that are not positive numbers")
    if sum(samples) * 1e-9 > elapsed:
        raise CallFailed(f"the timer was tampered with: {sum(samples) * 1e-9:.3g} s reported in {elapsed:.3g} s")


def check_bandwidth(useful_bytes: int, mean_ns: float, copy_bytes_s: float) -> None:
    """Raises CallFailed for a mean time that needs more bandwidth than DRAM has with a cold L2."""
    reached = useful_bytes / (mean_ns * 1e-9)
    if reached > IMPLAUSIBLE_BANDWIDTH * copy_bytes_s:
        raise CallFailed(
            f"implausible time: {reached / 1e12:.2f} TB/s of useful bytes, a copy reaches {copy_bytes_s / 1e12:.2f}"
        )
