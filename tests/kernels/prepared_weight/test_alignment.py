"""Block-scaled x at addresses that only their decoder can read: multiples of 8 bytes, where TMA needs 16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import backends
from support.packed_problems import gated_product, operand, within

from cute_nvfp4 import (
    BlockScaledTensor,
    GroupedRows,
    gated_gemm,
    gemm,
    grouped_gemm,
    grouped_gemm_contiguous,
    prepare_weight,
    simulating,
)

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("hopper")]
N, K = 48, 128
F32 = {"out_dtype": torch.float32}


def moved(x: BlockScaledTensor, apart: int = 0) -> BlockScaledTensor:
    """x eight bytes behind a multiple of 32, with so many bytes between its rows."""
    rows, columns = x.data.shape
    room = torch.full((8 + rows * (columns + apart),), 0x77, dtype=torch.uint8, device=x.device)
    data = room[8:].view(rows, -1)[:, :columns]
    data.copy_(x.data)
    return BlockScaledTensor(data, x.scale, x.global_scale)


def by_groups(x: BlockScaledTensor, b: Any) -> torch.Tensor:
    return grouped_gemm_contiguous(GroupedRows.of(x, [0, x.rows]), b, **F32)


CALLS: dict[str, Callable[[BlockScaledTensor, Any], torch.Tensor]] = {
    "gemm": lambda x, b: gemm(x, b, **F32),
    "list": lambda x, b: grouped_gemm([(x, b)], **F32)[0],
    "rows of groups": by_groups,
}


@pytest.mark.parametrize("m, apart", [(1, 0), (3, 0), (3, 8)])
@pytest.mark.parametrize("name", CALLS)
def test_products(name: str, m: int, apart: int) -> None:
    generator = torch.Generator().manual_seed(m)
    x, weight = operand((m, K), generator), operand((1, N, K) if name == "rows of groups" else (N, K), generator)
    left, right = x.dequantize(torch.float64), weight.dequantize(torch.float64).reshape(N, K)
    with simulating():
        out = CALLS[name](moved(x, apart), prepare_weight(weight, dtype=torch.float16))
    assert within(out, left @ right.t(), left.abs() @ right.abs().t())


def test_gated() -> None:
    generator = torch.Generator().manual_seed(5)
    x, gate, up = (operand((rows, K), generator) for rows in (1, N, N))
    left, *weights = (v.dequantize(torch.float64) for v in (x, gate, up))
    wanted = gated_product(left, weights, 1e-4, "silu")
    with simulating():
        out = gated_gemm(moved(x), prepare_weight(gate, up, dtype=torch.float16), alpha=1e-4, **F32)
    assert wanted.right(out)


def test_aligned_rows_are_read_as_they_are() -> None:
    """One launch, where x that is not aligned takes one more."""
    generator = torch.Generator().manual_seed(6)
    x, weight = operand((1, K), generator), prepare_weight(operand((N, K), generator), dtype=torch.float16)
    for given, launches in ((x, 1), (moved(x), 2)):
        with simulating() as runs:
            gemm(given, weight, **F32)
        assert len(runs) == launches * (backends.backend() == "sim")
