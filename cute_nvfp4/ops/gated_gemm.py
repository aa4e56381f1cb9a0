"""gated_gemm: validate, choose a backend; what it shares with gemm is in ``gemm``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError, explain
from ..formats import NVFP4, as_bytes
from ..kernels.gemm.arguments import GemmArguments, Operand, Output
from ..kernels.gemm.config import GATE_NAMES, INTERLEAVED_ROWS, QUANTIZED, GemmConfig
from ..kernels.gemm.limits import can_implement
from ..operand import BlockScaledTensor
from ..planning.gemm import GemmProblem, Plan
from ..reference import gemm_reference
from ..runtime.backend import Backend, resolve
from ..runtime.kernel import Kernel
from ..scale_layout import blocked_bytes, blocked_flat, blocked_view
from .checks import (
    check_format,
    check_overlap,
    check_product,
    checked_output,
    parts,
    refuse_config,
    split_alpha,
    tensors,
)
from .gemm import addresses, host, launch, output_record, strides
from .library import gated as operators
from .library.registration import by_operator
from .operands import check_operands, operand_record

_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "gelu_erf": torch.nn.functional.gelu,
    "relu": torch.relu,
    "identity": lambda x: x,
}


def gated_gemm(
    a: BlockScaledTensor,
    b1: BlockScaledTensor,
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
    """C = gate(alpha · A · B1ᵀ) ∘ (alpha · A · B2ᵀ) in one kernel that reads A once: (L, M, N), or (M, N).

    Args:
        a, b1, b2: (L, M, K), (L, N, K), (L, N, K), or without L, as ``gemm`` takes them; b1 and b2 of one format.
            b2 None: b1 is both, 2N rows with N a multiple of 128: first all rows of B1, then all of B2, or
            ``interleaved``: 128 rows of B1, 128 of B2, and so on (``interleave`` makes it). Neither is copied.
        gate: "silu" (SwiGLU), "gelu_tanh" or "gelu_erf" (GEGLU), "relu", or "identity" (the product alone).
        alpha: a number, or a float32 tensor of one element: multiplies A, and so both products before the gate; so do
            the global scales of a and b1, or of a and b2. None is 1.
        out: where to put the result, as ``gemm`` takes it; for a quantized result a ``BlockScaledTensor`` of NVFP4,
            (L,) M rows and K = N, contiguous along K, with blocked scales and the global scale to quantize with.
        out_dtype: dtype of a new result (float16 by default).
        out_global_scale: a number or a float32 tensor of one element, 2**-100 … 2**118: the result is quantized to
            NVFP4 with this global scale, bit for bit as ``quantize(c, rule="max", global_scale=…)`` would quantize the
            float32 result. N is a multiple of 16 (of 32 for the A of a next product). A tensor out of range makes all
            of it NaN.
        config: a plan of ``planning.gemm`` for two products; None has one chosen.
        backend: as for ``gemm``.

    Sums, gate and product are in float32 and rounded once; ``kernels.gemm.gates`` states the accuracy of the gates.
    The order of the sums depends on the plan, never on timing. Runs on the current stream, without synchronising the
    device.

    Raises:
        OperandError, OperandTypeError: operands that do not fit together or cannot be computed with; an impossible
            plan.
        TargetError: the backend cannot run tensors of this device, or is unknown.
    """
    if by_operator((a, b1, b2), alpha, out_global_scale, out, getattr(out, "global_scale", None)):
        options = gate, alpha, interleaved, out, out_dtype, out_global_scale, config, backend
        return operators.gated_gemm(a, b1, b2, *options)
    weights = {"b": b1} if b2 is None else {"b1": b1, "b2": b2}
    n = _check(a, weights, gate, interleaved)
    scalar, alpha_tensor = split_alpha(alpha, a.device)
    operands = {"a": a, **weights}
    read = parts(operands) | {"alpha": alpha_tensor}
    result = _result(a, n, read, out, out_dtype, out_global_scale)
    target = resolve(backend, a.device)
    if target.backend == "reference":
        refuse_config(config)
        factor = scalar if alpha_tensor is None else alpha_tensor.reshape(()).double()
        return _store_reference(_reference(a, weights, n, gate, interleaved, factor), result)
    check_operands(operands, target.backend)
    pair = (b1, b1) if b2 is None else (b1, b2)
    factors = tuple(addresses(alpha_tensor, a.global_scale, b.global_scale) for b in pair)
    output, described, written = _output(result)
    problem = GemmProblem(
        m=a.rows,
        n=n,
        k=a.k,
        batch=a.batch,
        a_format=a.format.name,
        b_format=b1.format.name,
        factors=len(factors[0]),
        products=2,
        gate=gate,
        interleaved=interleaved,
        **described,
    )
    arguments = GemmArguments(
        a=(operand_record(a),),
        b=_halves(b1, n, interleaved) if b2 is None else (operand_record(b1), operand_record(b2)),
        out=output,
        bias=None,
        alpha=scalar,
        factors=factors,
        k=a.k,
        batch=a.batch,
    )
    if isinstance(result, BlockScaledTensor):
        read["out.global_scale"] = result.global_scale
    launch(KERNEL, problem, config, target, a.device, arguments, lambda: tensors(read, written))
    return result


def interleave(b1: BlockScaledTensor, b2: BlockScaledTensor) -> BlockScaledTensor:
    """One weight of 2N rows from two of N: blocks of 128 rows of b1 and b2 in turn. A copy; for loading a model.

    Both have N rows, a multiple of 128, blocked scales, and equal global scales or none. On a GPU, which is not waited
    for, global scales that differ make the result's NaN, and so every value.

    Raises:
        OperandError: operands that do not fit together; on the CPU also global scales that differ.
    """
    _check_weights(b1, {"b1": b1, "b2": b2})
    for name, b in (("b1", b1), ("b2", b2)):
        _check_halves(f"rows of {name}", b.rows, INTERLEAVED_ROWS)
    global_scale = _common_global_scale(b1.global_scale, b2.global_scale)
    block = (-1, INTERLEAVED_ROWS)
    data = torch.stack([as_bytes(b.data).unflatten(-2, block) for b in (b1, b2)], -3).flatten(-4, -2)
    # (32, 4, rest_m, 4, rest_k, L): whole atoms along the rows, which are the slowest but the batch
    scale = torch.stack([as_bytes(b.blocked_scale()) for b in (b1, b2)], 3).flatten(2, 3)
    flat = blocked_flat(scale)
    columns = b1.format.scale_columns(b1.k)
    return BlockScaledTensor(data, blocked_view(flat, 2 * b1.rows, columns, b1.batch), global_scale, b1.format)


def _common_global_scale(one: torch.Tensor | None, two: torch.Tensor | None) -> torch.Tensor | None:
    """The global scale of two weights that become one, both of which have one or neither."""
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


def _check(a: BlockScaledTensor, weights: dict[str, BlockScaledTensor], gate: str, interleaved: bool) -> int:
    """Raises unless the operands can be multiplied; N."""
    if gate not in GATE_NAMES:
        raise OperandError.of("gate", got=repr(gate), expected=f"one of {', '.join(GATE_NAMES)}")
    if not isinstance(interleaved, bool):
        raise OperandTypeError.of("interleaved", got=type(interleaved).__name__, expected="bool")
    _check_weights(a, weights)
    if len(weights) == 2:
        if interleaved:
            raise OperandError.of("interleaved", got="True with b2", expected="one weight b1 that has all rows")
        return weights["b1"].rows
    rows = weights["b"].rows
    _check_halves("rows of b1, which is both weights", rows, 2 * INTERLEAVED_ROWS)
    return rows // 2


def _check_halves(what: str, rows: int, multiple: int) -> None:
    if rows % multiple:
        expected = f"a multiple of {multiple}: scales come in atoms of {INTERLEAVED_ROWS} rows"
        raise OperandError.of(what, got=rows, expected=expected, hint="Give b1 and b2 as two tensors.")


def _check_weights(a: BlockScaledTensor, weights: dict[str, BlockScaledTensor]) -> None:
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


def _result(
    a: BlockScaledTensor, n: int, inputs: dict, out: Any, dtype: torch.dtype | None, global_scale: Any
) -> torch.Tensor | BlockScaledTensor:
    """The output, checked or new."""
    shape = (a.batch, a.rows, n) if a.is_batched else (a.rows, n)
    if global_scale is None and not isinstance(out, BlockScaledTensor):
        return checked_output({} if out is None else inputs, a.device, shape, out, dtype)
    if dtype is not None:
        raise OperandTypeError.of("out_dtype", got=dtype, expected="None for a quantized result")
    if n % NVFP4.block:
        raise OperandError.of("N of a quantized result", got=n, expected=f"a multiple of {NVFP4.block}")
    if out is None:
        return _new_quantized(a, shape, global_scale)
    if not isinstance(out, BlockScaledTensor):
        raise OperandTypeError.of("out", got=type(out).__name__, expected="BlockScaledTensor, for a quantized result")
    if global_scale is not None:
        raise OperandError.of("out_global_scale", got="one, with out", expected="None: that of out is used")
    check_format("out", out, (NVFP4,))
    if (*out.data.shape[:-1], out.k) != shape:
        raise OperandError.of("shape of out", got=(*out.data.shape[:-1], out.k), expected=shape)
    if out.scale_layout != "blocked" or out.global_scale is None or out.device != a.device:
        got = f"{out.scale_layout} scales, {'no' if out.global_scale is None else 'a'} global scale, {out.device}"
        raise OperandError.of("out", got=got, expected=f"blocked scales and a global scale on {a.device}")
    for name in ("data", "scale"):
        others = {"out.data": out.data} if name == "scale" else {}
        check_overlap({**inputs, **others, "out.global_scale": out.global_scale}, as_bytes(getattr(out, name)))
    return out


def _new_quantized(a: BlockScaledTensor, shape: tuple, global_scale: Any) -> BlockScaledTensor:
    from .quantize_request import checked_global_scale

    value = checked_global_scale(global_scale, a.device)
    data = torch.empty((*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=a.device)
    scale = torch.empty(blocked_bytes(a.rows, shape[-1] // NVFP4.block, a.batch), dtype=torch.uint8, device=a.device)
    return BlockScaledTensor(data, blocked_view(scale, a.rows, shape[-1] // NVFP4.block, a.batch), value, NVFP4)


def _halves(b: BlockScaledTensor, n: int, interleaved: bool) -> tuple[Operand, Operand]:
    """B1 and B2, which both lie in ``b``: their first rows and atoms are some way apart."""
    first = operand_record(b)._replace(rows=n)
    rows = INTERLEAVED_ROWS if interleaved else n
    second = first._replace(
        data=first.data + rows * first.row_stride // b.format.elements_per_byte,
        scale=first.scale + blocked_bytes(rows, b.format.scale_columns(b.k)),
    )
    return first, second


def _output(result: Any) -> tuple[Output, dict[str, Any], dict[str, torch.Tensor]]:
    """The record of the output, what a problem says of it, and the tensors that are written."""
    if not isinstance(result, BlockScaledTensor):
        return *output_record(result), {"out": result}
    data, scale = result.data, result.scale
    row, _, batch = strides(data)
    described = {"out": QUANTIZED, "vector": (data.data_ptr() | row | batch) % 16 == 0}
    record = Output(data.data_ptr(), row, batch, scale.data_ptr(), result.global_scale.data_ptr())
    return record, described, {"out.data": data, "out.scale": scale}


def _reference(a, weights: dict, n: int, gate: str, interleaved: bool, alpha: Any) -> torch.Tensor:
    """In float64, of operands of any layout."""
    products = [gemm_reference(a, b, alpha=alpha, out_dtype=torch.float64) for b in weights.values()]
    if len(products) == 1:
        rows = INTERLEAVED_ROWS if interleaved else n
        both = products[0].unflatten(-1, (-1, 2, rows))
        products = [both[..., i, :].flatten(-2) for i in (0, 1)]
    return _GATES[gate](products[0]) * products[1]


def _store_reference(exact: torch.Tensor, result: Any) -> torch.Tensor | BlockScaledTensor:
    if not isinstance(result, BlockScaledTensor):
        return result.copy_(exact)
    from .quantize import quantize

    made = quantize(exact.float(), NVFP4, "max", global_scale=result.global_scale, backend="reference")
    as_bytes(result.data).copy_(made.data)
    as_bytes(result.blocked_scale()).copy_(made.blocked_scale())
    return result


def _can_implement(config: GemmConfig) -> str:
    if config.products != 2:
        return explain("products of a gated GEMM", got=config.products, expected="2")
    if config.bias:
        return explain("bias of a gated GEMM", got=config.bias, expected="none")
    return can_implement(config)


KERNEL = Kernel("gated_gemm", GemmArguments, host, _can_implement)
compile_gated_gemm = KERNEL.compile
