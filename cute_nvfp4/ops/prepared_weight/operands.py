"""Operands of a product with a prepared weight: the checks, and where a kernel finds x: as it is, decoded by an earlier
launch, or in FP8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...errors import OperandError, OperandTypeError
from ...formats import NVFP4
from ...grouped_rows import GroupedRows
from ...kernels.dequantize.config import DequantizeArguments, DequantizeConfig, GroupRowsArguments
from ...kernels.gemm.sm90.arguments import RowScales, RowsOfX
from ...kernels.quantize.fp8_config import Fp8RowsArguments, Fp8RowsConfig, short_rows_config
from ...operand import BlockScaledTensor, row_alignment
from ...prepared_weight import PreparedWeight
from ...reference import GATES, times
from ...row_scaled import RowScaledTensor
from ...target import Target
from ...weight_layout import DTYPES
from ..checks import DTYPE_NAMES, check_format, check_gate, check_rows_aligned, factors_of
from ..dequantize import dequantization, group_rows_dequantization
from ..operator import refuse_gradients
from ..quantize_rows import check_rows

X = torch.Tensor | BlockScaledTensor | RowScaledTensor
"""Values in the weight's dtype, a block-scaled operand, or FP8 rows."""
MMA_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
"""The names that configurations use for the dtype in which a weight is multiplied."""


def check_no_gradient(x: X) -> None:
    """Raises if autograd follows x, whose rows are rounded to FP8."""
    if torch.is_grad_enabled():
        refuse_gradients({"a": x})


def check_products(weight: PreparedWeight, gate: str) -> None:
    """Raises unless a gated weight meets a gate, and any other weight none."""
    if gate:
        check_gate(gate)
    if weight.gated != bool(gate):
        kinds = "one weight", "gate and up"
        raise OperandError.of(
            "prepared weight",
            got=kinds[weight.gated],
            expected=kinds[bool(gate)],
            hint="gated_gemm takes prepare_weight(gate, up), gemm takes prepare_weight(weight).",
        )


def check_decodable(x: Any, weight: PreparedWeight) -> None:
    """Raises unless the weight's dtype can hold all values of a block-scaled x."""
    check_format("a", x)
    if weight.dtype is torch.float8_e4m3fn:
        hint = 'quantize(x, "fp8_e4m3") makes one.'
        raise OperandTypeError.of(
            "a", got=x.format.name, expected=f"rows in FP8 for a weight in {weight.dtype}", hint=hint
        )
    if x.format is not NVFP4 and weight.dtype is not torch.bfloat16:
        raise OperandTypeError.of(
            f"dtype of a weight prepared for {x.format.name}",
            got=weight.dtype,
            expected="torch.bfloat16, which has the range of UE8M0",
            hint="prepare_weight(weight, dtype=torch.bfloat16).",
        )


def check_x(x: X, weight: PreparedWeight, stack: bool = False) -> int:
    """M of x (M, K); raises unless x can be multiplied with ``weight``, or with the matrices of a stack."""
    if weight.is_batched != stack:
        expected = "a stack (E, N, K)" if stack else "a matrix (N, K)"
        hint = "prepare_weight takes stacks." if stack else "A stack is for grouped_gemm_contiguous."
        raise OperandError.of("b", got=repr(weight), expected=expected, hint=hint)
    if isinstance(x, RowScaledTensor):
        if weight.dtype is not torch.float8_e4m3fn:
            hint = "prepare_weight(weight, dtype=torch.float8_e4m3fn)."
            raise OperandTypeError.of(
                "dtype of a weight for rows in FP8", got=weight.dtype, expected="torch.float8_e4m3fn", hint=hint
            )
        shape, device = (x.rows, x.k), x.device
    elif isinstance(x, BlockScaledTensor):
        check_decodable(x, weight)
        shape, device = ((x.batch,) if x.is_batched else ()) + (x.rows, x.k), x.device
        if x.scale_layout != "blocked":
            raise OperandError.of(
                "scales of a",
                got=x.scale_layout,
                expected="blocked",
                hint="scale_layout.to_blocked(scale) makes them so.",
            )
    elif isinstance(x, torch.Tensor):
        shape, device = tuple(x.shape), x.device
        if weight.dtype is torch.float8_e4m3fn:
            check_rows(x)
        elif x.dtype is not weight.dtype:
            raise OperandTypeError.of(
                "dtype of a", got=x.dtype, expected=f"{weight.dtype}, which the weight was prepared for"
            )
        if x.ndim == 2:
            check_rows_aligned("a", x)
    else:
        raise OperandTypeError.of("a", got=type(x).__name__, expected="torch.Tensor or BlockScaledTensor")
    if len(shape) != 2 or shape[1] != weight.k or shape[0] < 1:
        raise OperandError.of("shape of a", got=shape, expected=f"(M, {weight.k}) with M ≥ 1")
    if device != weight.device:
        raise OperandError.of("device of a and b", got=f"{device} and {weight.device}", expected="the same")
    return shape[0]


