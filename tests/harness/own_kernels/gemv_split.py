#!POPCORN leaderboard nvfp4_gemv
#!POPCORN gpu B200
"""A GEMV in slices of K: a launch each, on two streams that events order, and one that adds up; torch decodes b."""

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass.cute.runtime import from_dlpack
from task import input_t, output_t

SLICES, THREADS = 2, 32
_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device="cuda")


@cute.kernel
def partial_sums(a: cute.Tensor, values: cute.Tensor, x: cute.Tensor, sfa: cute.Tensor, part: cute.Tensor):
    """part[m, l] = a slice's share; a: (M, bytes, L), x: (elements, L) fp32, sfa: (M, bytes / 8, L), values: (16,)."""
    lane, _, _ = cute.arch.thread_idx()
    row, _, batch = cute.arch.block_idx()
    total = cutlass.Float32(0)
    for i in cutlass.range(lane, a.shape[1], THREADS):
        pair = cutlass.Int32(a[row, i, batch])
        products = values[pair & 15] * x[2 * i, batch] + values[pair >> 4] * x[2 * i + 1, batch]
        total += products * sfa[row, i // 8, batch].to(cutlass.Float32)
    total = cute.arch.warp_reduction_sum(total)
    if lane == 0:
        part[row, batch] = total


@cute.kernel
def add_up(parts: cute.Tensor, c: cute.Tensor):
    """c[m, 0, l] = the sum over the slices of parts (SLICES, M, L)."""
    row, _, batch = cute.arch.block_idx()
    total = cutlass.Float32(0)
    for i in cutlass.range_constexpr(SLICES):
        total += parts[i, row, batch]
    c[row, 0, batch] = total.to(cutlass.Float16)


@cute.jit
def launch_partial_sums(
    a: cute.Tensor, values: cute.Tensor, x: cute.Tensor, sfa: cute.Tensor, part: cute.Tensor, stream: driver.CUstream
):
    grid = (part.shape[0], 1, part.shape[1])
    partial_sums(a, values, x, sfa, part).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


@cute.jit
def launch_add_up(parts: cute.Tensor, c: cute.Tensor, stream: driver.CUstream):
    add_up(parts, c).launch(grid=(c.shape[0], 1, c.shape[2]), block=(1, 1, 1), stream=stream)


_compiled = {}


def run(host, tensors, stream):
    """Compiles for each shape when it is first met."""
    arguments = [from_dlpack(x) for x in tensors]
    key = host, *(tuple(x.shape) for x in tensors)
    handle = driver.CUstream(stream.cuda_stream)
    if key not in _compiled:
        _compiled[key] = cute.compile(host, *arguments, handle)
    _compiled[key](*arguments, handle)


def custom_kernel(data: input_t) -> output_t:
    a, b, sfa, sfb, _, _, c = data
    codes = b.view(torch.uint8)[0]  # (K/2, L)
    x = torch.stack((_VALUES[(codes & 15).int()], _VALUES[(codes >> 4).int()]), dim=1).flatten(0, 1)
    x = x * sfb[0].float().repeat_interleave(16, dim=0)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    ready, done = torch.cuda.Event(), torch.cuda.Event()
    ready.record(main)
    parts = torch.empty(SLICES, c.shape[0], c.shape[2], dtype=torch.float32, device=c.device)
    bytes_of_a = a.view(torch.uint8).chunk(SLICES, dim=1)
    for i, slice_of_a in enumerate(bytes_of_a):
        stream = (main, side)[i % 2]
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            operands = slice_of_a, _VALUES, x.chunk(SLICES)[i], sfa.chunk(SLICES, dim=1)[i], parts[i]
            run(launch_partial_sums, operands, torch.cuda.current_stream())
    done.record(side)
    main.wait_event(done)
    run(launch_add_up, (parts, c), main)
    return c
