"""The smallest kernel worth compiling: y = 2 x + 1. ``cute-nvfp4 doctor`` compiles and simulates it."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass.cute.runtime import make_ptr

from ..runtime.compile import CompiledKernel, build

_THREADS = 128


@cute.kernel
def _kernel(x: cute.Pointer, y: cute.Pointer, n: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * _THREADS + thread
    source = cute.make_tensor(x, cute.make_layout(n))  # (N)
    target = cute.make_tensor(y, cute.make_layout(n))  # (N)
    if i < n:
        target[i] = source[i] * 2.0 + 1.0


@cute.jit
def _host(x: cute.Pointer, y: cute.Pointer, n: cutlass.Int32, stream: CUstream):
    grid = (cute.ceil_div(n, _THREADS), 1, 1)
    _kernel(x, y, n).launch(grid=grid, block=(_THREADS, 1, 1), stream=stream)


def expected(x: torch.Tensor) -> torch.Tensor:
    """What the kernel computes from fp32 ``x``."""
    return x * 2.0 + 1.0


@functools.lru_cache(maxsize=8)
def compile_probe(arch: str) -> CompiledKernel:
    """Compiles the kernel for ``arch`` now: neither cache is asked, since compiling is what is being tried."""
    pointer = make_ptr(cutlass.Float32, 0, cute.AddressSpace.gmem, assumed_align=4)
    return build(_host, (pointer, pointer, cutlass.Int32(1), CUstream(0)), name="probe", arch=arch)
