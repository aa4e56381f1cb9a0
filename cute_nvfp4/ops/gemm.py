"""gemm: multiplies two block-scaled operands, or activations and a prepared weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import OperandError
from ..kernels.gemm.arguments import GemmArguments
from ..kernels.gemm.limits import can_implement
from ..operand import BlockScaledTensor
from ..planning.gemm import Plan
from ..prepared_weight import PreparedWeight
from ..reference import gemm_reference
from ..row_scaled import RowScaledTensor
from ..runtime.backend import Backend
from ..runtime.kernel import Kernel
from ..target import Target
from .arguments import OPERAND, TENSOR
from .checks import (
    check_alpha,
    check_bias,
    check_formats,
    check_product,
    check_types,
    checked_output,
    exact_alpha,
    factors_of,
    reads,
)
from .gemm_launch import HOST, check_operands, gemm_call, operand_record, output_record
from .operation import Operation
from .planned import Preparation
from .prepared_weight.gemm import PREPARED_GEMM
from .prepared_weight.operands import check_no_gradient
from .prepared_weight.pack_then_multiply import PackThenMultiply
from .prepared_weight.plain import can_read, plan_rows, stores


def gemm(
    a: BlockScaledTensor | RowScaledTensor | torch.Tensor,
    b: BlockScaledTensor | PreparedWeight,
    *,
    alpha: float | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Plan | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Multiplies: C = alpha · A · Bᵀ + bias, (L, M, N), or (M, N) if the operands have no batch dimension.

    Args:
        a, b: block-scaled operands (L, M, K) and (L, N, K), or (M, K) and (N, K): both NVFP4, or each MXFP4 or MXFP8
            (E4M3 or E5M2). K is a multiple of 32, or of 128 for MXFP4 with MXFP8, where rows of MXFP4 start at
            multiples of 32 bytes; scales are blocked (``scale_layout.to_blocked``). A block-scaled MMA reads scales of
            NVFP4 as unsigned, so they must not be negative. Scales beyond K must be finite, because they meet zeros
            (``to_blocked`` writes zeros). Global scales multiply the result.

            Or b is a ``PreparedWeight`` (N, K). Then a (M, K) has the weight's dtype, or is block-scaled. For a weight
            in float8_e4m3fn, a is a ``RowScaledTensor``, or bfloat16 or float16, which a first launch quantizes. On
            sm_90a, the kernels read a plain b as it lies if both operands are NVFP4, or b is MXFP4, and K is a multiple
            of 128; otherwise each call packs b.
        alpha: a number in the range of float32, or a float32 tensor of one element on the operands' device; None is 1.
        bias: (N,), or (L, N) for a batch: float16, bfloat16 or float32, contiguous along N; added in float32.
        out: the tensor to write and return: of that shape, float16, bfloat16 or float32, contiguous along N or along M,
            rows and batches at any stride. It may not overlap the operands. Every element is written.
        out_dtype: the dtype of a new result (float16 by default); with ``out`` it must be None or that of ``out``.
        config: a plan of ``planning.gemm``; None: the package chooses one. Refused if exact torch runs.
        backend: ``auto`` (the kernels for CUDA tensors, exact torch for CPU tensors), ``cuda``, ``sim``, ``reference``
            (:mod:`cute_nvfp4.runtime.backend`).

    Sums are in float32; times alpha and the global scales, plus bias, in float32; rounded once to the output's dtype.
    Partial sums of split-K and stream-K are added in an order that depends on the plan, never on timing. Runs on the
    current stream, without synchronising the device.

    Raises:
        OperandError, OperandTypeError: operands do not fit together, or cannot be computed with; no kernel implements
            the plan.
        TargetError: the backend is unknown, or cannot run tensors of this device.
    """
    if isinstance(b, PreparedWeight):
        if b.row_factor is not None:
            check_no_gradient(a)
        return PREPARED_GEMM.call(a, b, alpha, bias, out, out_dtype, config, backend, "")
    return GEMM.call(a, b, alpha, bias, out, out_dtype, config, backend)


def _check(r: Any) -> torch.Tensor:
    check_types(r.a, r.b)
    check_product(r.a, {"b": r.b})
    check_formats("a", r.a, "b", r.b)
    check_alpha(r.alpha, r.a.device)
    n, batch = r.b.rows, [r.a.batch] if r.a.is_batched else []
    check_bias(r.bias, [(n,), (*batch, n)] if batch else [(n,)], r.a.device)
    shape = (*batch, r.a.rows, n)
    return checked_output(reads(r), r.a.device, shape, r.out, r.out_dtype)


def _plan(r: Any, target: Target) -> Callable[..., torch.Tensor]:
    a, b = r.a, r.b
    if target.arch.generation == "sm90" and can_read(a, b) and stores(r.out, b.rows):
        return plan_rows(GEMM, r, target, "b")
    if target.arch.generation == "sm90":
        return PackThenMultiply(r)
    check_operands({"a": a, "b": b}, target.backend)
    scalar, factors = factors_of(r, "a", "b")
    weights, described = (operand_record(b, "b"),), {"n": b.rows, "b_format": b.format.name}
    return gemm_call(GEMM, KERNEL, r, target, weights, output_record(r.out), scalar, (factors,), {}, **described)


def _reference(r: Any) -> torch.Tensor:
    if r.bias is None:
        return gemm_reference(r.a, r.b, alpha=exact_alpha(r.alpha), out_dtype=r.out.dtype)
    total = gemm_reference(r.a, r.b, alpha=exact_alpha(r.alpha), out_dtype=torch.float64)
    return total.add_(r.bias.double().unsqueeze(-2)).to(r.out.dtype)


def _prepared(r: Any) -> Preparation:
    if isinstance(r.b, PreparedWeight):
        return PREPARED_GEMM.preparation_of(PREPARED_GEMM.request(*r, ""))
    if isinstance(GEMM.kernel_call(r), PackThenMultiply):
        raise OperandError.of(
            "b of a prepared call on sm_90a",
            got="an operand that each call packs",
            expected="a PreparedWeight",
            hint="prepare_weight(b) packs it once.",
        )
    return GEMM.preparation_of(r)


KERNEL = Kernel("gemm", GemmArguments, HOST, can_implement)
compile_gemm = KERNEL.compile
GEMM = Operation(
    gemm,
    {"a": OPERAND, "b": OPERAND, "alpha": TENSOR, "bias": TENSOR},
    check=_check,
    reference=_reference,
    plan=_plan,
    prepared=_prepared,
    preparable=True,
)
