"""What the simulator counted, launch by launch and summed over a call; from a real simulated launch."""

from __future__ import annotations

import torch

from cute_nvfp4.harness.counters import Launch, summary, totals
from cute_nvfp4.ops.probe import probe
from cute_nvfp4.runtime.session import simulated_gpu


def test_counters_of_a_launch():
    assert totals([]) == {}
    with simulated_gpu("sm_100a", counters=True) as session:
        probe(torch.ones(300, device="cuda"))
    (record,) = session.launches
    launch = Launch.of(record)
    assert (launch.grid, launch.block) == ((3, 1, 1), (128, 1, 1)) and launch.counters == summary(record.result)
    assert Launch.model_validate(launch.model_dump()) == launch
    found = totals([launch, launch])
    assert (found["launches"], found["warps"]) == (2, 24)  # three CTAs of four warps
    assert found["instructions"] >= 24 * 8 and found["load_bytes"] == 2 * 300 * 4
    assert found["distinct_store_bytes"] == 2 * 38 * 32
