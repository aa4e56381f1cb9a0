"""gemm and gated_gemm with a prepared weight: activations in 16 bits, or block-scaled, times packed weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import OperandError, OperandTypeError
from ...formats import NVFP4, as_bytes
from ...kernels.gemm.arguments import PartialSums
from ...kernels.gemm.packed.stream_arguments import FewRows, StreamArguments
from ...kernels.gemm.packed.stream_config import can_implement as can_stream
from ...kernels.gemm.sm90.arguments import Activations, OutputRows, PackedWeight, RowBias, WgmmaArguments
from ...kernels.gemm.sm90.config import WgmmaConfig
from ...kernels.gemm.sm90.config import can_implement as can_wgmma
from ...lazy import Lazily
from ...operand import BlockScaledTensor, row_alignment
from ...planning.packed import PackedPlan, PackedProblem, choose
from ...planning.packed_problem import helped_steps
from ...prepared_weight import PreparedWeight
from ...row_scaled import by_rows
from ...runtime.backend import Backend, sm_count
from ...runtime.kernel import Kernel
from ...target import Target
from ..arguments import ACTIVATIONS, TENSOR, WEIGHT
from ..checks import DTYPE_NAMES, check_gate, check_overlap, checked_output, factor, reads, split_alpha
from ..dequantize import DecodedFirst
from ..operation import Operation
from ..planned import PlannedCall
from ..quantize import quantize
from ..scratch import LikeScratch, Scratch, new_scratch, scratch_of
from .fp8_rows import Fp8Rows, LikeRows, natural_dtype
from .operands import (
    MMA_DTYPES,
    X,
    check_bias,
    check_no_gradient,
    check_products,
    check_x,
    exact_product,
    factors_of_products,
    row_stride,
)


def prepared_gemm(
    a: X,
    b: PreparedWeight,
    alpha: float | Tensor | None,
    bias: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    config: PackedPlan | None,
    backend: Backend,
    gate: str = "",
) -> Tensor:
    """``gemm`` with a prepared weight: out (M, N) = alpha · a (M, K) · bᵀ + bias; with a gate ``gated_gemm``:
    gate(alpha · a · gateᵀ) · (alpha · a · upᵀ)."""
    return PREPARED_GEMM.call(a, b, alpha, bias, out, out_dtype, config, backend, gate)


def _check(r: Any) -> Tensor:
    weight = r.b
    check_products(weight, r.gate)
    m = check_x(r.a, weight)
    split_alpha(r.alpha, weight.device)
    check_bias(r.bias, weight)
    dtype = natural_dtype(r.a, weight) if r.out is None and r.out_dtype is None else r.out_dtype
    out = checked_output(reads(r), weight.device, (m, weight.rows), r.out, dtype)
    if weight.rows > 1 and out.stride(1) != 1:
        raise OperandError.of("strides of out", got=out.stride(), expected="1 along N, the rows of a prepared weight")
    return out


def _plan(r: Any, target: Target) -> PlannedCall:
    x, weight, bias, out = r.a, r.b, r.bias, r.out
    block_scaled = isinstance(x, BlockScaledTensor)
    # what the streaming kernel reads as it is, by TMA
    quantized = block_scaled and x.format is NVFP4 and weight.dtype is torch.float16 and x.key.alignment >= 16
    scalar, factors = factors_of_products(r, len(weight.global_scales))
    problem = PackedProblem(
        m=out.shape[0],
        n=weight.rows,
        k=weight.k,
        dtype=MMA_DTYPES[weight.dtype],
        out=DTYPE_NAMES[out.dtype],
        quantized=quantized,
        vector=row_alignment(out, 16) >= 16,
        factors=len(factors[0]),
        bias="" if bias is None else DTYPE_NAMES[bias.dtype],
        gate=r.gate,
        packing=weight.packing,
        promoted=weight.promoted,
    )
    plan = choose(problem, target.arch, sm_count(target, weight.device), r.config)
    config, m, k_tiles = plan.config, out.shape[0], weight.packed.shape[1]
    # all else is decoded first, exactly; its global scale is a factor
    decodes = block_scaled and not (quantized and plan.streams)
    stride = weight.k if decodes else row_stride((x if isinstance(x, Tensor) else x.data).stride(0), m, weight.k)
    size, options = plan.scratch(weight.rows), {}
    floats = "decoded" if decodes else "a"
    if decodes:
        decode = functools.partial(DecodedFirst, x, weight.dtype, target)
        options["decoded"] = ("a.data", "a.scale"), decode
    scales = quantized_first = None
    if weight.row_factor is not None:
        floats, stride, scales, first, quantized_first = Fp8Rows.of(x, weight, target.arch)
        config = replace(config, first=first)
    if size.flags or quantized_first:
        rows = (m, weight.k) if quantized_first else None
        make = functools.partial(_scratch, size, rows, target, weight.device)
        options["extra"] = "scratch", make, LikeScratch() if rows is None else LikeRows.of(rows)
    sums = PartialSums("scratch.sums", "scratch.flags") if size.flags else PartialSums(0, 0)
    if plan.streams:
        arguments = StreamArguments(
            weight=PackedWeight("b.packed", weight.rows, k_tiles, None),
            x=FewRows("a.data", "a.scale", m, stride) if config.quantized_x else FewRows(floats, None, m, stride),
            out="out",
            out_stride=out.stride(0),
            alpha=scalar,
            factors=factors,
            partials=sums,
            k=weight.k,
            ctas=plan.workers,
        )
        return PREPARED_GEMM.planned(STREAM, config, target, arguments, r, **options)
    arguments = WgmmaArguments(
        weight=PackedWeight("b.packed", weight.rows, k_tiles, 0),
        x=Activations(floats, m, stride, 0),
        out=OutputRows("out", out.stride(0), 0),
        bias=None if bias is None else RowBias("bias"),
        alpha=scalar,
        floats=quantized_first,
        row_scales=scales,
        factors=factors,
        partials=None if config.scheduler == "static" else sums,
        helped=helped_steps(problem, plan) if config.scheduler == "helped" else None,
        k=weight.k,
        batch=1,
        workers=plan.workers,
    )
    return PREPARED_GEMM.planned(WGMMA, config, target, arguments, r, **options)


def _scratch(
    size: Any, rows: tuple[int, int] | None, target: Target, device: torch.device, given: tuple, kept: bool
) -> Scratch | LikeRows:
    """Partial sums and flags, and rows in FP8. kept: those of the stream, or of the graph that records it; else of the
    call's own."""
    found = None
    if size.flags:
        found = scratch_of(*size, target, device) if kept else new_scratch(*size, device)
    return found if rows is None else LikeRows.of(rows, device, found)


