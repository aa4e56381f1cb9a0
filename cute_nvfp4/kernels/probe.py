"""The smallest kernel worth compiling: y = 2 x + 1. ``cute-nvfp4 doctor`` compiles and simulates it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cuda.bindings.driver import CUstream

from ..runtime.signature import INT32, Pointer, Scalar
from ..target import Architecture

_THREADS = 128


class ProbeArguments(NamedTuple):
    """x, y: (n,) fp32."""

    x: Pointer = Pointer("Float32", 4)
    y: Pointer = Pointer("Float32", 4)
    n: Scalar = INT32


@dataclass(frozen=True)
class ProbeConfig:
    """The variant of the kernel: only its architecture."""

    arch: Architecture


@cute.kernel
def probe(arguments: ProbeArguments):
    """Computes one element in each thread."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    i = cta * _THREADS + thread
    x = cute.make_tensor(arguments.x, cute.make_layout(arguments.n))  # (N)
    y = cute.make_tensor(arguments.y, cute.make_layout(arguments.n))  # (N)
    if i < arguments.n:
        y[i] = x[i] * 2.0 + 1.0


@cute.jit
def host(arguments: ProbeArguments, stream: CUstream):
    """Launches one thread for each element."""
    grid = (cute.ceil_div(arguments.n, _THREADS), 1, 1)
    probe(arguments).launch(grid=grid, block=(_THREADS, 1, 1), stream=stream)
