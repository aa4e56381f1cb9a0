"""Where a kernel finds x of a product with a prepared weight: as it is, decoded before, or in FP8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...grouped_rows import GroupedRows
from ...kernels.dequantize.config import DequantizeArguments, DequantizeConfig, GroupRowsArguments
from ...kernels.gemm.sm90.arguments import RowScales, RowsOfX
from ...kernels.quantize.fp8_config import Fp8RowsArguments, Fp8RowsConfig, short_rows_config
from ...operand import BlockScaledTensor
from ...prepared_weight import PreparedWeight
from ...row_scaled import RowScaledTensor
from ...target import Target
from ..checks import DTYPE_NAMES
from ..dequantize import dequantization, group_rows_dequantization
from .operands import row_stride


class XRows(NamedTuple):
    """x (M, K) of a planned call, by names of its tensors. stride: elements from a row to the next. scales: of the
    weight's rows and of x's, in FP8. first, floats: the kernel that quantizes or decodes x before, and its record, or
    None;
    places: the scratch memory (``scratch_for``) that it fills. rows: x in NVFP4, where the kernel reads it as it lies.
    batch_stride: elements from a matrix to the next."""

    data: str
    stride: int
    scales: RowScales | None = None
    first: Fp8RowsConfig | DequantizeConfig | None = None
    floats: Fp8RowsArguments | DequantizeArguments | GroupRowsArguments | None = None
    places: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {}
    rows: RowsOfX | None = None
    batch_stride: int = 0

    @classmethod
    def of(cls, x: Any, weight: PreparedWeight, target: Target) -> XRows:
        """Makes it of ``a``, which a launch before decodes to scratch memory where it is block-scaled, and for a weight
        for FP8 is in FP8, or in 16 bits and then quantized to scratch memory."""
        rows, k = len(x) if isinstance(x, Tensor) else x.rows, weight.k
        if isinstance(x, RowScaledTensor):
            return cls("a.data", row_stride(x.data.stride(0), rows, k), RowScales("b.row_factor", "a.scale"))
        if isinstance(x, GroupedRows):
            return cls.of_groups(x, weight.dtype, target)
        if not isinstance(x, Tensor):
            return cls.decoded_before(x, weight.dtype, target)
        stride = row_stride(x.stride(0), rows, k)
        if weight.row_factor is None:
            return cls("a", stride)
        floats = Fp8RowsArguments("a", "scratch.data", "scratch.scale", rows, k, stride * x.element_size())
        places = {"data": ((rows, k), torch.float8_e4m3fn), "scale": ((rows,), torch.float32)}
        scales = RowScales("b.row_factor", "scratch.scale")
        return cls("scratch.data", k, scales, short_rows_config(DTYPE_NAMES[x.dtype], k, target.arch), floats, places)

    @classmethod
    def decoded_before(cls, x: BlockScaledTensor, dtype: torch.dtype, target: Target, order: str = "columns") -> XRows:
        """Makes it of a block-scaled x (M, K) or (L, M, K), which a launch before decodes to scratch memory."""
        first, decode = dequantization(x.key, dtype, target, False, ("a", "scratch.x"), order)
        places = {"x": ((x.batch, x.rows, x.k), dtype)}
        return cls("scratch.x", x.k, None, first, decode, places, batch_stride=x.rows * x.k if x.batch > 1 else 0)

    @classmethod
    def of_groups(cls, x: GroupedRows, dtype: torch.dtype, target: Target, order: str = "columns") -> XRows:
        """Makes it of block-scaled rows of groups, which a launch before decodes to scratch memory."""
        first, decode = group_rows_dequantization(x, dtype, target, ("a", "scratch.x"), order)
        return cls("scratch.x", x.k, None, first, decode, {"x": ((x.rows, x.k), dtype)})

    @classmethod
    def in_16_bits(cls, x: Tensor, weight: PreparedWeight) -> XRows:
        """Makes it of ``a`` as it is, for a weight for FP8 that is decoded to 16 bits."""
        return cls("a", row_stride(x.stride(0), len(x), weight.k), RowScales("b.row_factor", None))


def natural_dtype(x: Any, weight: PreparedWeight) -> torch.dtype:
    """The dtype of a result for which nobody asks another: that of the products, or in FP8 that of x, or bfloat16."""
    if weight.row_factor is None:
        return weight.dtype
    return x.dtype if isinstance(x, Tensor) and x.dtype in DTYPE_NAMES else torch.bfloat16
