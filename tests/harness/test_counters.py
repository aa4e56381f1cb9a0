"""What the simulator counted, summed over the launches of a call; from a real simulated launch."""

from __future__ import annotations

import ctypes

import torch

from cute_nvfp4.harness import counters
from cute_nvfp4.kernels.probe import compile_probe
from cute_nvfp4.runtime import launch
from cute_nvfp4.runtime.simulating import simulating
from cute_nvfp4.target import Target, architecture


def test_counters_of_a_launch():
    types = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]
    run = launch.launcher(compile_probe("sm_100a"), Target(architecture("sm_100a"), "sim"), types)
    assert counters.totals([]) == {}
    x, y = torch.ones(300), torch.zeros(300)
    with simulating() as runs:
        run([x.data_ptr(), y.data_ptr(), 300, None], lambda: {"x": (x, False), "y": (y, True)})
    found = counters.totals(runs)
    assert (found["launches"], found["warps"]) == (1, 12)  # three blocks of four warps
    assert found["instructions"] >= 12 * 8
