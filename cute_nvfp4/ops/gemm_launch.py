"""What gemm and gated_gemm share: outputs and operands as records, and the planned call."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import OperandError
from ..kernels.gemm.arguments import GemmArguments, Output, PartialSums
from ..kernels.gemm.config import CTA_ROWS, epilogue_threads
from ..planning.gemm import GemmProblem, Plan, plan_for
from ..runtime.backend import sm_count
from ..runtime.kernel import Kernel
from ..runtime.launch import Touched
from ..target import Target
from .calls import addresses
from .checks import DTYPE_NAMES
from .scratch import new_scratch, scratch_of


class GemmCall:
    """The kernel of a problem, planned. ``arguments`` are in the caller's order, without addresses, and lack only what
    the plan decides; ``touched`` takes the owners of a call and the scratch memory."""

    def __init__(
        self,
        kernel: Kernel,
        problem: GemmProblem,
        config: Plan | None,
        target: Target,
        device: torch.device,
        arguments: GemmArguments,
        touched: Touched,
    ) -> None:
        plan = plan_for(problem, target.arch, sm_count(target, device), config)
        self._plan, self._target, self._device = plan, target, device
        self._stream_k = plan.config.scheduler == "stream_k"
        arguments = arguments._replace(partials=PartialSums(0, 0) if self._stream_k else None, workers=plan.workers)
        if plan.swap:
            arguments = arguments._replace(a=arguments.b, b=arguments.a)
        self.swap = plan.swap
        self.launch = kernel.launcher(plan.config, target, device, arguments, touched)

    def __call__(self, a: tuple, b: tuple, rest: tuple, owners: tuple) -> None:
        """a, b: addresses of data and scales of each matrix. rest: of the output, its scales and global scale, bias;
        alpha; addresses of device scalars."""
        scratch = self.scratch()
        self.launch(self.values(a, b, rest, scratch), (*owners, scratch))

    def values(self, a: tuple, b: tuple, rest: tuple, scratch: dict[str, torch.Tensor]) -> tuple:
        """What varies, in the order of ``GemmArguments``."""
        first, second = (b, a) if self.swap else (a, b)
        return *first, *second, *rest, *addresses(*scratch.values())

    def scratch(self, kept: bool = True) -> dict[str, torch.Tensor]:
        """Memory of a stream-K launch; kept: its flags may be those of the calls before on the stream."""
        return stream_k_scratch(self._plan, self._target, self._device, kept) if self._stream_k else {}


def strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(M, N, L) strides of (L, M, N) or (M, N); 0 where a dimension has one element."""
    m, n = (tensor.stride(i) if tensor.shape[i] > 1 else 0 for i in (-2, -1))
    batch = tensor.stride(0) if tensor.ndim == 3 and tensor.shape[0] > 1 else 0
    return m, n, batch


def output_record(out: torch.Tensor) -> tuple[Output, dict[str, Any]]:
    """The record of an output, and what a problem says of it: dtype, contiguous dimension, whether rows are aligned."""
    m, n, batch = strides(out)
    rows, columns = out.shape[-2:]
    if n in (0, 1):
        major, stride, lines, length = "n", m, rows, columns
    elif m in (0, 1):
        major, stride, lines, length = "m", n, columns, rows
    else:
        raise OperandError.of(
            "strides of out",
            got=out.stride(),
            expected="1 along M or along N",
            hint="Leave out to get a new tensor, and copy it.",
        )
    # dimensions of one element have no stride of their own, but tensor maps want one, of whole 16 bytes
    stride = stride or -(-length // 16) * 16
    batch = batch or -(-stride * lines // 16) * 16
    vector = (out.data_ptr() | (stride | batch | length) * out.element_size()) % 16 == 0
    described = {"out": DTYPE_NAMES[out.dtype], "out_major": major, "vector": vector}
    return Output(0, stride, batch, None, None), described


def stream_k_scratch(plan: Plan, target: Target, device: torch.device, kept: bool = True) -> dict[str, torch.Tensor]:
    """Partial sums and flags of a stream-K launch. kept: those of the stream, or of the graph that records it; else
    of its own."""
    config = plan.config
    ctas = plan.workers * config.ctas
    floats = ctas * config.products * config.tile_n * CTA_ROWS
    # a flag for each warp that stores
    words = ctas * epilogue_threads(config) // 32
    found = scratch_of(floats, words, target, device) if kept else new_scratch(floats, words, device)
    return {"workspace": found.sums, "flags": found.flags}
