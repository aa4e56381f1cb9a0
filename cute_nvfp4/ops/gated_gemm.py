"""gated_gemm: validate, choose a backend and a plan, launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError, explain
from ..formats import NVFP4, as_bytes
from ..kernels.gemm.arguments import GemmArguments, Operand, Output
from ..kernels.gemm.config import INTERLEAVED_ROWS, QUANTIZED, GemmConfig
from ..kernels.gemm.limits import can_implement
from ..operand import BlockScaledTensor, span_bytes
from ..planning.gemm import GemmProblem, Plan
from ..prepared_weight import PreparedWeight
from ..reference import GATES, gemm_reference
from ..runtime.apart import near
from ..runtime.backend import Backend, resolve
from ..runtime.bounded import Bounded
from ..runtime.kernel import Kernel
from ..runtime.launch import Tensors
from ..runtime.simulating import world
from ..scale_layout import blocked_bytes, blocked_view
from ..target import Target
from .calls import addresses, as_alpha, operand_key, output_key, tensor_key
from .checks import (
    check_format,
    check_gate,
    check_overlap,
    check_types,
    checked_output,
    parts,
    refuse_config,
    split_alpha,
    tensors,
)
from .dispatch import by_operator, written_to
from .gated_packed import gated_packed
from .gemm import host
from .gemm_launch import GemmCall, output_record, strides
from .interleave import check_halves, check_weights
from .library import gated as operators
from .operands import check_operands, check_signs, operand_record


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
    """C = gate(alpha · A · B1ᵀ) ∘ (alpha · A · B2ᵀ) in one kernel that reads A once: (L, M, N), or (M, N).

    Args:
        a, b1, b2: (L, M, K), (L, N, K), (L, N, K), or without L, as ``gemm`` takes them; b1 and b2 of one format.
            b2 None: b1 is both, 2N rows with N a multiple of 128: first all rows of B1, then all of B2, or
            ``interleaved``: 128 rows of B1, 128 of B2, and so on (``interleave`` makes it). Neither is copied.
            Or b1 is a gated ``PreparedWeight`` on sm_90a, both weights in one: a (M, K) is then numbers of its dtype,
            or block-scaled, and the result has that dtype by default, or is quantized by a launch of its own.
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
    if isinstance(b1, PreparedWeight):
        return gated_packed(a, b1, b2, gate, alpha, interleaved, out, out_dtype, out_global_scale, config, backend)
    if by_operator((a, b1, b2), alpha, out_global_scale, out, getattr(out, "global_scale", None)):
        options = gate, alpha, interleaved, out, out_dtype, out_global_scale, config, backend
        return operators.gated_gemm(a, b1, b2, *options)
    check_types(a, b1)
    key = (
        *(a.key, b1.key, operand_key(b2), gate, tensor_key(alpha), interleaved, type(interleaved), out_dtype),
        *(operand_key(out) if isinstance(out, BlockScaledTensor) else output_key(out), tensor_key(out_global_scale)),
        *(backend, config, world(a.key.on_cpu)),
    )
    call = _calls.find(key)
    if call is None:
        made = _plan(a, b1, b2, gate, alpha, interleaved, out, out_dtype, out_global_scale, backend, config)
        call = _calls[key] = made
    result = call(a, b1, b2, alpha, out, out_global_scale)
    if out is not None and torch.is_grad_enabled():
        written_to(out)
    return result


_calls = Bounded()


def _plan(
    a: BlockScaledTensor,
    b1: BlockScaledTensor,
    b2: BlockScaledTensor | None,
    gate: str,
    alpha: Any,
    interleaved: bool,
    out: Any,
    out_dtype: torch.dtype | None,
    out_global_scale: Any,
    backend: Backend,
    config: Plan | None,
) -> Callable[..., Any]:
    """The call for these operands and all like them, which it checks."""
    weights = _weights(b1, b2)
    n = _check(a, weights, gate, interleaved)
    _, alpha = split_alpha(alpha, a.device)
    read = parts({"a": a, **weights}) | {"alpha": alpha}
    result = _result(a, n, read, out, out_dtype, out_global_scale)
    target = resolve(backend, a.device)
    if target.backend == "reference":
        refuse_config(config)
        return functools.partial(_reference_call, n=n, gate=gate, interleaved=interleaved, dtype=out_dtype)
    check_operands({"a": a, **weights}, target.backend)
    return _Call(a, weights, n, gate, interleaved, alpha, result, target, config)


