"""Launch capture: what the host code does reaches the launch, and its errors reach the caller."""

from __future__ import annotations

import ctypes
import os
import struct

import pytest
import torch
from dsl_kernels import compiled, scale

from cute_nvfp4.sim import HostModule, LaunchError
from cute_nvfp4.sim.host.cubin import register_counts


def arguments(n: int) -> list:
    return [ctypes.c_uint64(0x1000), ctypes.c_uint64(0x2000), ctypes.c_int32(n)]


def test_grid_arithmetic_and_parameters_are_executed() -> None:
    program, host = compiled(scale, (torch.float32, torch.float32), 1, "sm_100a")
    for n in (1, 128, 129, 100000):
        (launch,) = host.call(arguments(n))
        assert (launch.grid, launch.block, launch.cluster) == ((-(-n // 128), 1, 1), (128, 1, 1), (1, 1, 1))
        assert launch.params == (struct.pack("<Q", 0x1000), struct.pack("<Q", 0x2000), struct.pack("<i", n))
        assert launch.kernel in program.kernels and launch.dynamic_smem == 0 and not launch.cooperative


def test_host_functions_keep_no_threads() -> None:
    """MLIR would keep as many as the machine has cores for each, and a test run has thousands of host functions."""
    hosts, before = [], None
    for arch in ("sm_90a", "sm_100a", "sm_103a", "sm_120a"):
        hosts.append(compiled(scale, (torch.float32, torch.float32), 1, arch)[1])
        # the first one may start what the process keeps anyway
        before = before or len(os.listdir("/proc/self/task"))
    assert len(os.listdir("/proc/self/task")) <= before and len(hosts) == 4


def test_parameter_sizes_of_the_cubin_are_those_of_the_ptx() -> None:
    program, host = compiled(scale, (torch.float32, torch.float32), 1, "sm_90a")
    (launch,) = host.call(arguments(5))
    assert [len(p) for p in launch.params] == [p.size for p in program.kernels[launch.kernel].params]
    assert launch.registers == register_counts(launch.cubin)[launch.kernel] > 0


def test_an_empty_grid_raises_out_of_the_callback() -> None:
    _, host = compiled(scale, (torch.float32, torch.float32), 1, "sm_100a")
    with pytest.raises(LaunchError, match="every extent must be at least 1"):
        host.call(arguments(0))
    assert len(host.call(arguments(1))) == 1


def test_a_wrong_entry_is_named() -> None:
    _, host = compiled(scale, (torch.float32, torch.float32), 1, "sm_100a")
    other = HostModule.__new__(HostModule)
    other.__dict__.update(host.__dict__, entry="nowhere")
    with pytest.raises(LaunchError, match="no function 'nowhere'"):
        other.call(arguments(1))
