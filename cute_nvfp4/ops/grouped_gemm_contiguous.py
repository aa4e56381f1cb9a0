"""grouped_gemm_contiguous: validate, plan once, compile once, launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..operand import BlockScaledTensor
from ..planning.gemm_problem import Plan
from ..prepared_weight import PreparedWeight
from ..reference import gemm_reference
from ..runtime.backend import Backend, resolve
from ..runtime.bounded import Bounded
from ..runtime.simulating import world
from ..target import Target
from .calls import GivenOutput, allocator, as_alpha, output_key, tensor_key
from .checks import check_format, checked_output, parts, refuse_config, refuse_gate, split_alpha
from .dispatch import by_operator, written_to
from .grouped_launch import ContiguousCall
from .grouped_rows import GroupedRows, clamped, wrong_offset
from .groups import alpha_of_group, check_rows
from .library import grouped as operators
from .library import packed_groups as packed_operators
from .operands import check_operands, check_signs
from .packed_rows import checked_status, offsets_of, packed_rows


def grouped_gemm_contiguous(
    a: GroupedRows | torch.Tensor,
    b: BlockScaledTensor | PreparedWeight,
    *,
    offsets: Sequence[int] | torch.Tensor | None = None,
    gate: str = "",
    alpha: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    status: torch.Tensor | None = None,
    config: Plan | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Rows of group e of A times the matrix e of a stack B: C[r] = alphaₑ · A[r] · B[e]ᵀ, (T, N), a mixture of experts.

    Args:
        a: rows (T, K) of E groups with their offsets; b: (E, N, K), of the same format. Groups may have no rows. Or b
            is a ``PreparedWeight`` (E, N, K) on sm_90a, and a is numbers (T, K) of its dtype, or NVFP4.
        offsets: of a that is numbers, as those of ``GroupedRows``.
        gate: with a prepared weight of gate and up, the result is gate(A · gateᵀ) ∘ (A · upᵀ): as in ``gated_gemm``.
        alpha: a number, or a float32 tensor on the operands' device of one element, or of one for each group.
        out, out_dtype, config, backend: as in ``grouped_gemm``. Rows of no group are not written.
        status: (1,) int32 on the device, in which the kernel leaves 0; or i + 1 if offsets[i] is the first offset that
            is negative, less than the one before it, or more than T; or -1 if ``a.scale`` has fewer atoms than the
            groups have. Offsets are used as max(0, all up to it), at most T, so that nothing is read or written out of
            bounds whatever they are; scales that are not there are zeros.

    The host never reads the offsets and never waits. The plan is made for even shares of the rows.

    Raises:
        OperandError, OperandTypeError: as ``gemm``.
    """
    if isinstance(b, PreparedWeight):
        numbers = a if isinstance(a, torch.Tensor) else None
        if by_operator((b,) if numbers is not None else (a, b), numbers, alpha, out, b.up_global_scale):
            edges = offsets_of(a, offsets)
            return packed_operators.packed_rows(a, b, edges, alpha, out, out_dtype, status, config, backend, gate)
        result = packed_rows(a, b, offsets, alpha, out, out_dtype, status, config, backend, gate)
        if out is not None and torch.is_grad_enabled():
            written_to(out)
        return result
    refuse_gate(gate)
    if offsets is not None:
        raise OperandError.of("offsets", got=type(offsets).__name__, expected="None: GroupedRows have their own")
    if by_operator((a, b), alpha, out):
        return operators.grouped_gemm_contiguous(a, b, alpha, out, out_dtype, status, config, backend)
    if not isinstance(a, GroupedRows) or not isinstance(b, BlockScaledTensor):
        got = f"{type(a).__name__} and {type(b).__name__}"
        raise OperandTypeError.of("a and b", got=got, expected="GroupedRows and BlockScaledTensor")
    key = (
        *(a.key, b.key, tensor_key(alpha), output_key(out), out_dtype, tensor_key(status)),
        *(backend, config, world(b.key.on_cpu)),
    )
    call = _calls.find(key)
    if call is None:
        call = _calls[key] = _plan(a, b, alpha, out, out_dtype, status, backend, config)
    result = call(a, b, alpha, out, status)
    if out is not None and torch.is_grad_enabled():
        written_to(out)
    return result


