"""Deliberately wrong kernels, each with one fault that one tool of compute-sanitizer must notice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from cute_nvfp4.ptx import mbarrier
from cute_nvfp4.ptx.async_copy import copy_bulk
from cute_nvfp4.ptx.memory import load_shared
from cute_nvfp4.runtime.backend import resolve
from cute_nvfp4.runtime.kernel import Kernel
from cute_nvfp4.runtime.signature import INT32, Pointer, Scalar
from cute_nvfp4.target import Architecture

THREADS = 128


class BrokenArguments(NamedTuple):
    """out: (n,) fp32."""

    out: Pointer = Pointer("Float32", 4)
    n: Scalar = INT32


@dataclass(frozen=True)
class BrokenConfig:
    """fault: the tool that notices it, "memcheck", "racecheck" or "synccheck"; or "ring", which racecheck notices."""

    fault: str
    arch: Architecture


class Broken:
    """Computes out[i] = i + 1 in one CTA, with the fault of its configuration."""

    def __init__(self, config: BrokenConfig) -> None:
        self.fault = config.fault
        self.beyond = int(config.fault == "memcheck")

    @cute.jit
    def __call__(self, arguments: BrokenArguments, stream: CUstream):
        self.kernel(arguments).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, arguments: BrokenArguments):
        thread, _, _ = cute.arch.thread_idx()
        out = cute.make_tensor(arguments.out, cute.make_layout(arguments.n))  # (N)
        shared = cute.make_tensor(cute.arch.alloc_smem(Float32, THREADS), cute.make_layout(THREADS))  # (THREADS)
        shared[thread] = Float32(thread)
        if cutlass.const_expr(self.fault == "synccheck"):
            # the mask lacks the upper lanes
            cute.arch.sync_warp(mask=0xFFFF)
        if cutlass.const_expr(self.fault != "racecheck"):
            cute.arch.sync_threads()
        value = shared[(thread + 1) % THREADS]
        if thread < arguments.n:
            out[thread + self.beyond] = value


class RingArguments(NamedTuple):
    """data: (rounds, 512) bytes; out: (32,) sums of a lane's words."""

    data: Pointer = Pointer("Uint8", 16)
    out: Pointer = Pointer("Uint32", 4)
    rounds: Scalar = INT32


class Ring:
    """One warp fills a stage by a bulk copy, another releases the stage before it has read it; one CTA."""

    stage_bytes = 512

    def __init__(self, config: BrokenConfig) -> None:
        del config

    @cute.jit
    def __call__(self, arguments: RingArguments, stream: CUstream):
        self.kernel(arguments).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, arguments: RingArguments):
        thread, _, _ = cute.arch.thread_idx()
        smem, lane = SmemAllocator(), thread % 32
        stage = smem.allocate_array(cutlass.Uint8, self.stage_bytes, byte_alignment=128).toint()
        full = smem.allocate_array(Int64, 2).toint()
        empty, parity, total = full + 8, Int32(0), Uint32(0)
        if thread == 0:
            mbarrier.initialise(full, 1)
            mbarrier.initialise(empty, 32)
            mbarrier.fence_initialised()
        cute.arch.sync_threads()
        for i in cutlass.range(arguments.rounds, unroll=1):
            if thread < 32:
                mbarrier.wait_to_overwrite(empty, parity ^ 1)
                with cute.arch.elect_one():
                    mbarrier.expect_bytes(full, Int32(self.stage_bytes))
                    address = arguments.data.toint() + Int64(i) * self.stage_bytes
                    copy_bulk(stage, address, Int32(self.stage_bytes), full)
            else:
                mbarrier.wait(full, parity)
                mbarrier.arrive(empty)  # the fault: too early
                for word in load_shared(stage + lane * 16, 16):
                    total = total + word
            parity = parity ^ 1
        if thread >= 32:
            cute.make_tensor(arguments.out, cute.make_layout(32))[lane] = total


KERNEL = Kernel("broken", BrokenArguments, Broken)
RING = Kernel("broken_ring", RingArguments, Ring)


def run(fault: str, device: str) -> None:
    """Launches the kernel with this fault, on its own tensor."""
    target = resolve("auto", device)
    out = torch.empty(THREADS, dtype=torch.float32, device=device)
    config = BrokenConfig(fault, target.arch)
    if fault == "ring":
        data = torch.ones(4, Ring.stage_bytes, dtype=torch.uint8, device=device)
        given = RingArguments(data.data_ptr(), out.data_ptr(), len(data))
        RING.run(config, target, out.device, given, lambda: {"data": (data, False), "out": (out, True)})
        return
    arguments = BrokenArguments(out.data_ptr(), out.numel())
    KERNEL.run(config, target, out.device, arguments, lambda: {"out": (out, True)})
