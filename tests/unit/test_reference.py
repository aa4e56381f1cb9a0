"""The oracles against plain Python loops in exact arithmetic, over the whole range of codes."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from cute_nvfp4 import reference
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import MXFP8
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.reference import gemm_reference, gemv_reference
from cute_nvfp4.scale_layout import to_blocked

E2M1 = [Fraction(v, 2) for v in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)]
NUMPY = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


def e4m3(code: int) -> Fraction:
    """A finite E4M3 code's value, from its definition."""
    exponent, mantissa = code >> 3 & 15, code & 7
    value = Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7) if exponent else Fraction(mantissa, 8 * 2**6)
    return -value if code & 0x80 else value


def operand(
    batch: int, rows: int, k: int, *, seed: int, blocked: bool = False, global_scale: float | None = None
) -> BlockScaledTensor:
    """Codes in random order, over all E2M1 values and all finite E4M3 scales, of both signs."""
    random = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (batch, rows, k // 2), dtype=torch.uint8, generator=random)
    count = batch * rows * (k // 16)
    scale = torch.arange(count)[torch.randperm(count, generator=random)].reshape(batch, rows, -1) % 254
    scale = (scale + (scale >= 0x7F)).to(torch.uint8)  # every code but the NaNs 0x7F and 0xFF
    factor = None if global_scale is None else torch.tensor(global_scale)
    return BlockScaledTensor(data, to_blocked(scale) if blocked else scale, factor)


def exact_product(a: BlockScaledTensor, b: BlockScaledTensor, alpha: float = 1.0) -> list:
    """(L, M, N) nested lists of Fractions by a plain loop over bytes."""
    a_scale, b_scale = a.rowmajor_scale().tolist(), b.rowmajor_scale().tolist()
    a_data, b_data = a.data.tolist(), b.data.tolist()
    factor = Fraction(alpha)
    for x in (a, b):
        factor *= 1 if x.global_scale is None else Fraction(x.global_scale.item())
    out = []
    for index in range(a.batch):
        out.append([])
        for m in range(a.rows):
            out[-1].append([])
            for n in range(b.rows):
                total = Fraction(0)
                for k in range(a.k):
                    left = E2M1[a_data[index][m][k // 2] >> 4 * (k % 2) & 15] * e4m3(a_scale[index][m][k // 16])
                    right = E2M1[b_data[index][n][k // 2] >> 4 * (k % 2) & 15] * e4m3(b_scale[index][n][k // 16])
                    total += left * right
                out[-1][-1].append(total * factor)
    return out


def rounded(exact: list, dtype: torch.dtype) -> np.ndarray:
    """Nearest ``dtype`` values: Python rounds a Fraction to float64 once, numpy float64 to float16 once."""
    with np.errstate(over="ignore"):
        return np.array([[[float(v) for v in row] for row in matrix] for matrix in exact]).astype(NUMPY[dtype])


def test_the_data_covers_every_code() -> None:
    a = operand(2, 33, 256, seed=0)
    assert len(a.data.unique()) == 256
    assert len(a.scale.unique()) == 254


@pytest.mark.sweep
@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("out_dtype", NUMPY)
def test_gemm_and_gemv_against_a_plain_loop(blocked: bool, out_dtype: torch.dtype) -> None:
    a = operand(2, 33, 256, seed=0, blocked=blocked)
    b = operand(2, 5, 256, seed=1, blocked=not blocked)
    want = rounded(exact_product(a, b), out_dtype)
    got = gemm_reference(a, b, out_dtype=out_dtype)
    assert got.dtype is out_dtype and got.shape == (2, 33, 5)
    np.testing.assert_array_equal(got.numpy(), want)
    got = gemv_reference(a, b, out_dtype=out_dtype)
    assert got.dtype is out_dtype and got.shape == (2, 33)
    np.testing.assert_array_equal(got.numpy(), want[..., 0])


def test_default_output_is_float16_and_overflows_to_infinity() -> None:
    a, b = operand(1, 8, 256, seed=0), operand(1, 8, 256, seed=1)
    got = gemm_reference(a, b)
    assert got.dtype is torch.float16
    want = rounded(exact_product(a, b), torch.float16)
    assert np.isinf(want).any() and np.isfinite(want).any()
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("alpha", [0.1, torch.tensor(-0.3), torch.tensor(0.7, dtype=torch.float64)])
def test_alpha_and_global_scales(alpha: float | torch.Tensor) -> None:
    a = operand(1, 7, 48, seed=2, global_scale=1e-3)
    b = operand(1, 3, 48, seed=3, global_scale=0.3)
    want = rounded(exact_product(a, b, float(alpha)), torch.float64)
    got = gemm_reference(a, b, alpha=alpha, out_dtype=torch.float64).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-15 * np.abs(want).max())
    assert np.abs(want).min() > 0


def test_without_a_batch() -> None:
    a, b = operand(1, 7, 64, seed=4), operand(1, 3, 64, seed=5)
    flat_a, flat_b = (BlockScaledTensor(x.data[0], x.scale[0]) for x in (a, b))
    want = gemm_reference(a, b)
    for left, right in ((flat_a, flat_b), (flat_a, b)):
        assert torch.equal(gemm_reference(left, right), want[0])
        assert torch.equal(gemv_reference(left, right), want[0, :, 0])
    assert torch.equal(gemm_reference(a, flat_b), want)


def test_slabs_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operand(2, 13, 64, seed=6), operand(2, 11, 64, seed=7)
    whole, vector = gemm_reference(a, b, out_dtype=torch.float64), gemv_reference(a, b)
    for elements in (1, 64 * 4, 64 * 11):
        monkeypatch.setattr(reference, "_SLAB_ELEMENTS", elements)
        assert torch.equal(gemm_reference(a, b, out_dtype=torch.float64), whole)
        assert torch.equal(gemv_reference(a, b), vector)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_SLAB_ELEMENTS", 1024)
    largest = []
    decode = BlockScaledTensor._decode

    def recording(self: BlockScaledTensor, *args: object) -> torch.Tensor:
        largest.append(decode(self, *args).numel())
        return decode(self, *args)

    monkeypatch.setattr(BlockScaledTensor, "_decode", recording)
    gemm_reference(operand(1, 100, 256, seed=0), operand(1, 50, 256, seed=1))
    assert max(largest) == 1024 and len(largest) > 25


def test_float32_accumulation_is_close_and_not_the_default() -> None:
    a, b = operand(1, 9, 512, seed=8), operand(1, 1, 512, seed=9)
    exact = gemv_reference(a, b, out_dtype=torch.float64)
    single = gemv_reference(a, b, out_dtype=torch.float64, accumulate=torch.float32)
    magnitude = (a.dequantize(torch.float64).abs() * b.dequantize(torch.float64).abs()).sum(-1)
    assert ((single - exact).abs() <= 512 * 2.0**-24 * magnitude).all()
    assert torch.equal(single, single.float().double()) and not torch.equal(single, exact)


def test_nan_scales_propagate_through_zeros_and_infinity_does_not_appear() -> None:
    a = BlockScaledTensor(torch.full((4, 16), 0x22, dtype=torch.uint8), torch.full((4, 2), 0x38, dtype=torch.uint8))
    zero = BlockScaledTensor(torch.zeros(2, 16, dtype=torch.uint8), torch.full((2, 2), 0x38, dtype=torch.uint8))
    nan_scale = a.scale.clone()
    nan_scale[2, 1] = 0x7F
    got = gemv_reference(BlockScaledTensor(a.data, nan_scale), zero)
    assert torch.isnan(got).tolist() == [False, False, True, False]
    nan_b = zero.scale.clone()
    nan_b[1, 0] = 0xFF
    got = gemm_reference(a, BlockScaledTensor(zero.data, nan_b))
    assert torch.isnan(got).tolist() == [[False, True]] * 4
    assert (got[:, 0] == 0).all()


def test_other_formats() -> None:
    data = torch.tensor([[0x38] * 32, [0x40] * 32], dtype=torch.uint8)  # E4M3: 1 and 2
    mx = BlockScaledTensor(data, torch.tensor([[128], [127]], dtype=torch.uint8), format=MXFP8)
    assert gemm_reference(mx, mx).tolist() == [[32 * 4.0, 32 * 4.0], [32 * 4.0, 32 * 4.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_round_once(dtype: torch.dtype) -> None:
    """Ties of ``dtype`` moved by less than float32 can see, where rounding by way of float32 goes wrong."""
    codes = torch.arange(0, 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).double()
    codes = codes[codes.isfinite()]
    low, high = codes[:-1], codes[1:]
    middle = (low + high) / 2
    even_is_low = torch.arange(len(low)) % 2 == 0
    for sign in (1, -1):
        for values, want in (
            (torch.nextafter(middle, torch.tensor(math.inf).double()), high),
            (torch.nextafter(middle, torch.tensor(0.0).double()), low),
            (middle, torch.where(even_is_low, low, high)),
            (low, low),
        ):
            assert torch.equal(reference._round_once(sign * values, dtype).double(), sign * want)
    special = torch.tensor([math.inf, -math.inf, 1e300, -1e300, 65520.0, -0.0, 5e-324], dtype=torch.float64)
    want = [math.inf, -math.inf, math.inf, -math.inf, math.inf if dtype is torch.float16 else 65536.0, -0.0, 0.0]
    got = reference._round_once(special, dtype).tolist()
    assert got == want and math.copysign(1, got[5]) == -1
    assert math.isnan(reference._round_once(torch.tensor(math.nan).double(), dtype))
    half = torch.randn(4096, dtype=torch.float64) * 100
    if dtype is torch.float16:
        np.testing.assert_array_equal(reference._round_once(half, dtype).numpy(), half.numpy().astype(np.float16))


def test_torch_rounds_twice() -> None:
    """The reason for ``_round_once``; if this fails, torch has mended it and the function can go."""
    value = torch.tensor(1 + 2.0**-11 + 2.0**-40, dtype=torch.float64)
    assert value.to(torch.float16).item() == 1.0
    assert reference._round_once(value, torch.float16).item() == 1 + 2.0**-10


def test_refusals() -> None:
    a, b = operand(2, 4, 64, seed=0), operand(2, 4, 32, seed=1)
    with pytest.raises(OperandError, match="K of a and b: got 64 and 32"):
        gemv_reference(a, b)
    with pytest.raises(OperandTypeError, match=r"accumulate: got torch\.float16"):
        gemv_reference(a, a, accumulate=torch.float16)
    with pytest.raises(OperandTypeError, match=r"out_dtype: got torch\.int8"):
        gemm_reference(a, a, out_dtype=torch.int8)
    with pytest.raises(OperandTypeError, match=r"^b: got Tensor"):
        gemm_reference(a, a.data)
