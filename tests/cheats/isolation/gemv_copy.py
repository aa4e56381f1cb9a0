"""A kernel that copies a vector of fp16: what a cheat shows instead of one that works."""

import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def copy_kernel(x: cute.Tensor, c: cute.Tensor):
    row, _, _ = cute.arch.block_idx()
    c[row] = x[row]


@cute.jit
def copy_host(x: cute.Tensor, c: cute.Tensor, stream: driver.CUstream):
    copy_kernel(x, c).launch(grid=(c.shape[0], 1, 1), block=(1, 1, 1), stream=stream)


def copy(x: torch.Tensor, c: torch.Tensor) -> None:
    """c = x, element by element, both contiguous in memory."""
    flat = [from_dlpack(t.permute(2, 0, 1).flatten()) for t in (x.permute(0, 1, 2), c)]
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    cute.compile(copy_host, *flat, stream)(*flat, stream)