def exact_values(a: X | GroupedRows, b: PreparedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of both in float64, without the scales by which ``exact_product`` multiplies sums."""
    wide = a.data if isinstance(a, RowScaledTensor) else a
    if isinstance(a, (BlockScaledTensor, GroupedRows)):
        scale = a.scale if isinstance(a, BlockScaledTensor) else a.rowmajor_scale()
        wide = BlockScaledTensor(a.data, scale, None, a.format).dequantize(torch.float64)
    return wide.double(), replace(b, global_scale=None, up_global_scale=None).dequantize(torch.float64)


def exact_product(
    a: X | GroupedRows,
    b: PreparedWeight,
    alpha: Any,
    gate: str,
    values: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """alpha · a · bᵀ, or gate(alpha · a · gateᵀ) · (alpha · a · upᵀ), in float64; scales multiply sums.

    values: from ``exact_values``, or some rows of its a and one matrix of its b.
    """
    left, right = values or exact_values(a, b)
    # the scale of an FP8 row is a factor of its sums
    scale = a.scale.unsqueeze(-1) if isinstance(a, RowScaledTensor) else getattr(a, "global_scale", None)
    sums = (left @ x.mT for x in (right if b.gated else (right,)))
    products = [times(x, alpha, scale, of_weight) for x, of_weight in zip(sums, b.global_scales)]
    return GATES[gate](products[0]) * products[1] if gate else products[0]


def of_problem(weight: Any, out: torch.Tensor, factors: Sequence[Any]) -> dict[str, Any]:
    """The fields of a problem that describe a weight and an output.

    weight: prepared, or ``Readable``. factors: the device scalars that multiply alpha.
    """
    return {
        "dtype": MMA_DTYPES[weight.dtype],
        "packing": weight.packing,
        "promoted": weight.promoted,
        "out": DTYPE_NAMES[out.dtype],
        "vector": row_alignment(out, 16) >= 16,
        "factors": len(factors),
    }


def row_stride(stride: int, rows: int, k: int) -> int:
    """Elements from a row of x to the next, for its tensor map. A single row has no stride, but a tensor map needs one,
    a multiple of 16 bytes."""
    return stride if rows > 1 else -(-k // 32) * 32


def factors_of_products(request: Any, products: int) -> tuple[float | str, tuple[tuple[str, ...], ...]]:
    """The alpha in a kernel's record, and for each product the names of the device scalars that multiply it."""
    scalar, shared = factors_of(request, "a")
    scales = ("b.global_scale", "b.up_global_scale")[:products]
    return scalar, tuple((*shared, scale) if request.b.global_scale is not None else shared for scale in scales)


class XRows(NamedTuple):
    """x (M, K) of a planned call, by the names of its tensors.

    data: the tensor of x. stride: elements from a row to the next. scales: those of the weight's rows and of x's rows,
    in FP8. first, floats: the kernel that first quantizes or decodes x, and its record; None: none runs. buffers: the
    scratch memory (``scratch_for``) that it fills. rows: x in NVFP4, if the kernel reads it as it lies. batch_stride:
    elements from a matrix to the next.
    """

    data: str
    stride: int
    scales: RowScales | None = None
    first: Fp8RowsConfig | DequantizeConfig | None = None
    floats: Fp8RowsArguments | DequantizeArguments | GroupRowsArguments | None = None
    buffers: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {}
    rows: RowsOfX | None = None
    batch_stride: int = 0

    @classmethod
    def of(cls, x: Any, weight: PreparedWeight, target: Target) -> XRows:
        """Makes it from ``a``. A first launch decodes block-scaled rows to scratch memory, or quantizes 16-bit rows
        there for an FP8 weight."""
        rows, k = len(x) if isinstance(x, torch.Tensor) else x.rows, weight.k
        if isinstance(x, RowScaledTensor):
            return cls("a.data", row_stride(x.data.stride(0), rows, k), RowScales("b.row_factor", "a.scale"))
        if isinstance(x, GroupedRows):
            return cls.of_groups(x, weight.dtype, target)
        if not isinstance(x, torch.Tensor):
            return cls.decoded_before(x, weight.dtype, target)
        stride = row_stride(x.stride(0), rows, k)
        if weight.row_factor is None:
            return cls("a", stride)
        floats = Fp8RowsArguments("a", "scratch.data", "scratch.scale", rows, k, stride * x.element_size())
        buffers = {"data": ((rows, k), torch.float8_e4m3fn), "scale": ((rows,), torch.float32)}
        scales = RowScales("b.row_factor", "scratch.scale")
        return cls("scratch.data", k, scales, short_rows_config(DTYPE_NAMES[x.dtype], k, target.arch), floats, buffers)

    @classmethod
    def decoded_before(cls, x: BlockScaledTensor, dtype: torch.dtype, target: Target, order: str = "columns") -> XRows:
        """Makes it from a block-scaled x (M, K) or (L, M, K), which a first launch decodes to scratch memory."""
        first, decode = dequantization(x.key, dtype, target, False, ("a", "scratch.x"), order)
        buffers = {"x": ((x.batch, x.rows, x.k), dtype)}
        return cls("scratch.x", x.k, None, first, decode, buffers, batch_stride=x.rows * x.k if x.batch > 1 else 0)

    @classmethod
    def of_groups(cls, x: GroupedRows, dtype: torch.dtype, target: Target, order: str = "columns") -> XRows:
        """Makes it from block-scaled rows of groups, which a first launch decodes to scratch memory."""
        first, decode = group_rows_dequantization(x, dtype, target, ("a", "scratch.x"), order)
        return cls("scratch.x", x.k, None, first, decode, {"x": ((x.rows, x.k), dtype)})

    @classmethod
    def in_16_bits(cls, x: torch.Tensor, weight: PreparedWeight) -> XRows:
        """Makes it from ``a`` as it is, for an FP8 weight that is decoded to 16 bits."""
        return cls("a", row_stride(x.stride(0), len(x), weight.k), RowScales("b.row_factor", None))


def natural_dtype(x: Any, weight: PreparedWeight) -> torch.dtype:
    """The dtype of a result by default: the weight's; for an FP8 weight x's 16-bit dtype, or bfloat16."""
    if weight.row_factor is None:
        return weight.dtype
    return x.dtype if isinstance(x, torch.Tensor) and x.dtype in DTYPE_NAMES else torch.bfloat16
