"""Small CuTe DSL kernels that the end-to-end tests compile, and how a compiled one is run in the simulator."""

from __future__ import annotations

import ctypes
import functools
import tempfile

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_ptr

from cute_nvfp4.sim import GlobalMemory, HostModule, Program, run

BLOCK = 128


@cute.kernel
def _scale_kernel(x: cute.Pointer, y: cute.Pointer, n: cutlass.Int32):
    i = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]
    gx, gy = cute.make_tensor(x, cute.make_layout(n)), cute.make_tensor(y, cute.make_layout(n))
    if i < n:
        gy[i] = gx[i] * 2.0 + 1.0


@cute.jit
def scale(x: cute.Pointer, y: cute.Pointer, n: cutlass.Int32):
    _scale_kernel(x, y, n).launch(grid=((n + BLOCK - 1) // BLOCK, 1, 1), block=(BLOCK, 1, 1))


@cute.kernel
def _row_sum_kernel(x: cute.Pointer, y: cute.Pointer, n: cutlass.Int32):
    """One CTA a row: strided loop, warp shuffles, shared memory and a barrier."""
    t, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    gx = cute.make_tensor(x, cute.make_layout((1 << 20, n), stride=(n, 1)))
    gy = cute.make_tensor(y, cute.make_layout(1 << 20))
    parts = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, BLOCK // 32), cute.make_layout(BLOCK // 32))
    total = cutlass.Float32(0.0)
    i = t
    while i < n:
        total += gx[row, i]
        i += BLOCK
    for s in cutlass.range_constexpr(5):
        total += cute.arch.shuffle_sync_bfly(total, 1 << s)
    if t % 32 == 0:
        parts[t // 32] = total
    cute.arch.sync_threads()
    if t == 0:
        whole = cutlass.Float32(0.0)
        for w in cutlass.range_constexpr(BLOCK // 32):
            whole += parts[w]
        gy[row] = whole


@cute.jit
def row_sum(x: cute.Pointer, y: cute.Pointer, n: cutlass.Int32, rows: cutlass.Int32):
    _row_sum_kernel(x, y, n).launch(grid=(rows, 1, 1), block=(BLOCK, 1, 1))


@cute.kernel
def _collatz_kernel(x: cute.Pointer, y: cute.Pointer, n: cutlass.Int32):
    """A data-dependent loop with a branch inside: every lane goes its own way."""
    i = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]
    gx, gy = cute.make_tensor(x, cute.make_layout(n)), cute.make_tensor(y, cute.make_layout(n))
    if i < n:
        v, steps = gx[i], cutlass.Int32(0)
        while v != 1:
            if v % 2 == 0:
                v = v // 2
            else:
                v = 3 * v + 1
            steps += 1
        gy[i] = steps


@cute.jit
def collatz(x: cute.Pointer, y: cute.Pointer, n: cutlass.Int32):
    _collatz_kernel(x, y, n).launch(grid=((n + BLOCK - 1) // BLOCK, 1, 1), block=(BLOCK, 1, 1))


@cute.kernel
def _histogram_kernel(x: cute.Pointer, y: cute.Pointer, n: cutlass.Int32):
    i = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]
    gx, gy = cute.make_tensor(x, cute.make_layout(n)), cute.make_tensor(y, cute.make_layout(16))
    if i < n:
        cute.arch.atomic_add((gy.iterator + gx[i]).llvm_ptr, cutlass.Int32(1))


@cute.jit
def histogram(x: cute.Pointer, y: cute.Pointer, n: cutlass.Int32):
    _histogram_kernel(x, y, n).launch(grid=((n + BLOCK - 1) // BLOCK, 1, 1), block=(BLOCK, 1, 1))


_TYPES = {torch.float32: cutlass.Float32, torch.int32: cutlass.Int32}


@functools.cache
def compiled(function, types: tuple, scalars: int, arch: str, lines: bool = False):
    """(program, host module) of a function of pointers to ``types`` and Int32 ``scalars``; ``lines``: with .loc."""
    pointers = [make_ptr(_TYPES[t], 0, cute.AddressSpace.gmem, assumed_align=4) for t in types]
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {arch} --keep-ptx --dump-dir {folder}" + (" --generate-line-info" if lines else "")
        result = cute.compile(function, *pointers, *[cutlass.Int32(1)] * scalars, options=options)
        ptx = result.__ptx__
    return Program.parse(ptx), HostModule(str(result.ir_module), result.function_name)


def simulate(
    function,
    tensors: list[torch.Tensor],
    scalars: list[int],
    arch: str = "sm_100a",
    memory=None,
    lines: bool = False,
    **options,
):
    """Compiles (once) and runs ``function`` on CPU tensors; returns the ``Result`` of its only launch."""
    program, host = compiled(function, tuple(t.dtype for t in tensors), len(scalars), arch, lines)
    if memory is None:
        memory = GlobalMemory()
        for j, t in enumerate(tensors):
            memory.add(t, f"t{j}")
    (launch,) = host.call([*[ctypes.c_uint64(t.data_ptr()) for t in tensors], *[ctypes.c_int32(s) for s in scalars]])
    return run(program, launch, memory, **options)