class _Call:
    """A planned call: the kernel, and what to check before it runs."""

    def __init__(
        self,
        a: BlockScaledTensor,
        weights: dict[str, BlockScaledTensor],
        n: int,
        gate: str,
        interleaved: bool,
        alpha: torch.Tensor | None,
        result: torch.Tensor | BlockScaledTensor,
        target: Target,
        config: Plan | None,
    ) -> None:
        b1, b2 = weights.get("b1") or weights["b"], weights.get("b2")
        factors = addresses(alpha, a.global_scale, b1.global_scale)
        output, described = _output(result)
        problem = GemmProblem(
            m=a.rows,
            n=n,
            k=a.k,
            batch=a.batch,
            a_format=a.format.name,
            b_format=b1.format.name,
            factors=len(factors),
            products=2,
            gate=gate,
            interleaved=interleaved,
            **described,
        )
        first, self._apart = (operand_record(b1), (0, 0)) if b2 is not None else _halves(b1, n, interleaved)
        arguments = GemmArguments(
            a=(operand_record(a),),
            b=(first, first if b2 is None else operand_record(b2)),
            out=output,
            bias=None,
            alpha=1.0,
            factors=(factors, factors),
            k=a.k,
            batch=a.batch,
        )
        self._launch = GemmCall(KERNEL, problem, config, target, a.device, arguments, _touched)
        self._n, self._simulated = n, target.backend == "sim"
        self._dtype = None if isinstance(result, BlockScaledTensor) else result.dtype
        inputs = (x for x in (*parts({"a": a, **weights}).values(), alpha) if x is not None)
        self._sizes = tuple(map(span_bytes, inputs))
        self._out_sizes = tuple(map(span_bytes, _written(result).values()))

    def __call__(
        self,
        a: BlockScaledTensor,
        b1: BlockScaledTensor,
        b2: BlockScaledTensor | None,
        alpha: Any,
        out: Any,
        out_global_scale: Any,
    ) -> torch.Tensor | BlockScaledTensor:
        scalar, alpha = as_alpha(alpha)
        weights = _weights(b1, b2)
        result = _new(a, self._n, self._dtype, out_global_scale) if out is None else out
        if out is not None:
            read = parts({"a": a, **weights}) | {"alpha": alpha}
            places = addresses(*read.values())
            ranges = zip(addresses(*_written(out).values()), self._out_sizes)
            if self._dtype is None or any(near(x, x + size, places, self._sizes) for x, size in ranges):
                _check_memory(read, out)
        if self._simulated:
            for name, operand in {"a": a, **weights}.items():
                check_signs(name, operand)
        data, scale = b1.data.data_ptr(), b1.scale.data_ptr()
        other = addresses(b2.data, b2.scale) if b2 is not None else (data + self._apart[0], scale + self._apart[1])
        second = b1 if b2 is None else b2
        results = (
            addresses(result) if self._dtype is not None else addresses(result.data, result.scale, result.global_scale)
        )
        factors = (
            *addresses(alpha, a.global_scale, b1.global_scale),
            *addresses(alpha, a.global_scale, second.global_scale),
        )
        rest = (*results, scalar, *factors)
        self._launch(addresses(a.data, a.scale), (data, scale, *other), rest, (a, b1, b2, alpha, result))
        return result


def _touched(a: Any, b1: Any, b2: Any, alpha: Any, result: Any, scratch: dict[str, torch.Tensor]) -> Tensors:
    read = parts({"a": a, **_weights(b1, b2)}) | {"alpha": alpha}
    if isinstance(result, BlockScaledTensor):
        read["out.global_scale"] = result.global_scale
    return tensors(read, _written(result) | scratch)


def _written(result: torch.Tensor | BlockScaledTensor) -> dict[str, torch.Tensor]:
    """The tensors of the result that the kernel writes."""
    if isinstance(result, BlockScaledTensor):
        return {"out.data": result.data, "out.scale": result.scale}
    return {"out": result}


def _reference_call(
    a: BlockScaledTensor,
    b1: BlockScaledTensor,
    b2: BlockScaledTensor | None,
    alpha: Any,
    out: Any,
    out_global_scale: Any,
    *,
    n: int,
    gate: str,
    interleaved: bool,
    dtype: torch.dtype | None,
) -> torch.Tensor | BlockScaledTensor:
    scalar, alpha = as_alpha(alpha)
    weights = _weights(b1, b2)
    if out is not None:
        _check_memory(parts({"a": a, **weights}) | {"alpha": alpha}, out)
    result = _new(a, n, dtype, out_global_scale) if out is None else out
    factor = scalar if alpha is None else alpha.reshape(()).double()
    return _store_reference(_reference(a, weights, n, gate, interleaved, factor), result)


