"""gemm and gated_gemm with a prepared weight, for 16-bit, block-scaled or FP8 activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import OperandError, OperandTypeError
from ...formats import NVFP4
from ...kernels.gemm.packed.stream_arguments import FewRows, StreamArguments
from ...kernels.gemm.packed.stream_config import can_implement as can_stream
from ...kernels.gemm.sm90.arguments import Activations, OutputRows, PackedWeight, RowBias, RowWeight, WgmmaArguments
from ...kernels.gemm.sm90.config import WgmmaConfig
from ...kernels.gemm.sm90.limits import can_implement as can_wgmma
from ...lazy import ByGeneration, Lazily
from ...operand import BlockScaledTensor
from ...planning.packed import PackedPlan, PackedProblem, choose
from ...planning.packed_problem import helped_steps
from ...prepared_weight import PreparedWeight
from ...row_scaled import by_rows
from ...runtime.backend import Backend, sm_count
from ...runtime.kernel import Kernel
from ...target import Target
from ..arguments import ACTIVATIONS, TENSOR, WEIGHT
from ..checks import (
    DTYPE_NAMES,
    check_alpha,
    check_bias,
    check_gate,
    check_memory,
    checked_output,
    exact_alpha,
    inputs,
    reads,
)
from ..operation import Operation
from ..planned import PlannedCall
from ..quantize import quantize
from ..scratch import partial_sums, scratch_for
from .operands import (
    X,
    XRows,
    check_no_gradient,
    check_products,
    check_x,
    exact_product,
    factors_of_products,
    natural_dtype,
    of_problem,
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
    """``gemm`` with a prepared weight: out (M, N) = alpha · a (M, K) · bᵀ + bias.

    With a gate, ``gated_gemm``: gate(alpha · a · gateᵀ) · (alpha · a · upᵀ).
    """
    return PREPARED_GEMM.call(a, b, alpha, bias, out, out_dtype, config, backend, gate)


def _check(r: Any) -> Tensor:
    weight = r.b
    check_products(weight, r.gate)
    m = check_x(r.a, weight)
    check_alpha(r.alpha, weight.device)
    check_bias(r.bias, [(weight.rows,)], weight.device)
    dtype = natural_dtype(r.a, weight) if r.out is None and r.out_dtype is None else r.out_dtype
    out = checked_output(reads(r), weight.device, (m, weight.rows), r.out, dtype)
    if weight.rows > 1 and out.stride(1) != 1:
        raise OperandError.of("strides of out", got=out.stride(), expected="1 along N, the rows of a prepared weight")
    return out


def _plan(r: Any, target: Target) -> PlannedCall:
    x, weight, out = r.a, r.b, r.out
    block_scaled = isinstance(x, BlockScaledTensor)
    # the streaming kernel reads such an x by TMA
    quantized = block_scaled and x.format is NVFP4 and weight.dtype is torch.float16 and x.key.alignment >= 16
    scalar, factors = factors_of_products(r, len(weight.global_scales))
    problem = PackedProblem(
        m=out.shape[0],
        n=weight.rows,
        k=weight.k,
        quantized=quantized,
        bias="" if r.bias is None else DTYPE_NAMES[r.bias.dtype],
        gate=r.gate,
        **of_problem(weight, out, factors[0]),
    )
    plan = choose(problem, target.arch, sm_count(target, weight.device), r.config)
    k_tiles = weight.packed.shape[1]
    if not plan.streams:
        packed, rows = PackedWeight("b.packed", weight.rows, k_tiles, 0), XRows.of(x, weight, target)
        return wgmma_call(PREPARED_GEMM, r, target, problem, plan, packed, rows, scalar, factors)
    if plan.config.quantized_x:
        stride = row_stride(x.data.stride(0), problem.m, weight.k)
        rows, few = XRows("", stride), FewRows("a.data", "a.scale", problem.m, stride)
    else:
        rows = XRows.of(x, weight, target)
        few = FewRows(rows.data, None, problem.m, rows.stride)
    size = plan.scratch(weight.rows)
    arguments = StreamArguments(
        weight=PackedWeight("b.packed", weight.rows, k_tiles, None),
        x=few,
        out="out",
        out_stride=out.stride(0),
        floats=rows.floats,
        alpha=scalar,
        factors=factors,
        partials=partial_sums(size),
        k=weight.k,
        ctas=plan.workers,
    )
    extra, config = scratch_for(size, target, weight.device, **rows.buffers), replace(plan.config, first=rows.first)
    return PREPARED_GEMM.planned(STREAM, config, target, arguments, r, extra=extra)


def wgmma_call(
    operation: Operation,
    r: Any,
    target: Target,
    problem: PackedProblem,
    plan: PackedPlan,
    weight: PackedWeight | RowWeight,
    x: XRows,
    scalar: float | str,
    factors: Sequence[tuple[str, ...]],
) -> PlannedCall:
    """The planned call of a product that is not streamed. scalar, factors: from ``factors_of_products``."""
    size, bias, batched = plan.scratch(problem.n), getattr(r, "bias", None), problem.batch > 1
    arguments = WgmmaArguments(
        weight=weight,
        x=x.rows or Activations(x.data, problem.m, x.stride, x.batch_stride),
        out=OutputRows("out", r.out.stride(-2), r.out.stride(0) if batched else 0),
        bias=None if bias is None else RowBias("bias", bias.stride(0) * (bias.ndim - 1) if batched else None),
        alpha=scalar,
        floats=x.floats,
        row_scales=x.scales,
        factors=factors,
        partials=None if plan.config.scheduler == "static" else partial_sums(size),
        helped=helped_steps(problem, plan) if plan.config.scheduler == "helped" else None,
        k=problem.k,
        batch=problem.batch,
        workers=plan.workers,
    )
    extra = scratch_for(size, target, r.out.device, **x.buffers)
    return operation.planned(WGMMA, replace(plan.config, first=x.first), target, arguments, r, extra=extra)


def _reference(r: Any) -> Tensor:
    x = by_rows(r.a) if r.b.row_factor is not None and isinstance(r.a, Tensor) else r.a
    exact = exact_product(x, r.b, exact_alpha(r.alpha), r.gate)
    if r.bias is not None:
        exact = exact + r.bias.double()
    return exact.to(r.out.dtype)


def _wgmma(config: WgmmaConfig) -> Callable[..., Any]:
    from ...kernels.gemm.sm90.overlapped import OverlappedWgmma
    from ...kernels.gemm.sm90.wgmma import WgmmaGemm

    return (OverlappedWgmma if config.overlap else WgmmaGemm)(config)


_HOST = ByGeneration(
    sm90=_wgmma,
    sm100=Lazily("kernels.gemm.sm100.packed", "TensorPackedGemm"),
    sm120=Lazily("kernels.gemm.sm120.packed", "PackedGemm"),
)
WGMMA = Kernel("wgmma_gemm", WgmmaArguments, _HOST, can_wgmma)
STREAM = Kernel("stream_gemm", StreamArguments, Lazily("kernels.gemm.packed.stream", "Stream"), can_stream)
PREPARED_GEMM = Operation(
    prepared_gemm,
    {"a": ACTIVATIONS, "b": WEIGHT, "alpha": TENSOR, "bias": TENSOR},
    check=_check,
    reference=_reference,
    plan=_plan,
)


def check_gated(a: X, weight: PreparedWeight, other: Any, gate: str, interleaved: bool) -> None:
    """Raises unless a gated product has one prepared weight that holds both, and no ``other`` one."""
    check_gate(gate)
    if weight.row_factor is not None:
        check_no_gradient(a)
    if other is not None or interleaved:
        got = "b2" if other is not None else "interleaved=True"
        expected = "a prepared weight alone, which has both"
        raise OperandError.of("weights", got=got, expected=expected, hint="prepare_weight(gate, up) makes one.")


def quantized_product(r: Any) -> BlockScaledTensor:
    """``gated_gemm`` of a prepared weight with a quantized result.

    A second launch quantizes the float32 product, to the bits that a fused kernel would write.
    """
    weight, out = r.b1, r.out
    scale = quantized_scale(r, weight.rows)
    product = PREPARED_GEMM(r.a, weight, r.alpha, None, None, torch.float32, r.config, r.backend, r.gate)
    if out is not None:
        # after the product, which refuses tensors without memory
        check_memory(inputs(a=r.a, b=weight, alpha=r.alpha), out, "data", "scale")
    return quantize(product, NVFP4, "max", global_scale=scale, out=out, backend=r.backend)


def quantized_scale(r: Any, n: int) -> Any:
    """The global scale of a quantized result with ``n`` columns: the one given, or that of ``out``."""
    out, scale = r.out, r.out_global_scale
    if r.out_dtype is not None:
        raise OperandTypeError.of("out_dtype", got=r.out_dtype, expected="None for a quantized result")
    if n % NVFP4.block:
        raise OperandError.of("N of a quantized result", got=n, expected=f"a multiple of {NVFP4.block}")
    if out is None:
        return scale
    if not isinstance(out, BlockScaledTensor):
        raise OperandTypeError.of("out", got=type(out).__name__, expected="BlockScaledTensor, for a quantized result")
    if scale is not None:
        raise OperandError.of("out_global_scale", got="one, with out", expected="None: that of out is used")
    if out.global_scale is None:
        raise OperandError.of("global scale of out", got="none", expected="one to quantize with")
    return out.global_scale