def _reference(r: Any) -> Tensor:
    x = by_rows(r.a) if r.b.row_factor is not None and isinstance(r.a, Tensor) else r.a
    exact = exact_product(x, r.b, factor(r.alpha), r.gate)
    if r.bias is not None:
        exact = exact + r.bias.double()
    return exact.to(r.out.dtype)


def _wgmma(config: WgmmaConfig) -> Callable[..., Any]:
    if config.arch.generation == "sm120":
        from ...kernels.gemm.sm120.packed import PackedGemm

        return PackedGemm(config)
    if config.in_tensor_memory:
        from ...kernels.gemm.sm100.packed import TensorPackedGemm

        return TensorPackedGemm(config)
    from ...kernels.gemm.sm90.overlapped import OverlappedWgmma
    from ...kernels.gemm.sm90.wgmma import WgmmaGemm

    return (OverlappedWgmma if config.overlap else WgmmaGemm)(config)


WGMMA = Kernel("wgmma_gemm", WgmmaArguments, _wgmma, can_wgmma)
STREAM = Kernel("stream_gemm", StreamArguments, Lazily("kernels.gemm.packed.stream", "Stream"), can_stream)
PREPARED_GEMM = Operation(
    prepared_gemm,
    {"a": ACTIVATIONS, "b": WEIGHT, "alpha": TENSOR, "bias": TENSOR},
    check=_check,
    reference=_reference,
    plan=_plan,
)


def gated_prepared_gemm(
    a: X,
    b1: PreparedWeight,
    b2: Any,
    gate: str,
    alpha: float | Tensor | None,
    interleaved: bool,
    out: Any,
    out_dtype: torch.dtype | None,
    out_global_scale: Any,
    config: PackedPlan | None,
    backend: Backend,
) -> Tensor | BlockScaledTensor:
    """``gated_gemm`` of a weight that is both, (M, N); quantized by a launch of its own: the float32 result, what a
    kernel that did both would write."""
    check_gate(gate)
    if b1.row_factor is not None:
        check_no_gradient(a)
    if b2 is not None or interleaved:
        got = "b2" if b2 is not None else "interleaved=True"
        expected = "a prepared weight alone, which has both"
        raise OperandError.of("weights", got=got, expected=expected, hint="prepare_weight(gate, up) makes one.")
    if out_global_scale is None and not isinstance(out, BlockScaledTensor):
        return PREPARED_GEMM.call(a, b1, alpha, None, out, out_dtype, config, backend, gate)
    if b1.rows % NVFP4.block and out_dtype is None:
        raise OperandError.of("N of a quantized result", got=b1.rows, expected=f"a multiple of {NVFP4.block}")
    scale = quantized_scale(out, out_dtype, out_global_scale)
    product = PREPARED_GEMM(a, b1, alpha, None, None, torch.float32, config, backend, gate)
    if out is not None:
        # after the product, which has refused what has no memory to compare
        read = PREPARED_GEMM.request(a, b1, alpha, None, None, None, config, backend, gate)
        for part in (out.data, out.scale):
            check_overlap(reads(read), as_bytes(part))
    return quantize(product, NVFP4, "max", global_scale=scale, out=out, backend=backend)


def quantized_scale(out: Any, out_dtype: torch.dtype | None, given: Any) -> Any:
    """The global scale of a quantized result: the one that is given, or that of ``out``."""
    if out_dtype is not None:
        raise OperandTypeError.of("out_dtype", got=out_dtype, expected="None for a quantized result")
    if out is None:
        return given
    if not isinstance(out, BlockScaledTensor):
        raise OperandTypeError.of("out", got=type(out).__name__, expected="BlockScaledTensor, for a quantized result")
    if given is not None or out.global_scale is None:
        got = " and ".join("none" if x is None else "one" for x in (given, out.global_scale))
        raise OperandError.of("out_global_scale, and that of out", got=got, expected="none, and one")
    return out.global_scale
