"""Compiles a kernel once, and runs it in the simulator on CPU tensors."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cutlass
import torch
from cutlass.cute import AddressSpace
from cutlass.cute.runtime import make_ptr

from cute_nvfp4 import sim
from cute_nvfp4.runtime.compile import CompiledKernel
from cute_nvfp4.sim import GlobalMemory, HostModule, Program, run

from .tile import ELEMENT, OUT, SCALE

ARCH = "sm_100a"
POINTER, INT = ctypes.c_void_p, ctypes.c_int32


def element_pointer() -> Any:
    """A pointer of E2M1 elements, for compiling: 16-byte aligned, as TMA wants it."""
    return make_ptr(ELEMENT, 16, AddressSpace.gmem, assumed_align=16)


def scale_pointer() -> Any:
    return make_ptr(SCALE, 16, AddressSpace.gmem, assumed_align=16)


def out_pointer() -> Any:
    return make_ptr(OUT, 16, AddressSpace.gmem, assumed_align=16)


def word_pointer(dtype: type = cutlass.Int64, align: int = 8) -> Any:
    return make_ptr(dtype, align, AddressSpace.gmem, assumed_align=align)


@functools.lru_cache(maxsize=64)
def prepared(kernel: CompiledKernel) -> tuple[Program, HostModule]:
    """The parsed PTX and the compiled host code."""
    return Program.parse(kernel.ptx), HostModule(kernel.host_ir, kernel.entry)


def simulate(
    kernel: CompiledKernel,
    types: Sequence[type],
    values: Sequence[Any],
    tensors: Mapping[str, tuple[torch.Tensor, bool]],
    **options: Any,
) -> Any:
    """Runs the only launch of ``kernel`` on host arguments; ``tensors``: name to (tensor, may be written)."""
    program, host = prepared(kernel)
    memory = GlobalMemory()
    for name, (tensor, writable) in tensors.items():
        memory.add(tensor, name=name, writable=writable)
    (launch,) = host.call([kind(value) for kind, value in zip(types, values)])
    return run(program, launch, memory, **options)


@contextlib.contextmanager
def library_runs_with(**options: Any) -> Iterator[None]:
    """Within it the library's own simulated launches are run with these options too."""
    original = sim.run
    sim.run = functools.partial(original, **options)
    try:
        yield
    finally:
        sim.run = original
