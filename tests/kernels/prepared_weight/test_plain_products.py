"""Gated and grouped products of block-scaled operands on sm_90a, whose weights each call packs, against exact torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import backends

from cute_nvfp4 import (
    BlockScaledTensor,
    GroupedRows,
    gated_gemm,
    grouped_gemm,
    grouped_gemm_contiguous,
    interleave,
    prepare,
    quantize,
    simulating,
)
from cute_nvfp4.errors import OperandError, OperandTypeError

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.usefixtures("hopper")]


def operands(*shapes: tuple[int, ...], format: str = "nvfp4", seed: int = 0) -> list[BlockScaledTensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        quantize(torch.randn(shape, generator=generator).to(backends.device()), format, backend="reference")
        for shape in shapes
    ]


def near(got: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether results are the exact ones, rounded to float16 once; NaN is not."""
    wide = exact.double()
    return bool(((got.double() - wide).abs() <= wide.abs() * 2.0**-10 + wide.abs().max() * 2.0**-18).all())


@pytest.mark.parametrize("format, m, n", [("nvfp4", 40, 72), ("nvfp4", 5, 20), ("mxfp4", 20, 72)])
def test_gated(format: str, m: int, n: int) -> None:
    a, gate, up = operands((m, 128), (n, 128), (n, 128), format=format)
    out = torch.full((m, n), float("nan"), dtype=torch.float16, device=backends.device())
    with simulating("sm_90a"):
        assert gated_gemm(a, gate, up, alpha=0.1, out=out) is out
    exact = gated_gemm(a, gate, up, alpha=0.1, backend="reference", out_dtype=torch.float32)
    other = gated_gemm(a, up, gate, alpha=0.1, backend="reference", out_dtype=torch.float32)
    assert near(out, exact) and not near(out, other)


def test_gated_of_a_batch_along_m() -> None:
    """Each matrix has a weight of its own; results lie along M; there are no global scales."""
    a, gate, up = operands((2, 20, 64), (2, 24, 64), (2, 24, 64))
    gate, up = (BlockScaledTensor(x.data, x.scale, None) for x in (gate, up))
    out = torch.full((2, 24, 20), float("nan"), dtype=torch.float32, device=backends.device()).transpose(1, 2)
    with simulating("sm_90a"):
        gated_gemm(a, gate, up, gate="relu", alpha=2.0**-24, out=out)
    exact = gated_gemm(a, gate, up, gate="relu", alpha=2.0**-24, backend="reference", out_dtype=torch.float32)
    assert near(out, exact)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gated_of_one_weight_that_is_both(interleaved: bool) -> None:
    a, gate, up = operands((20, 64), (256, 64), (256, 64))
    scale = gate.global_scale
    gate, up = (BlockScaledTensor(x.data, x.scale, scale) for x in (gate, up))
    both = interleave(gate, up)
    if not interleaved:
        data = torch.cat([gate.data, up.data])
        both = BlockScaledTensor(data, torch.cat([x.rowmajor_scale()[0] for x in (gate, up)]), scale)
    options: dict[str, Any] = {"interleaved": interleaved, "alpha": 0.1, "out_global_scale": 0.25}
    with simulating("sm_90a"):
        got = gated_gemm(a, both, None, **options)
    exact = gated_gemm(a, gate, up, alpha=0.1, out_global_scale=0.25, backend="reference")
    different = (got.dequantize() - exact.dequantize()).norm() / exact.dequantize().norm()
    assert different < 2.0**-6, "sums in float32 may round to another code"


@pytest.mark.parametrize("alpha", [0.5, None])
def test_list(alpha: float | None) -> None:
    """Sizes of their own, groups without rows of either side; alpha is a number, or one for each group."""
    a0, b0, b1, a2, b2 = operands((20, 128), (40, 128), (40, 96), (3, 256), (72, 256))
    problems = [(a0, b0), (None, b1), (a2, b2), (a2, None)]
    given = alpha or torch.tensor([0.5, 9.0, -2.0, 9.0], device=backends.device())
    with simulating("sm_90a"):
        got = grouped_gemm(problems, alpha=given)
        again = grouped_gemm(problems, alpha=given)
        with pytest.raises(OperandTypeError, match="pairs of x and a PreparedWeight"):
            prepare(grouped_gemm, [(a0, b0)])
    exact = grouped_gemm(problems, alpha=given, backend="reference")
    assert [x.shape for x in got] == [x.shape for x in exact] and all(map(torch.equal, got, again))
    assert near(got[0], exact[0]) and near(got[2], exact[2]) and not near(got[2], -exact[2])


def test_contiguous() -> None:
    a, b = operands((30, 128), (3, 40, 128))
    rows = GroupedRows.of(a, [2, 10, 11, 30])
    out = torch.full((30, 40), float("nan"), dtype=torch.float16, device=backends.device())
    status = torch.full((1,), 7, dtype=torch.int32, device=backends.device())
    with simulating("sm_90a"):
        grouped_gemm_contiguous(rows, b, alpha=0.5, out=out, status=status)
        fresh = grouped_gemm_contiguous(rows, b, alpha=0.5)
    exact = grouped_gemm_contiguous(rows, b, alpha=0.5, backend="reference")
    assert near(out[2:], exact[2:]) and out[:2].isnan().all() and status.item() == 0
    assert fresh.dtype is torch.float16 and fresh[2:].equal(out[2:])


def test_overlap_is_refused() -> None:
    a, gate, up = operands((16, 64), (32, 64), (32, 64))
    out = a.data.view(torch.float16)
    with simulating("sm_90a"), pytest.raises(OperandError, match="out"):
        gated_gemm(a, gate, up, out=out[:, :32])
