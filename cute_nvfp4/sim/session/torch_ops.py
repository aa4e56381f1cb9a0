"""Operators of torch that a GPU computes differently from the CPU, or that only a GPU has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from cute_nvfp4.errors import TargetError

Operator = Callable[..., torch.Tensor]
_NARROW = {torch.float16, torch.bfloat16}


def host_operators() -> dict[Any, Operator]:
    """Maps operator overloads to the functions that compute them on host tensors."""
    aten, table = torch.ops.aten, {}
    for name in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "addmv"):
        packet = getattr(aten, name)
        table[packet.default] = _accumulating_wide(packet.default)
        table[packet.out] = _writing(table[packet.default])
        if "dtype" in packet.overloads():
            table[packet.dtype] = _with_dtype(packet.default)
            table[packet.dtype_out] = _writing(table[packet.dtype])
    table[aten._grouped_mm.default] = grouped_mm
    table[aten._scaled_grouped_mm.default] = scaled_grouped_mm
    return table


def _accumulating_wide(product: Operator) -> Operator:
    """Returns ``product`` with sums of 16-bit floats in binary32 and one final rounding, as in cuBLAS."""

    def wide(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = {a.dtype for a in args if isinstance(a, torch.Tensor)}
        if len(found) != 1 or not found <= _NARROW:
            return product(*args, **kwargs)
        return product(*_widened(args), **kwargs).to(found.pop())

    return wide


def _with_dtype(product: Operator) -> Operator:
    """Returns ``product`` computed in binary32, with the result in the dtype that is among its arguments."""

    def typed(*args: Any, **kwargs: Any) -> torch.Tensor:
        (dtype,) = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
        kept = [a for a in args if not isinstance(a, torch.dtype)]
        kwargs.pop("out_dtype", None)
        return product(*_widened(kept), **kwargs).to(dtype)

    return typed


def _writing(operator: Operator) -> Operator:
    def into(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        result = operator(*args, **kwargs)
        return out.resize_(result.shape).copy_(result)

    return into


def _widened(values: Iterable[Any]) -> list[Any]:
    return [v.float() if isinstance(v, torch.Tensor) and v.dtype in _NARROW else v for v in values]


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes ``torch._grouped_mm`` in binary32: one matrix product for each group.

    ``offs`` (G,) has the ends of the groups: along M for (M, K) × (G, K, N), along N for (G, M, K) × (K, N), and along
    K for (M, K) × (K, N). The batch (G, M, K) × (G, K, N) does not use it."""
    left, right = a.float(), b.float()
    if a.dim() == b.dim() == 3:
        out = torch.bmm(left, right)
    else:
        ends = offs.tolist()
        groups = [slice(begin, end) for begin, end in zip([0, *ends], ends)]
        if a.dim() == b.dim() == 2:
            out = torch.stack([left[:, g] @ right[g] for g in groups])
        elif a.dim() == 2:
            out = left.new_zeros(a.shape[0], b.shape[2])
            for i, g in enumerate(groups):
                out[g] = left[g] @ right[i]
        else:
            out = left.new_zeros(a.shape[1], b.shape[1])
            for i, g in enumerate(groups):
                out[:, g] = left[i] @ right[:, g]
    out = out if bias is None else out + bias.float()
    return out.to(out_dtype or a.dtype)


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Computes ``torch._scaled_grouped_mm`` with a float32 scale for each row of ``a`` and each column of ``b``.

    Raises ``TargetError`` for scales of other types and for groups along K.
    """
    if scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32 or (a.dim() == 2 and b.dim() == 2):
        raise TargetError.of(
            "torch._scaled_grouped_mm in a simulated session",
            got=f"{scale_a.dtype} scales, operands of {a.dim()} and {b.dim()} dimensions",
            expected="a float32 scale a row or column, and groups of rows or columns",
        )
    left = a.float() * scale_a.unsqueeze(-1)
    right = b.float() * scale_b.unsqueeze(-2)
    return grouped_mm(left, right, offs, bias, out_dtype or torch.bfloat16)
