"""``rmsnorm_quantize`` and ``silu_mul_quantize`` of rows in FP8: E4M3 with a float32 scale for each row, one launch."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import OperandError
from ..kernels.quantize.fp8_config import (
    Fp8ComputedArguments,
    Fp8ComputedConfig,
    Fp8RowsArguments,
    OtherRows,
    can_implement,
    rows_config,
)
from ..kernels.quantize.fused import Matrix
from ..lazy import Lazily
from ..row_scaled import FP8
from ..runtime.kernel import Kernel
from ..target import Target
from .checks import DTYPE_NAMES
from .fused import FusedRequest, planned_call
from .planned import PlannedCall
from .quantize_launch import byte_strides
from .quantize_rows import check_out, check_rows, rows_of


def rows_in_fp8(r: Any, matrices: tuple[torch.Tensor | None, ...], values: bool) -> FusedRequest:
    """What a request for rows in FP8 asks for: all ``matrices`` are bfloat16 or float16. values: whether what is
    quantized is wanted, too, which these rows do not have, nor any other option."""
    if (r.global_scale, r.rule, r.scale_layout, values) != (None, "max", "blocked", False):
        got = f"global_scale={r.global_scale!r}, rule={r.rule!r}, scale_layout={r.scale_layout!r}, values {values}"
        raise OperandError.of(f"options for {FP8}", got=got, expected="global_scale=None, and no other option")
    for x in matrices:
        if x is not None:
            check_rows(x if r[0].ndim == 2 else x[0])
    check_out(r.out, matrices[0])
    return FusedRequest(matrices, None, FP8)


def fp8_call(operation: Any, source: str, r: Any, target: Target, **own: Any) -> PlannedCall:
    """The planned call of one launch. source: what is computed, as in ``Fp8ComputedConfig``. own: fields of the record,
    of which matrices are as the other formats have them."""
    x = r.described.matrices[0]
    like, made = rows_of(x)
    has = {name for name, field in own.items() if field is not None}
    variant = {"source": source, "residual": "residual" in has, "weighted": "weight" in has}
    config = Fp8ComputedConfig(**vars(rows_config(DTYPE_NAMES[x.dtype], x.shape[1], target.arch)), **variant)
    rows = Fp8RowsArguments(operation.fields[0], "out.data", "out.scale", *x.shape, byte_strides(x).row)
    others = {name: OtherRows(x.pointer, x.strides.row) for name, x in own.items() if isinstance(x, Matrix)}
    arguments = Fp8ComputedArguments(**dict.fromkeys(Fp8ComputedArguments._fields) | own | others | {"rows": rows})
    out = like if r.out is None else r.out
    return planned_call(operation, KERNEL, config, target, arguments, r, out, new_of=made)


KERNEL = Kernel(
    "quantize_fp8_computed", Fp8ComputedArguments, Lazily("kernels.quantize.fp8_computed", "Fp8Computed"), can_implement
)
