"""MXFP4 weights, prepared with exponents of five bits: the same values, and exact products."""

from __future__ import annotations

import pytest
import torch
from support import backends

from cute_nvfp4 import BlockScaledTensor, gemm, prepare_weight, quantize, simulating, to_blocked
from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import MXFP4
from cute_nvfp4.ops.library import TABLE
from cute_nvfp4.ops.prepared_weight.gemm import PREPARED_GEMM

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.usefixtures("hopper")]


def weight(rows: int, k: int, first: int, last: int, special: bool = False) -> BlockScaledTensor:
    """Every element, scales with codes from ``first`` to ``last``; special: blocks of zeros beyond them, and NaN."""
    generator = torch.Generator().manual_seed(first)
    data = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(first, last + 1, (rows, k // 32), dtype=torch.uint8, generator=generator)
    scale[:2, 0] = torch.tensor([first, last], dtype=torch.uint8)
    if special:
        data[3:5, :16] = torch.tensor([[0x80], [0x08]], dtype=torch.uint8)
        scale[3:6, 0] = torch.tensor([0, 254, 255], dtype=torch.uint8)
    return BlockScaledTensor(backends.place(data), backends.place(to_blocked(scale)), None, MXFP4)


@pytest.mark.parametrize("dtype, first, window", [(torch.bfloat16, 105, 30), (torch.float16, 111, 24)])
def test_the_same_values(dtype: torch.dtype, first: int, window: int) -> None:
    for low in (first, 2, 220, 254 - window):
        w = weight(130, 96, low, low + window, special=True)
        prepared = prepare_weight(w, dtype=dtype)
        assert (prepared.global_scale is None) == (low == first)
        # a scale for each 32 elements
        assert prepared.packed.numel() * 8 == 256 * 128 * 4.25
        found, expected = prepared.dequantize(torch.float64), w.dequantize(torch.float64)
        assert expected.isnan().sum() == 32 and torch.equal(found.nan_to_num(0.7), expected.nan_to_num(0.7)), low
        with pytest.raises(OperandError, match=rf"scales of a weight of mxfp4 .* within a factor of 2\*\*{window}"):
            prepare_weight(weight(130, 96, low - 1, low + window), dtype=dtype)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype, low", [(torch.bfloat16, 110), (torch.float16, 111), (torch.bfloat16, 60)])
@pytest.mark.parametrize("m", [3, 20])
def test_products(dtype: torch.dtype, low: int, m: int) -> None:
    w = weight(140, 160, low, low + 24)
    x = backends.place(torch.randn(m, 160, generator=torch.Generator().manual_seed(m)).to(dtype))
    prepared = prepare_weight(w, dtype=dtype)
    with simulating():
        y = gemm(x, prepared, out_dtype=torch.float32)
    values = w.dequantize(torch.float64)
    error = (y.double() - x.double() @ values.t()).abs()
    assert (error <= 2.0**-20 * (x.double().abs() @ values.abs().t())).all() and (y != 0).all()


@pytest.mark.parametrize("format, m", [("mxfp4", 3), ("mxfp8", 20), ("mxfp8_e5m2", 17), ("nvfp4", 5)])
def test_block_scaled_rows(format: str, m: int) -> None:
    """Decoded to bfloat16 first, whatever the kernel; the operator gives the same bits."""
    w = weight(100, 160, 115, 125)
    x = torch.randn(m, 160, generator=torch.Generator().manual_seed(m))
    x = quantize(backends.place(x), format, backend="reference")
    prepared = prepare_weight(w)

    with simulating() as runs:
        y = gemm(x, prepared, out_dtype=torch.float32)
        request = PREPARED_GEMM.request(x, prepared, None, None, None, torch.float32, None, "auto", "")
        again = TABLE["packed_gemm"].call(request)
    assert torch.equal(y, again)
    # a product's own host function decodes its rows
    first = "stream_gemm" if m <= 16 else "wgmma_gemm"
    assert backends.backend() == "cuda" or runs[0].name == first
    wide, values = x.dequantize(torch.float64), w.dequantize(torch.float64)
    error = (y.double() - wide @ values.t()).abs()
    assert (error <= 2.0**-20 * (wide.abs() @ values.abs().t())).all() and (y != 0).any()


def test_gate_and_up() -> None:
    """Each has the power of two that it needs."""
    gate, up = weight(44, 96, 105, 125), weight(44, 96, 60, 80)
    prepared = prepare_weight(gate, up)
    assert torch.equal(prepared.dequantize(), torch.stack([gate.dequantize(), up.dequantize()]))
    with pytest.raises(OperandError, match=r"weights of a gated GEMM: got mxfp4 .* and nvfp4"):
        prepare_weight(gate, quantize(torch.ones(44, 96), global_scale=None, backend="reference"))
