"""What the simulator counted, summed over the launches of a call; from a real simulated launch."""

from __future__ import annotations

import torch

from cute_nvfp4.harness import counters
from cute_nvfp4.ops.probe import probe
from cute_nvfp4.runtime.simulating import simulating


def test_counters_of_a_launch():
    assert counters.totals([]) == {}
    with simulating("sm_100a") as runs:
        probe(torch.ones(300))
    found = counters.totals(runs)
    assert (found["launches"], found["warps"]) == (1, 12)  # three CTAs of four warps
    assert found["instructions"] >= 12 * 8
