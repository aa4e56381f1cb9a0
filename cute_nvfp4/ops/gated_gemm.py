"""gated_gemm: gate(A · B1ᵀ) ∘ (A · B2ᵀ), of block-scaled operands or of a prepared weight that holds both."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import OperandError, OperandTypeError, explain
from ..formats import NVFP4, as_bytes
from ..kernels.gemm.arguments import GemmArguments, Operand, Output
from ..kernels.gemm.config import INTERLEAVED_ROWS, QUANTIZED, GemmConfig
from ..kernels.gemm.limits import can_implement
from ..operand import BlockScaledTensor
from ..planning.gemm import Plan
from ..prepared_weight import PreparedWeight
from ..reference import GATES, gemm_reference
from ..runtime.backend import Backend
from ..runtime.kernel import Kernel
from ..scale_layout import blocked_bytes, blocked_flat, blocked_view
from ..target import Target
from .arguments import ACTIVATIONS, OPERAND, TENSOR, TYPED
from .checks import (
    check_alpha,
    check_format,
    check_formats,
    check_gate,
    check_memory,
    check_product,
    check_types,
    checked_output,
    exact_alpha,
    factors_of,
    reads,
)
from .gemm_launch import HOST, check_operands, gemm_call, operand_record, output_record, strides
from .operation import Operation
from .planned import PlannedCall, Preparation
from .prepared_weight.gemm import PREPARED_GEMM, check_gated, quantized_product, quantized_scale
from .prepared_weight.pack_then_multiply import PackThenMultiply
from .prepared_weight.plain import can_read, plan_rows, stores
from .quantize import quantize
from .quantize_request import checked_global_scale


def gated_gemm(
    a: BlockScaledTensor | torch.Tensor,
    b1: BlockScaledTensor | PreparedWeight,
    b2: BlockScaledTensor | None = None,
    *,
    gate: str = "silu",
    alpha: float | torch.Tensor | None = None,
    interleaved: bool = False,
    out: torch.Tensor | BlockScaledTensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_global_scale: float | torch.Tensor | None = None,
    config: Plan | None = None,
    backend: Backend = "auto",
) -> torch.Tensor | BlockScaledTensor:
    """Computes C = gate(alpha · A · B1ᵀ) ∘ (alpha · A · B2ᵀ) in one kernel that reads A once: (L, M, N), or (M, N).

    Args:
        a, b1, b2: (L, M, K), (L, N, K), (L, N, K), or without L, as for ``gemm``; b1 and b2 have one format.
            If b2 is None, b1 holds both weights in 2N rows, N a multiple of 128: first all rows of B1, then all of B2,
            or ``interleaved``: 128 rows of B1, 128 of B2, and so on (``interleave`` makes it). Nothing is copied.
            Or b1 is a gated ``PreparedWeight``, which holds both weights. Then a (M, K) is as for ``gemm``, the
            result has the weight's dtype by default, and a second launch quantizes it if that is asked for.
        gate: "silu" (SwiGLU), "gelu_tanh" or "gelu_erf" (GEGLU), "relu", or "identity" (the product alone).
        alpha: a number, or a float32 tensor of one element; None is 1. It multiplies both products before the gate, as
            do the global scales of a and b1, and of a and b2.
        out: the tensor to write and return, as for ``gemm``; for a quantized result a ``BlockScaledTensor`` of NVFP4,
            (L,) M rows and K = N, contiguous along K, with blocked scales and the global scale to quantize with.
        out_dtype: the dtype of a new result (float16 by default).
        out_global_scale: a number or a float32 tensor of one element, 2**-100 … 2**118: the result is quantized to
            NVFP4 with this global scale, bit for bit as ``quantize(c, rule="max", global_scale=…)`` would quantize the
            float32 result. N is a multiple of 16 (of 32 if the result is the A of another product). A tensor out of
            range makes the whole result NaN.
        config: a plan of ``planning.gemm`` for two products; None: the package chooses one.
        backend: as for ``gemm``.

    Sums, gate and product are in float32 and rounded once; ``kernels.gemm.gates`` states the accuracy of the gates.
    The order of the sums depends on the plan, never on timing. Runs on the current stream, without synchronising the
    device.

    Raises:
        OperandError, OperandTypeError: operands do not fit together, or cannot be computed with; no kernel implements
            the plan.
        TargetError: the backend is unknown, or cannot run tensors of this device.
    """
    if isinstance(b1, PreparedWeight):
        check_gated(a, b1, b2, gate, interleaved)
        if out_global_scale is None and not isinstance(out, BlockScaledTensor):
            return PREPARED_GEMM.call(a, b1, alpha, None, out, out_dtype, config, backend, gate)
        options = out, out_dtype, out_global_scale, config, backend
        return quantized_product(GATED.request(a, b1, b2, gate, alpha, interleaved, *options))
    return GATED.call(a, b1, b2, gate, alpha, interleaved, out, out_dtype, out_global_scale, config, backend)


def _check(r: Any) -> torch.Tensor | BlockScaledTensor:
    check_types(r.a, r.b1)
    n = _n(r.a, _weights(r.b1, r.b2), r.gate, r.interleaved)
    check_alpha(r.alpha, r.a.device)
    return _result(r, n)


def _plan(r: Any, target: Target) -> PlannedCall | PackThenMultiply:
    a, weights, quantized = r.a, _weights(r.b1, r.b2), isinstance(r.out, BlockScaledTensor)
    n = r.out.k if quantized else r.out.shape[-1]
    if target.arch.generation == "sm90":
        if not r.interleaved and can_read(a, *weights.values()) and stores(r.out, n):
            return plan_rows(GATED, r, target, "b1", "b1" if r.b2 is None else "b2")
        return PackThenMultiply(r)
    check_operands({"a": a, **weights}, target.backend)
    scalar, factors = factors_of(r, "a", "b1")
    second = factors if r.b2 is None else factors_of(r, "a", "b2")[1]
    both = (operand_record(r.b1, "b1"), operand_record(r.b2, "b2")) if r.b2 is not None else _halves(r, n)
    dtype = None if quantized else r.out.dtype

    def new(a: BlockScaledTensor, *args: Any) -> torch.Tensor | BlockScaledTensor:
        return _new(a, n, dtype, args[_SCALE])

    options = {"read_only": ("out.global_scale",), "new_of": new}
    described = {"n": n, "b_format": r.b1.format.name, "products": 2, "gate": r.gate, "interleaved": r.interleaved}
    products = factors, second
    return gemm_call(GATED, KERNEL, r, target, both, _output(r.out), scalar, products, options, **described)


def _weights(b1: BlockScaledTensor, b2: BlockScaledTensor | None) -> dict[str, BlockScaledTensor]:
    return {"b": b1} if b2 is None else {"b1": b1, "b2": b2}


def _n(a: BlockScaledTensor, weights: dict[str, BlockScaledTensor], gate: str, interleaved: bool) -> int:
    """N of the weights; raises unless they can be multiplied with ``a``."""
    check_gate(gate)
    if not isinstance(interleaved, bool):
        raise OperandTypeError.of("interleaved", got=type(interleaved).__name__, expected="bool")
    check_weights(a, weights)
    if len(weights) == 2:
        if interleaved:
            raise OperandError.of("interleaved", got="True with b2", expected="one weight b1 that has all rows")
        return weights["b1"].rows
    rows = weights["b"].rows
    check_halves("rows of b1, which is both weights", rows, 2 * INTERLEAVED_ROWS)
    return rows // 2


def _result(r: Any, n: int) -> torch.Tensor | BlockScaledTensor:
    """The output, checked or new."""
    a, out = r.a, r.out
    shape = (a.batch, a.rows, n) if a.is_batched else (a.rows, n)
    if r.out_global_scale is None and not isinstance(out, BlockScaledTensor):
        return checked_output(reads(r), a.device, shape, out, r.out_dtype)
    scale = quantized_scale(r, n)
    if out is None:
        return _new(a, n, None, scale)
    check_format("out", out, (NVFP4,))
    if (*out.data.shape[:-1], out.k) != shape:
        raise OperandError.of("shape of out", got=(*out.data.shape[:-1], out.k), expected=shape)
    if out.scale_layout != "blocked" or out.device != a.device:
        got = f"{out.scale_layout} scales on {out.device}"
        raise OperandError.of("out", got=got, expected=f"blocked scales on {a.device}")
    _check_memory(r)
    return out


def _check_memory(r: Any) -> None:
    """Raises if the output overlaps an input, or its parts overlap each other."""
    quantized = isinstance(r.out, BlockScaledTensor)
    scale = {"out.global_scale": r.out.global_scale} if quantized else {}
    check_memory(reads(r) | scale, r.out, "data", "scale")


def _new(
    a: BlockScaledTensor, n: int, dtype: torch.dtype | None, global_scale: Any
) -> torch.Tensor | BlockScaledTensor:
    """A new result, quantized if there is a global scale."""
    shape = (a.batch, a.rows, n) if a.is_batched else (a.rows, n)
    if global_scale is None:
        return torch.empty(shape, dtype=dtype or torch.float16, device=a.device)
    value, columns = checked_global_scale(global_scale, a.device), n // NVFP4.block
    data = torch.empty((*shape[:-1], n // 2), dtype=torch.uint8, device=a.device)
    scale = torch.empty(blocked_bytes(a.rows, columns, a.batch), dtype=torch.uint8, device=a.device)
    return BlockScaledTensor(data, blocked_view(scale, a.rows, columns, a.batch), value, NVFP4)


def _halves(r: Any, n: int) -> tuple[Operand, Operand]:
    """The records of B1 and B2, which both lie in ``b1``."""
    whole, rows = operand_record(r.b1), INTERLEAVED_ROWS if r.interleaved else n
    data = rows * whole.row_stride // r.b1.format.elements_per_byte
    scale = blocked_bytes(rows, r.b1.format.scale_columns(r.b1.k))
    return tuple(operand_record(r.b1, "b1", (i * data, i * scale))._replace(rows=n) for i in (0, 1))


def _output(result: Any) -> tuple[Output, dict[str, Any]]:
    """The record of the output, and the fields of the problem that describe it."""
    if not isinstance(result, BlockScaledTensor):
        return output_record(result)
    row, _, batch = strides(result.data)
    described = {"out": QUANTIZED, "vector": (result.data.data_ptr() | row | batch) % 16 == 0}
    return Output("out.data", row, batch, "out.scale", "out.global_scale"), described


def _reference(r: Any) -> torch.Tensor:
    """Computes the request in float64, for operands of any layout."""
    weights, alpha = _weights(r.b1, r.b2), exact_alpha(r.alpha)
    products = [gemm_reference(r.a, b, alpha=alpha, out_dtype=torch.float64) for b in weights.values()]
    if len(products) == 1:
        rows = INTERLEAVED_ROWS if r.interleaved else r.b1.rows // 2
        both = products[0].unflatten(-1, (-1, 2, rows))
        products = [both[..., i, :].flatten(-2) for i in (0, 1)]
    return GATES[r.gate](products[0]) * products[1]


def _store(exact: torch.Tensor, out: Any) -> torch.Tensor | BlockScaledTensor:
    if not isinstance(out, BlockScaledTensor):
        return out.copy_(exact)
    made = quantize(exact.float(), NVFP4, "max", global_scale=out.global_scale, backend="reference")
    as_bytes(out.data).copy_(made.data)
    as_bytes(out.blocked_scale()).copy_(made.blocked_scale())
    return out


def _can_implement(config: GemmConfig) -> str:
    if config.products != 2:
        return explain("products of a gated GEMM", got=config.products, expected="2")
    if config.bias:
        return explain("bias of a gated GEMM", got=config.bias, expected="none")
    return can_implement(config)


def _prepared(r: Any) -> Preparation:
    if r.b2 is not None or not isinstance(r.b1, PreparedWeight):
        got = f"{type(r.b1).__name__} and {type(r.b2).__name__}"
        expected = "a PreparedWeight of both, which a prepared call needs"
        raise OperandTypeError.of("b1 and b2", got=got, expected=expected)
    check_gate(r.gate)
    product = r.a, r.b1, r.alpha, None, r.out, r.out_dtype, r.config, r.backend, r.gate
    return PREPARED_GEMM.preparation_of(PREPARED_GEMM.request(*product))


def interleave(b1: BlockScaledTensor, b2: BlockScaledTensor) -> BlockScaledTensor:
    """Makes one weight of 2N rows from two of N: blocks of 128 rows of b1 and b2 in turn. Copies; use it at load time.

    Both weights have N rows, a multiple of 128, blocked scales, and equal global scales or none. On a GPU it does not
    wait for the device: global scales that differ make the result's global scale NaN, and so every value.

    Raises:
        OperandError: operands do not fit together; on the CPU also if global scales differ.
    """
    check_weights(b1, {"b1": b1, "b2": b2})
    for name, b in (("b1", b1), ("b2", b2)):
        check_halves(f"rows of {name}", b.rows, INTERLEAVED_ROWS)
    global_scale = _common_global_scale(b1.global_scale, b2.global_scale)
    block = (-1, INTERLEAVED_ROWS)
    data = torch.stack([as_bytes(b.data).unflatten(-2, block) for b in (b1, b2)], -3).flatten(-4, -2)
    # (32, 4, rest_m, 4, rest_k, L): whole atoms along the rows, the slowest dimension but the batch
    scale = torch.stack([as_bytes(b.blocked_scale()) for b in (b1, b2)], 3).flatten(2, 3)
    flat = blocked_flat(scale)
    columns = b1.format.scale_columns(b1.k)
    return BlockScaledTensor(data, blocked_view(flat, 2 * b1.rows, columns, b1.batch), global_scale, b1.format)


def _common_global_scale(one: torch.Tensor | None, two: torch.Tensor | None) -> torch.Tensor | None:
    """The global scale of two weights that become one; both have one, or neither."""
    if one is None or one.data_ptr() == two.data_ptr():
        return one
    if one.device.type != "cpu":
        return torch.where(one.reshape(()) == two.reshape(()), one.reshape(()), torch.nan)
    if float(one) != float(two):
        raise OperandError.of(
            "global scales of b1 and b2",
            got=f"{float(one)} and {float(two)}",
            expected="equal ones",
            hint="Quantize both with the larger amax's: quantize(…, global_scale=…).",
        )
    return one


def check_halves(what: str, rows: int, multiple: int) -> None:
    """Raises unless ``rows`` is a whole number of the blocks that two weights are made of."""
    if rows % multiple:
        expected = f"a multiple of {multiple}: scales come in atoms of {INTERLEAVED_ROWS} rows"
        raise OperandError.of(what, got=rows, expected=expected, hint="Give b1 and b2 as two tensors.")


def check_weights(a: BlockScaledTensor, weights: dict[str, BlockScaledTensor]) -> None:
    """Raises unless the one or two weights are alike and can be multiplied with ``a``."""
    check_product(a, weights)
    first, last = weights.values() if len(weights) == 2 else [*weights.values()] * 2
    both = {
        "rows": [b.rows for b in (first, last)],
        "formats": [b.format.name for b in (first, last)],
        "global scales": ["none" if b.global_scale is None else "one" for b in (first, last)],
    }
    for what, (one, two) in both.items():
        if one != two:
            raise OperandError.of(f"{what} of b1 and b2", got=f"{one} and {two}", expected="the same")
    check_formats("a", a, "b1" if len(weights) == 2 else "b", first)


KERNEL = Kernel("gated_gemm", GemmArguments, HOST, _can_implement)
compile_gated_gemm = KERNEL.compile
GATED = Operation(
    gated_gemm,
    {
        **{"a": OPERAND, "b1": OPERAND, "b2": OPERAND.or_none(), "alpha": TENSOR, "out_global_scale": TENSOR},
        **{"interleaved": TYPED, "out": ACTIVATIONS.or_none()},
    },
    check=_check,
    reference=_reference,
    plan=_plan,
    store=_store,
    overlaps=_check_memory,
    prepared=_prepared,
    preparable=True,
)
_SCALE = GATED.fields.index("out_global_scale") - 1