def _weights(b1: BlockScaledTensor, b2: BlockScaledTensor | None) -> dict[str, BlockScaledTensor]:
    return {"b": b1} if b2 is None else {"b1": b1, "b2": b2}


def _check(a: BlockScaledTensor, weights: dict[str, BlockScaledTensor], gate: str, interleaved: bool) -> int:
    """Raises unless the operands can be multiplied; N."""
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


def _result(
    a: BlockScaledTensor, n: int, inputs: dict, out: Any, dtype: torch.dtype | None, global_scale: Any
) -> torch.Tensor | BlockScaledTensor:
    """The output, checked or new."""
    shape = (a.batch, a.rows, n) if a.is_batched else (a.rows, n)
    if global_scale is None and not isinstance(out, BlockScaledTensor):
        return checked_output(inputs, a.device, shape, out, dtype)
    if dtype is not None:
        raise OperandTypeError.of("out_dtype", got=dtype, expected="None for a quantized result")
    if n % NVFP4.block:
        raise OperandError.of("N of a quantized result", got=n, expected=f"a multiple of {NVFP4.block}")
    if out is None:
        return _new(a, n, None, global_scale)
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
    _check_memory(inputs, out)
    return out


def _check_memory(inputs: dict[str, torch.Tensor | None], out: torch.Tensor | BlockScaledTensor) -> None:
    """Raises if the output overlaps an input, or one part of it another."""
    read = dict(inputs)
    if isinstance(out, BlockScaledTensor):
        read["out.global_scale"] = out.global_scale
    for name, tensor in _written(out).items():
        check_overlap(read, as_bytes(tensor) if isinstance(out, BlockScaledTensor) else tensor)
        read[name] = tensor


def _new(
    a: BlockScaledTensor, n: int, dtype: torch.dtype | None, global_scale: Any
) -> torch.Tensor | BlockScaledTensor:
    """A new result, quantized if there is a global scale."""
    from .quantize_request import checked_global_scale

    shape = (a.batch, a.rows, n) if a.is_batched else (a.rows, n)
    if global_scale is None:
        return torch.empty(shape, dtype=dtype or torch.float16, device=a.device)
    value, columns = checked_global_scale(global_scale, a.device), n // NVFP4.block
    data = torch.empty((*shape[:-1], n // 2), dtype=torch.uint8, device=a.device)
    scale = torch.empty(blocked_bytes(a.rows, columns, a.batch), dtype=torch.uint8, device=a.device)
    return BlockScaledTensor(data, blocked_view(scale, a.rows, columns, a.batch), value, NVFP4)


def _halves(b: BlockScaledTensor, n: int, interleaved: bool) -> tuple[Operand, tuple[int, int]]:
    """B1 and B2, which both lie in ``b``: the record of either, and how many bytes apart their data and scales are."""
    record = operand_record(b)._replace(rows=n)
    rows = INTERLEAVED_ROWS if interleaved else n
    apart = rows * record.row_stride // b.format.elements_per_byte, blocked_bytes(rows, b.format.scale_columns(b.k))
    return record, apart


def _output(result: Any) -> tuple[Output, dict[str, Any]]:
    """The record of the output, and what a problem says of it."""
    if not isinstance(result, BlockScaledTensor):
        return output_record(result)
    row, _, batch = strides(result.data)
    described = {"out": QUANTIZED, "vector": (result.data.data_ptr() | row | batch) % 16 == 0}
    return Output(0, row, batch, 0, 0), described


def _reference(a, weights: dict, n: int, gate: str, interleaved: bool, alpha: Any) -> torch.Tensor:
    """In float64, of operands of any layout."""
    products = [gemm_reference(a, b, alpha=alpha, out_dtype=torch.float64) for b in weights.values()]
    if len(products) == 1:
        rows = INTERLEAVED_ROWS if interleaved else n
        both = products[0].unflatten(-1, (-1, 2, rows))
        products = [both[..., i, :].flatten(-2) for i in (0, 1)]
    return GATES[gate](products[0]) * products[1]


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
