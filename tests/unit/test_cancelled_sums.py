"""Exact torch where the terms of every sum cancel: 0, whatever global scales and alpha multiply it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.packed_problems import operand

from cute_nvfp4 import (
    BlockScaledTensor,
    GroupedRows,
    gated_gemm,
    gemm,
    gemv,
    grouped_gemm,
    grouped_gemm_contiguous,
    prepare_weight,
    quantize,
    to_blocked,
)
from cute_nvfp4.formats import as_bytes

ROWS, K = 32, 128
OPTIONS = {"alpha": 2e17, "out_dtype": torch.float32, "backend": "reference"}
SIGNS = 0x88


def twice(x: BlockScaledTensor, flipped: int) -> BlockScaledTensor:
    """x beside itself along K, there with those bits flipped."""
    scale = as_bytes(x.rowmajor_scale()).reshape(ROWS, -1)
    data = torch.cat([x.data, x.data ^ flipped], 1)
    return quantized(data, torch.cat([scale, scale], 1), x.global_scale)


def quantized(data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None) -> BlockScaledTensor:
    """With blocked scales."""
    return BlockScaledTensor(data, to_blocked(scale), global_scale)


def stack(x: BlockScaledTensor) -> BlockScaledTensor:
    scale = as_bytes(x.rowmajor_scale()).reshape(1, ROWS, -1)
    return quantized(x.data.unsqueeze(0), scale, x.global_scale)


def values(x: BlockScaledTensor) -> torch.Tensor:
    return BlockScaledTensor(x.data, x.scale).dequantize(torch.bfloat16)


def weight(x: BlockScaledTensor, gated: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    return prepare_weight(*(x,) * (1 + gated), dtype=dtype, backend="reference")


def by_groups(a: Any, b: Any) -> torch.Tensor:
    offsets = [0, ROWS]
    if isinstance(a, BlockScaledTensor):
        return grouped_gemm_contiguous(GroupedRows.of(a, offsets), b, **OPTIONS)
    return grouped_gemm_contiguous(a, b, offsets=torch.tensor(offsets, dtype=torch.int32), **OPTIONS)


E4M3 = torch.float8_e4m3fn
CALLS: dict[str, Callable[[BlockScaledTensor, BlockScaledTensor], torch.Tensor]] = {
    "gemm": lambda a, b: gemm(a, b, **OPTIONS),
    "gemm with bias": lambda a, b: gemm(a, b, bias=torch.zeros(ROWS), **OPTIONS),
    "gemv": lambda a, b: gemv(a, b, **OPTIONS),
    "gated_gemm": lambda a, b: gated_gemm(a, b, b, gate="identity", **OPTIONS),
    "grouped_gemm": lambda a, b: grouped_gemm([(a, b)], **OPTIONS)[0],
    "prepared": lambda a, b: gemm(a, weight(b), **OPTIONS),
    "prepared, floats": lambda a, b: gemm(values(a), weight(b), **OPTIONS),
    "prepared, FP8": lambda a, b: gemm(quantize(values(a), "fp8_e4m3"), weight(b, dtype=E4M3), **OPTIONS),
    "prepared, gated": lambda a, b: gated_gemm(a, weight(b, True), gate="identity", **OPTIONS),
    "prepared, list": lambda a, b: grouped_gemm([(a, weight(b))], **OPTIONS)[0],
    "prepared, gated list": lambda a, b: grouped_gemm([(a, weight(b, True))], gate="identity", **OPTIONS)[0],
    "rows of groups": lambda a, b: by_groups(a, stack(b)),
    "prepared, rows of groups": lambda a, b: by_groups(a, weight(stack(b))),
    "prepared, floats of groups": lambda a, b: by_groups(values(a), weight(stack(b))),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_sum_that_is_zero_stays_zero(name: str) -> None:
    generator = torch.Generator().manual_seed(28)
    a, b = (operand((ROWS, K), generator, factor) for factor in (1e20, 3e35))
    a = twice(a, 0)
    assert (CALLS[name](a, twice(b, SIGNS)) == 0).all()
    assert (CALLS[name](a, twice(b, 0)) != 0).any()
