"""Where a kernel finds x of a product with a weight for FP8: rows in E4M3, or 16 bits that are quantized first."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.gemm.sm90.arguments import RowScales
from ...kernels.quantize.fp8_config import Fp8RowsArguments, Fp8RowsConfig, rows_config
from ...prepared_weight import PreparedWeight
from ...row_scaled import RowScaledTensor
from ...target import Architecture
from ..checks import DTYPE_NAMES
from ..scratch import LikeScratch
from .operands import row_stride


class LikeRows(NamedTuple):
    """Scratch memory with places for x (M, K) in FP8 and its scales."""

    sums: Tensor
    flags: Tensor
    data: Tensor
    scale: Tensor

    @classmethod
    def of(cls, rows: tuple[int, int], device: torch.device | str = "meta", scratch: Any = None) -> LikeRows:
        """New places for so many rows, beside ``scratch``."""
        scratch = scratch or LikeScratch()
        data = torch.empty(rows, dtype=torch.float8_e4m3fn, device=device)
        return cls(scratch.sums, scratch.flags, data, torch.empty(rows[0], dtype=torch.float32, device=device))


class Fp8Rows(NamedTuple):
    """x (M, K) in E4M3 of a planned call, by names of its tensors. stride: elements from a row to the next. scales: of
    the weight's rows and of x's. first, floats: the kernel that quantizes x before, and its record, or None."""

    data: str
    stride: int
    scales: RowScales
    first: Fp8RowsConfig | None = None
    floats: Fp8RowsArguments | None = None

    @classmethod
    def of(cls, x: RowScaledTensor | Tensor, weight: PreparedWeight, arch: Architecture) -> Fp8Rows:
        """Makes it of ``a``, which is in FP8, or in 16 bits and then quantized to ``scratch`` (``LikeRows``)."""
        rows, k = len(x) if isinstance(x, Tensor) else x.rows, weight.k
        if isinstance(x, RowScaledTensor):
            return cls("a.data", row_stride(x.data.stride(0), rows, k), RowScales("b.row_factor", "a.scale"))
        scales, stride = RowScales("b.row_factor", "scratch.scale"), row_stride(x.stride(0), rows, k)
        floats = Fp8RowsArguments("a", "scratch.data", scales.x, rows, k, stride * x.element_size())
        return cls("scratch.data", k, scales, rows_config(DTYPE_NAMES[x.dtype], k, arch), floats)


def natural_dtype(x: Any, weight: PreparedWeight) -> torch.dtype:
    """The dtype of a result for which nobody asks another: that of the products, or in FP8 that of x, or bfloat16."""
    if weight.row_factor is None:
        return weight.dtype
    return x.dtype if isinstance(x, Tensor) and x.dtype in DTYPE_NAMES else torch.bfloat16
