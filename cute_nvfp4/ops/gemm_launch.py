"""What gemm and gated_gemm share: how their call is planned, and the record of an output."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..errors import OperandError
from ..kernels.gemm.arguments import GemmArguments, Output, PartialSums
from ..kernels.gemm.config import CTA_ROWS, GemmConfig, epilogue_threads
from ..planning.gemm import GemmProblem, Plan, plan_for
from ..runtime.backend import sm_count
from ..runtime.kernel import Kernel
from ..target import Target
from .checks import DTYPE_NAMES
from .operands import check_signs_of
from .operation import Operation
from .planned import PlannedCall
from .scratch import LikeScratch, Scratch, new_scratch, scratch_of


def gemm_call(
    operation: Operation,
    kernel: Kernel,
    problem: GemmProblem,
    request: Any,
    target: Target,
    arguments: GemmArguments,
    **options: Any,
) -> PlannedCall:
    """The call of a problem. ``arguments`` are in the caller's order, and lack only what the plan decides."""
    plan = plan_for(problem, target.arch, sm_count(target, request.a.device), request.config)
    stream_k = plan.config.scheduler == "stream_k"
    partials = PartialSums("scratch.sums", "scratch.flags") if stream_k else None
    arguments = arguments._replace(partials=partials, workers=plan.workers)
    if plan.swap:
        arguments = arguments._replace(a=arguments.b, b=arguments.a)
    if stream_k:
        make = functools.partial(_stream_k_scratch, plan, target, request.a.device)
        options["extra"] = "scratch", make, LikeScratch()
    if target.backend == "sim":
        options["before"] = check_signs_of
    return operation.planned(kernel, plan.config, target, arguments, request, **options)


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
    return Output("out", stride, batch, None, None), described


def _stream_k_scratch(plan: Plan, target: Target, device: torch.device, given: tuple, kept: bool) -> Scratch:
    """Partial sums and flags of a stream-K launch. kept: those of the stream, or of the graph that records it; else
    of its own."""
    config = plan.config
    ctas = plan.workers * config.ctas
    floats = ctas * config.products * config.tile_n * CTA_ROWS
    # a flag for each warp that stores
    words = ctas * epilogue_threads(config) // 32
    return scratch_of(floats, words, target, device) if kept else new_scratch(floats, words, device)


def host(config: GemmConfig) -> Any:
    """The host function of ``config``, of one product or of two."""
    if config.arch.generation == "sm120":
        from ..kernels.gemm.sm120 import host as sm120

        return sm120.MmaSyncGemm(config)
    from ..kernels.gemm.sm100 import host as sm100

    return sm100.Tcgen05Gemm(config)
