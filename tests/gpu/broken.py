"""Kernels that are wrong on purpose, each in one way that one tool of compute-sanitizer must notice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32

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
    """fault: "memcheck", "racecheck" or "synccheck", the tool that notices it."""

    fault: str
    arch: Architecture


class Broken:
    """out[i] = i + 1, one CTA."""

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
            # the upper lanes are not in the mask
            cute.arch.sync_warp(mask=0xFFFF)
        if cutlass.const_expr(self.fault != "racecheck"):
            cute.arch.sync_threads()
        value = shared[(thread + 1) % THREADS]
        if thread < arguments.n:
            out[thread + self.beyond] = value


KERNEL = Kernel("broken", BrokenArguments, Broken)


def run(fault: str, device: str) -> None:
    """Launches the kernel with this fault, on a tensor of its own."""
    target = resolve("auto", device)
    out = torch.empty(THREADS, dtype=torch.float32, device=device)
    arguments = BrokenArguments(out.data_ptr(), out.numel())
    KERNEL.run(BrokenConfig(fault, target.arch), target, out.device, arguments, lambda: {"out": (out, True)})
