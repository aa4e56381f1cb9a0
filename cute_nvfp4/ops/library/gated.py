"""The operators ``gated_gemm`` and ``gated_gemm_quantized``."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import OperandError, OperandTypeError
from ...formats import NVFP4
from ...operand import BlockScaledTensor
from ...scale_layout import blocked_bytes, blocked_flat, blocked_view
from ..checks import check_product, split_alpha
from ..quantize_request import checked_global_scale
from .registration import call, define, either, new, operand, refuse_gradients, tensors_of

_OPS = torch.ops.cute_nvfp4
_TENSORS = (
    "Tensor a, Tensor a_scale, Tensor b1, Tensor b1_scale, Tensor? b2=None, Tensor? b2_scale=None, "
    "Tensor? a_global_scale=None, Tensor? b1_global_scale=None, Tensor? b2_global_scale=None, "
    "Tensor? alpha_tensor=None"
)
_OPTIONS = (
    'float alpha=1.0, str gate="silu", bool interleaved=False, str a_format="nvfp4", str b_format="nvfp4", '
    'str backend="auto"'
)


def gated_gemm(
    a: Any,
    b1: Any,
    b2: Any,
    gate: str,
    alpha: Any,
    interleaved: bool,
    out: Any,
    out_dtype: torch.dtype | None,
    out_global_scale: Any,
    config: Any,
    backend: str,
) -> torch.Tensor | BlockScaledTensor:
    """``ops.gated_gemm.gated_gemm`` by its operators."""
    second = (None, None, None) if b2 is None else (*tensors_of("b2", b2), b2.global_scale)
    tensors = [*tensors_of("a", a), *tensors_of("b1", b1), *second[:2], a.global_scale, b1.global_scale, second[2]]
    scalar, alpha_tensor = split_alpha(alpha, a.device)
    tensors.append(alpha_tensor)
    options = {"alpha": scalar, "gate": gate, "interleaved": interleaved, "backend": backend}
    options |= {"a_format": a.format.name, "b_format": b1.format.name}
    if out_global_scale is None and not isinstance(out, BlockScaledTensor):
        written = None if out is None else {"out": out}
        result = call(_OPS.gated_gemm, tensors, options | {"out_dtype": out_dtype}, config, written)
        return result if out is None else out
    return _quantized(tensors, options, config, out, out_dtype, out_global_scale)


def _quantized(
    tensors: list, options: dict, config: Any, out: Any, out_dtype: Any, out_global_scale: Any
) -> BlockScaledTensor:
    if out_dtype is not None:
        raise OperandTypeError.of("out_dtype", got=out_dtype, expected="None for a quantized result")
    if out is not None:
        if not isinstance(out, BlockScaledTensor):
            got = type(out).__name__
            raise OperandTypeError.of("out", got=got, expected="BlockScaledTensor, for a quantized result")
        if out_global_scale is not None or out.global_scale is None:
            got = (
                f"{'none' if out_global_scale is None else 'one'}, and {'none' if out.global_scale is None else 'one'}"
            )
            raise OperandError.of("out_global_scale, and that of out", got=got, expected="none, and one")
        data, scale = tensors_of("out", out)
        written = {"out": data, "out_scale": scale}
        call(_OPS.gated_gemm_quantized, [*tensors, out.global_scale], options, config, written)
        return out
    if torch.is_grad_enabled():
        refuse_gradients({"out_global_scale": out_global_scale})
    value = checked_global_scale(out_global_scale, tensors[0].device)
    data, scale = call(_OPS.gated_gemm_quantized, [*tensors, value], options, config, None)
    rows, batch = data.shape[-2], data.shape[0] if data.ndim == 3 else 1
    columns = data.shape[-1] // NVFP4.block_bytes
    return BlockScaledTensor(data, blocked_view(scale, rows, columns, batch), value, NVFP4)


def _operands(
    a, a_scale, b1, b1_scale, b2, b2_scale, a_global_scale, b1_global_scale, b2_global_scale, a_format, b_format
) -> list[BlockScaledTensor]:
    operands = [operand(a, a_scale, a_global_scale, a_format), operand(b1, b1_scale, b1_global_scale, b_format)]
    return operands if b2 is None else [*operands, operand(b2, b2_scale, b2_global_scale, b_format)]


def _gated_gemm(
    a,
    a_scale,
    b1,
    b1_scale,
    b2=None,
    b2_scale=None,
    a_global_scale=None,
    b1_global_scale=None,
    b2_global_scale=None,
    alpha_tensor=None,
    *,
    alpha=1.0,
    a_format="nvfp4",
    b_format="nvfp4",
    **options: Any,
) -> Any:
    from ..gated_gemm import gated_gemm

    scales = a_global_scale, b1_global_scale, b2_global_scale
    operands = _operands(a, a_scale, b1, b1_scale, b2, b2_scale, *scales, a_format, b_format)
    return gated_gemm(*operands, alpha=either(alpha, alpha_tensor), **options)


def _shape(
    a,
    a_scale,
    b1,
    b1_scale,
    b2=None,
    b2_scale=None,
    a_global_scale=None,
    b1_global_scale=None,
    b2_global_scale=None,
    a_format="nvfp4",
    b_format="nvfp4",
) -> tuple[int, ...]:
    """(L, M, N) or (M, N) of operands that fit together."""
    scales = a_global_scale, b1_global_scale, b2_global_scale
    x, *weights = _operands(a, a_scale, b1, b1_scale, b2, b2_scale, *scales, a_format, b_format)
    check_product(x, {f"b{i + 1}": weight for i, weight in enumerate(weights)})
    n = b1.shape[-2] if len(weights) == 2 else b1.shape[-2] // 2
    return (*a.shape[:-1], n)


def _fake(*args: Any, out_dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    formats = {name: options[name] for name in ("a_format", "b_format") if name in options}
    return new(args[0], _shape(*args[:9], **formats), out_dtype)


define(
    "gated_gemm",
    f"{_TENSORS}, *, {_OPTIONS}, ScalarType? out_dtype=None",
    "Tensor",
    {"out": "Tensor(a!)"},
    _gated_gemm,
    _fake,
)


def _gated_gemm_quantized(*args: Any, out: Any = None, out_scale: Any = None, **options: Any) -> Any:
    *tensors, out_global_scale = args
    if out is not None:
        result = BlockScaledTensor(out, out_scale, out_global_scale, NVFP4)
        return _gated_gemm(*tensors, out=result, **options)
    made = _gated_gemm(*tensors, out_global_scale=out_global_scale, **options)
    return made.data, blocked_flat(made.scale)


def _fake_quantized(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    formats = {name: options[name] for name in ("a_format", "b_format") if name in options}
    *rows, n = _shape(*args[:9], **formats)
    data = args[0].new_empty((*rows, NVFP4.data_columns(n)), dtype=torch.uint8)
    size = blocked_bytes(rows[-1], NVFP4.scale_columns(n), rows[0] if len(rows) == 2 else 1)
    return data, args[0].new_empty(size, dtype=torch.uint8)


define(
    "gated_gemm_quantized",
    _TENSORS.replace("=None", "") + f", Tensor out_global_scale, *, {_OPTIONS}",
    "(Tensor, Tensor)",
    {"out": "Tensor(a!)", "out_scale": "Tensor(b!)"},
    _gated_gemm_quantized,
    _fake_quantized,
)