_calls = Bounded()


def _plan(
    a: GroupedRows,
    b: BlockScaledTensor,
    alpha: Any,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    status: torch.Tensor | None,
    backend: Backend,
    config: Plan | None,
) -> Callable[..., torch.Tensor]:
    """The call for these operands and all like them, which it checks."""
    same = {
        "K of a and b": (a.k, b.k),
        "groups of a and matrices of b": (a.groups, b.batch),
        "device of a and b": (a.device, b.device),
    }
    for what, (left, right) in same.items():
        if left != right:
            raise OperandError.of(what, got=f"{left} and {right}", expected="the same")
    for name, operand in (("a", a), ("b", b)):
        check_format(name, operand)
    _, alpha = split_alpha(alpha, a.device, a.groups)
    out = checked_output(_inputs(a, b, alpha), a.device, (a.rows, b.rows), out, out_dtype)
    check_rows("out", out)
    checked_status(status, a.device)
    target = resolve(backend, a.device)
    if target.backend == "reference":
        refuse_config(config)
        return functools.partial(_reference_call, dtype=out.dtype)
    check_operands({"a": a, "b": b}, target.backend)
    return _Call(a, b, out, alpha, target, config)


class _Call:
    """A planned call: the kernel, and what to check before it runs."""

    def __init__(
        self,
        a: GroupedRows,
        b: BlockScaledTensor,
        out: torch.Tensor,
        alpha: torch.Tensor | None,
        target: Target,
        config: Plan | None,
    ) -> None:
        self._launch = ContiguousCall(a, b, out, alpha, target, config)
        self._new = allocator(torch.empty(out.shape, dtype=out.dtype, device=out.device))
        self._output = GivenOutput(_inputs(a, b, alpha), out)
        self._simulated = target.backend == "sim"

    def __call__(
        self,
        a: GroupedRows,
        b: BlockScaledTensor,
        alpha: Any,
        out: torch.Tensor | None,
        status: torch.Tensor | None,
    ) -> torch.Tensor:
        scalar, alpha = as_alpha(alpha)
        if out is None:
            out = self._new()
        else:
            self._output.check(_inputs(a, b, alpha), out)
        if self._simulated:
            check_signs("a", a)
            check_signs("b", b)
        self._launch(a, b, out, checked_status(status, a.device) if status is None else status, scalar, alpha)
        return out


def _inputs(a: GroupedRows, b: BlockScaledTensor, alpha: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    return {**parts({"a": a, "b": b}), "a.offsets": a.offsets, "alpha": alpha}


def _reference_call(
    a: GroupedRows,
    b: BlockScaledTensor,
    alpha: Any,
    out: torch.Tensor | None,
    status: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    scalar, alpha = as_alpha(alpha)
    out = checked_output(_inputs(a, b, alpha), a.device, (a.rows, b.rows), out, dtype)
    alpha = alpha if alpha is None else alpha.reshape(-1)
    return _reference(a, b, scalar, alpha, out, checked_status(status, a.device))


def _reference(
    a: GroupedRows,
    b: BlockScaledTensor,
    scalar: float,
    alpha: torch.Tensor | None,
    out: torch.Tensor,
    status: torch.Tensor,
) -> torch.Tensor:
    """Group by group in float64. Reads the offsets, so it waits for the device."""
    edges, scales = clamped(a.offsets, a.rows).tolist(), b.rowmajor_scale()
    atom = 0
    for e, (start, end) in enumerate(pairwise(edges)):
        if end > start:
            rows = a.matrix(start, end, atom)
            weights = BlockScaledTensor(b.data[e] if b.is_batched else b.data, scales[e], b.global_scale, b.format)
            out[start:end] = gemm_reference(rows, weights, alpha=alpha_of_group(scalar, alpha, e), out_dtype=out.dtype)
        atom += -(-(end - start) // 128)
    status.fill_(wrong_offset(a.offsets.tolist(), a.rows) or (-1 if atom > a.atoms else 0))
    return out
