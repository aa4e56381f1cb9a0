"""MXFP8 weights: the same values over all codes and scales, products, and what a call may be made of."""

from __future__ import annotations

import pytest
import torch
from support import backends
from support.mutants import LAST, Ptx, at, instead, outcome
from support.packed_problems import SPECIAL

from cute_nvfp4 import BlockScaledTensor, gemm, grouped_gemm, prepare, prepare_weight, quantize, simulating, to_blocked
from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import MXFP8, MXFP8_E5M2, Format

pytestmark = [pytest.mark.kernels("sm_90a")]
FORMATS = pytest.mark.parametrize("format", [MXFP8, MXFP8_E5M2], ids=lambda x: x.name)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setenv("CUTE_NVFP4_ARCH", "sm_90a")


def weight(format: Format, rows: int, k: int, first: int = 0, last: int = 254, nan: bool = False) -> BlockScaledTensor:
    """Every code that is a number, and those that are none if ``nan``; scales with codes from ``first`` to ``last``."""
    generator = torch.Generator().manual_seed(rows + first)
    data = torch.randint(0, 256, (rows, k), dtype=torch.uint8, generator=generator)
    data = torch.where(data & 0x7F >= SPECIAL[format], data & 0x83, data)
    scale = torch.randint(first, last + 1, (rows, k // 32), dtype=torch.uint8, generator=generator)
    scale[:2, 0] = torch.tensor([first, last], dtype=torch.uint8)
    if nan:
        data[3:5, 7] = torch.tensor([SPECIAL[format], 0xFF], dtype=torch.uint8)
        data[5:7, :32] = torch.tensor([[0], [0x80]], dtype=torch.uint8)
        scale[5:8, 0] = torch.tensor([0, 254, 255], dtype=torch.uint8)
    return BlockScaledTensor(backends.place(data), backends.place(to_blocked(scale)), None, format)


def run() -> simulating:
    return simulating("sm_90a") if backends.backend() == "sim" else simulating()


@FORMATS
def test_the_same_values(format: Format) -> None:
    """A block with a NaN, or an infinity, is NaN; float16 takes fewer scales, and a power of two where it must."""
    w = weight(format, 130, 96, nan=True)
    with run():
        prepared = prepare_weight(w)
    found, expected = prepared.dequantize(torch.float64), w.dequantize(torch.float64)
    expected[3:5, :32] = float("nan")
    assert expected.isnan().sum() == 3 * 32 and prepared.global_scale is None
    assert torch.equal(found.nan_to_num(0.7), expected.nan_to_num(0.7))
    first, window = {MXFP8: (108, 22), MXFP8_E5M2: (107, 8)}[format]
    for low in (first, 0, 242 - window):
        w = weight(format, 130, 96, low, low + window, nan=low == first)
        prepared = prepare_weight(w, dtype=torch.float16)
        assert (prepared.global_scale is None) == (low == first)
        found, expected = prepared.dequantize(torch.float64), w.dequantize(torch.float64)
        if low == first:
            expected[3:5, :32] = float("nan")
        assert torch.equal(found.nan_to_num(0.7), expected.nan_to_num(0.7)), low
        with pytest.raises(OperandError, match=rf"scales of a weight of {format.name} .* a factor of 2\*\*{window}"):
            prepare_weight(weight(format, 130, 96, max(low - 1, 0), low + window + (low == 0)), dtype=torch.float16)


def decoded(w: BlockScaledTensor, m: int) -> torch.Tensor:
    """The values of ``w`` as a kernel decodes them, (N, K): products with a unit matrix, ``m`` rows at a time."""
    prepared = prepare_weight(w)
    x = torch.eye(w.k, dtype=torch.bfloat16, device=w.device)
    return torch.cat([gemm(rows, prepared, out_dtype=torch.float32) for rows in x.split(m)]).t()


@FORMATS
@pytest.mark.parametrize("m, n, k", [(64, 500, 64), (16, 300, 32)])
def test_every_value_is_exact(format: Format, m: int, n: int, k: int) -> None:
    """As large as float32 has them, and down to the subnormal numbers of bfloat16."""
    w = weight(format, n, k, 16, 254 - {MXFP8: 8, MXFP8_E5M2: 15}[format])
    with run():
        assert torch.equal(decoded(w, m), w.dequantize())


MUTANTS = (
    ("not multiplied to its place", at("mul.rn.bf16x2", instead("mov.b32 {0}, {1};"), slice(0, 1))),
    ("a scale of another block", at("prmt.b32", instead("prmt.b32 {0}, {1}, 0, 0x4240;"), LAST)),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.parametrize("name, change", MUTANTS, ids=[m[0] for m in MUTANTS])
@pytest.mark.parametrize("m", [16, 64])
def test_mutants_are_noticed(name: str, change: Ptx, m: int) -> None:
    w = weight(MXFP8, 100, 64, 100, 200)
    assert outcome(change, lambda: torch.equal(decoded(w, m), w.dequantize()), "sm_90a") == "wrong"


@pytest.mark.parametrize("format, m", [("nvfp4", 5), ("mxfp4", 20), ("mxfp8", 3), ("mxfp8_e5m2", 17)])
def test_block_scaled_rows(format: str, m: int) -> None:
    """Decoded to bfloat16 first; the operator, and a prepared call, give the same bits."""
    w = weight(MXFP8, 100, 160, 115, 125)
    x = torch.randn(m, 160, generator=torch.Generator().manual_seed(m))
    x = quantize(backends.place(x), format, backend="reference")
    prepared = prepare_weight(w)
    with run():
        y = gemm(x, prepared, out_dtype=torch.float32)
        assert torch.equal(y, torch.ops.cute_nvfp4.packed_gemm(
            x.data, x.scale, prepared.packed, x.global_scale, rows=100, dtype=torch.bfloat16, packing="mxfp8",
            out_dtype=torch.float32, a_format=format,
        ))  # fmt: skip
        assert torch.equal(y, prepare(gemm, x, prepared, out_dtype=torch.float32)())
    wide, values = x.dequantize(torch.float64), w.dequantize(torch.float64)
    error = (y.double() - wide @ values.t()).abs()
    assert (error <= 2.0**-20 * (wide.abs() @ values.abs().t())).all() and (y != 0).any()


def test_lists_of_groups() -> None:
    """By the function and by its operator; all weights are packed alike."""
    generator = torch.Generator().manual_seed(1)
    weights = [weight(MXFP8, n, 96, 115, 125) for n in (40, 130)]
    xs = [backends.place(torch.randn(m, 96, generator=generator).bfloat16()) for m in (3, 20)]
    pairs = [(x, prepare_weight(w)) for x, w in zip(xs, weights)]
    with run():
        outs = grouped_gemm(pairs, out_dtype=torch.float32)
        with pytest.raises(OperandError, match=r"mxfp8_e5m2 for torch.bfloat16 .* expected mxfp8 for"):
            grouped_gemm([pairs[0], (xs[0], prepare_weight(weight(MXFP8_E5M2, 40, 96)))])
    for out, x, w in zip(outs, xs, weights):
        wide, values = x.double(), w.dequantize(torch.float64)
        assert ((out.double() - wide @ values.t()).abs() <= 2.0**-20 * (wide.abs() @ values.abs().t())).all()


@pytest.mark.sim_only("runs exact torch")
def test_traced_and_differentiated() -> None:
    prepared = prepare_weight(quantize(torch.randn(48, 64), "mxfp8", backend="reference"))
    x = torch.randn(5, 64).bfloat16().requires_grad_()
    y = torch.compile(lambda x: gemm(x, prepared, alpha=0.5), fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, gemm(x, prepared, alpha=0.5))
    y.float().sum().backward()
    assert torch.allclose(x.grad.float(), 0.5 * torch.ones(5, 48) @ prepared.dequantize(), rtol=2**-7, atol=1e-3)
