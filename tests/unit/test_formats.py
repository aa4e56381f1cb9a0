"""Every code of every format against independent oracles, and encoding against brute force."""

from __future__ import annotations

import bisect
import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from cute_nvfp4 import formats
from cute_nvfp4.errors import OperandError, OperandTypeError

E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1_VALUES += [-value for value in E2M1_VALUES]


def minifloat_value(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The definition of a binary floating-point code without special values."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    return sign * (math.ldexp(1 + mantissa, exponent - bias) if exponent else math.ldexp(mantissa, 1 - bias))


def e4m3_value(code: int) -> float:
    return math.nan if code & 0x7F == 0x7F else minifloat_value(code, 4, 3)


def e5m2_value(code: int) -> float:
    if code & 0x7F == 0x7C:
        return math.copysign(math.inf, minifloat_value(code, 5, 2))
    return math.nan if code & 0x7F > 0x7C else minifloat_value(code, 5, 2)


def ue8m0_value(code: int) -> float:
    return math.nan if code == 0xFF else math.ldexp(1.0, code - 127)


# name: (codes, value of a code, decode, ml_dtypes' type, torch's dtype)
DECODERS = {
    "e2m1": (16, E2M1_VALUES.__getitem__, formats.decode_e2m1, ml_dtypes.float4_e2m1fn, None),
    "e4m3": (256, e4m3_value, formats.decode_e4m3, ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    "e5m2": (256, e5m2_value, formats.decode_e5m2, ml_dtypes.float8_e5m2, torch.float8_e5m2),
    "ue8m0": (256, ue8m0_value, formats.decode_ue8m0, ml_dtypes.float8_e8m0fnu, torch.float8_e8m0fnu),
}
ENCODERS = {"e2m1": formats.encode_e2m1, "e4m3": formats.encode_e4m3, "e5m2": formats.encode_e5m2}
MAX_CODE = {"e2m1": 0x7, "e4m3": 0x7E, "e5m2": 0x7B}
MAX_VALUE = {"e2m1": 6.0, "e4m3": 448.0, "e5m2": 57344.0}
SIGN = {"e2m1": 0x8, "e4m3": 0x80, "e5m2": 0x80}


def assert_same_values(got: torch.Tensor, want: np.ndarray) -> None:
    """Equal bit for bit (so that −0 is not +0), with any NaN equal to any NaN."""
    got, want = got.to(torch.float64).numpy(), np.asarray(want, np.float64)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got)[~np.isnan(want)], np.signbit(want)[~np.isnan(want)])


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_decode_every_code(name: str, dtype: torch.dtype) -> None:
    count, value, decode, oracle, torch_dtype = DECODERS[name]
    codes = np.arange(count, dtype=np.uint8)
    if name == "ue8m0" and dtype is torch.float16:
        with pytest.raises(OperandTypeError, match="float16"):
            decode(torch.from_numpy(codes), dtype)
        return
    got = decode(torch.from_numpy(codes), dtype)
    assert got.dtype is dtype
    assert_same_values(got, [value(int(code)) for code in codes])
    assert_same_values(got, codes.view(oracle).astype(np.float64))
    if torch_dtype is not None:
        assert_same_values(decode(torch.from_numpy(codes).view(torch_dtype), dtype), got.to(torch.float64).numpy())


def test_decode_e2m1_ignores_the_high_nibble() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert_same_values(formats.decode_e2m1(codes), E2M1_VALUES * 16)


def magnitudes(name: str) -> list[Fraction]:
    """The finite magnitudes, by code."""
    value = DECODERS[name][1]
    return [Fraction(value(code)) for code in range(MAX_CODE[name] + 1)]


def nearest_code(x: float, table: list[Fraction], sign: int) -> int:
    """Brute force in exact arithmetic: nearest, ties to the even code, saturating."""
    target = abs(Fraction(x)) if math.isfinite(x) else table[-1]
    above = min(bisect.bisect_left(table, target), len(table) - 1)
    candidates = range(max(0, above - 1), above + 1)
    code = min(candidates, key=lambda c: (abs(table[c] - target), c & 1))
    return code | (sign if math.copysign(1.0, x) < 0 else 0)


def edges(table: list[Fraction], dtype: type) -> np.ndarray:
    """Every value and midpoint with its neighbours in ``dtype``, values beyond the ends, both signs."""
    points = [float(value) for value in table]
    points += [float((low + high) / 2) for low, high in itertools.pairwise(table)]
    points = np.array(points, dtype)
    largest, tiny = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    top = np.array([table[-1] * Fraction(9, 8), table[-1] * 2, largest, np.inf, tiny, 3 * tiny], dtype)
    values = np.concatenate([points, np.nextafter(points, dtype(-1)), np.nextafter(points, dtype(np.inf)), top])
    return np.concatenate([values, -values])


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_encode_against_brute_force(name: str, dtype: type) -> None:
    table, sign = magnitudes(name), SIGN[name]
    with np.errstate(over="ignore"):
        values = edges(table, dtype)
        spread = np.random.default_rng(0).uniform(-20, 20, 2000)
        spread = (np.exp2(spread) * np.random.default_rng(1).choice([-1, 1], 2000)).astype(dtype)
    values = np.concatenate([values, spread])
    want = [nearest_code(float(value), table, sign) for value in values]
    got = ENCODERS[name](torch.from_numpy(values))
    assert got.dtype is torch.uint8
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("name", ENCODERS)
def test_encode_against_ml_dtypes_and_torch(name: str) -> None:
    _, _, _, oracle, torch_dtype = DECODERS[name]
    half = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    random = torch.randint(-(1 << 31), (1 << 31) - 1, (1 << 18,), generator=torch.Generator().manual_seed(0))
    for x in (half.view(torch.float16), half.view(torch.bfloat16), random.to(torch.int32).view(torch.float32)):
        wide = x.float()
        codes = ENCODERS[name](x)
        finite = ~wide.isnan()
        clamped = wide[finite].clamp(-MAX_VALUE[name], MAX_VALUE[name])
        np.testing.assert_array_equal(codes[finite].numpy(), clamped.numpy().astype(oracle).view(np.uint8))
        if torch_dtype is not None:
            np.testing.assert_array_equal(codes[finite].numpy(), clamped.to(torch_dtype).view(torch.uint8).numpy())
        assert (codes[~finite] == 0x7F if name != "e2m1" else codes[~finite] == 0x7).all()


@pytest.mark.parametrize("name", ENCODERS)
def test_encode_inverts_decode(name: str) -> None:
    count, value, decode, _, _ = DECODERS[name]
    codes = torch.tensor([code for code in range(count) if math.isfinite(value(code))], dtype=torch.uint8)
    assert len(codes) == 2 * (MAX_CODE[name] + 1)
    np.testing.assert_array_equal(ENCODERS[name](decode(codes)).numpy(), codes.numpy())


def test_encode_special_values() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0, 1e-30, -1e-30])
    assert formats.encode_e2m1(x).tolist() == [7, 15, 7, 7, 0, 8, 0, 8]
    assert formats.encode_e4m3(x).tolist() == [0x7E, 0xFE, 0x7F, 0x7F, 0, 0x80, 0, 0x80]
    assert formats.encode_e5m2(x).tolist() == [0x7B, 0xFB, 0x7F, 0x7F, 0, 0x80, 0, 0x80]


def test_encode_keeps_shape_and_takes_any_strides_and_parameters() -> None:
    x = torch.linspace(-7, 7, 24).reshape(2, 3, 4).permute(2, 0, 1)
    assert torch.equal(formats.encode_e2m1(x), formats.encode_e2m1(x.contiguous()))
    assert torch.equal(formats.encode_e2m1(x.clone().requires_grad_()), formats.encode_e2m1(x))
    assert formats.encode_e2m1(torch.tensor(5.0)).item() == 6


POWERS = [Fraction(2) ** (code - 127) for code in range(255)]


def ue8m0_brute_force(x: float, rounding: str) -> int:
    """Exact: the power of two below, above, or nearest (ties upward), clamped to the codes there are."""
    if math.isnan(x) or x < 0:
        return 0xFF
    target = min(max(Fraction(x), POWERS[0]), POWERS[-1]) if math.isfinite(x) else POWERS[-1]
    above = bisect.bisect_left(POWERS, target)
    if POWERS[above] == target or rounding == "rp":
        return above
    nearer_above = POWERS[above] - target <= target - POWERS[above - 1]
    return above if rounding == "rna" and nearer_above else above - 1


@pytest.mark.parametrize("rounding", ["rz", "rp", "rna"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_encode_ue8m0(rounding: str, dtype: type) -> None:
    powers = np.array([2.0**e for e in range(-127, 128)], dtype)
    points = np.concatenate([powers, powers[:-1] * dtype(1.5), powers[:-1] * dtype(1.1)])
    values = np.concatenate([points, np.nextafter(points, dtype(0)), np.nextafter(points, dtype(np.inf))])
    special = np.array([0, -0.0, 1e-45, np.finfo(dtype).max, np.inf, -np.inf, np.nan, -1, -1e-40], dtype)
    values = np.concatenate([values, special])
    got = formats.encode_ue8m0(torch.from_numpy(values), rounding=rounding).numpy()
    np.testing.assert_array_equal(got, [ue8m0_brute_force(float(value), rounding) for value in values])
    if rounding == "rna" and dtype is np.float32:
        # below 2**-126, where float32 is subnormal, ml_dtypes 0.6 rounds 1.1 * 2**-127 to 2**-126
        inside = (values >= 2.0**-126) & (values <= 2.0**127)
        np.testing.assert_array_equal(got[inside], values[inside].astype(ml_dtypes.float8_e8m0fnu).view(np.uint8))
        cast = torch.from_numpy(values[inside]).to(torch.float8_e8m0fnu).view(torch.uint8)
        np.testing.assert_array_equal(got[inside], cast.numpy())


def test_encode_refuses() -> None:
    with pytest.raises(OperandTypeError, match=r"got torch.int32, expected float16"):
        formats.encode_e2m1(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(OperandError, match="got 'rn', expected 'rz', 'rp' or 'rna'"):
        formats.encode_ue8m0(torch.zeros(2), rounding="rn")
    with pytest.raises(OperandTypeError, match="float8_e4m3fnuz"):
        formats.decode_e4m3(torch.zeros(2).to(torch.float8_e4m3fnuz))
    with pytest.raises(OperandTypeError, match=r"got torch.float32"):
        formats.decode_e2m1(torch.zeros(2))
    with pytest.raises(OperandTypeError, match="one-byte"):
        formats.as_bytes(torch.zeros(2))


def test_pack_puts_the_even_element_low() -> None:
    codes = torch.tensor([[1, 2, 15, 0], [7, 8, 9, 10]], dtype=torch.uint8)
    packed = formats.pack_e2m1(codes)
    assert packed.tolist() == [[0x21, 0x0F], [0x87, 0xA9]]
    assert torch.equal(formats.unpack_e2m1(packed), codes)
    assert torch.equal(formats.unpack_e2m1(packed.view(torch.float4_e2m1fn_x2)), codes)


def test_unpack_inverts_pack_for_every_byte_and_any_strides() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    codes = formats.unpack_e2m1(packed)
    assert codes.tolist() == [nibble for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert torch.equal(formats.pack_e2m1(codes), packed)
    turned = packed.reshape(2, 8, 16).view(torch.float4_e2m1fn_x2).permute(1, 2, 0)
    want = formats.unpack_e2m1(packed.reshape(2, 8, 16).permute(1, 2, 0).contiguous())
    assert torch.equal(formats.unpack_e2m1(turned), want)


def test_pack_refuses() -> None:
    with pytest.raises(OperandError, match=r"shape \(2, 3\), expected an even last size"):
        formats.pack_e2m1(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(OperandTypeError, match=r"got torch.int64"):
        formats.pack_e2m1(torch.zeros(2, dtype=torch.int64))


def test_descriptors() -> None:
    facts = {
        fmt.name: (
            *(fmt.element_bits, fmt.block, fmt.block_bytes, fmt.max_value, fmt.max_scale, fmt.has_global_scale),
            *(fmt.data_columns(96), fmt.scale_columns(96), fmt.data_dtype, fmt.scale_dtype),
        )
        for fmt in formats.FORMATS.values()
    }
    assert facts == {
        "nvfp4": (4, 16, 8, 6.0, 448.0, True, 48, 6, torch.float4_e2m1fn_x2, torch.float8_e4m3fn),
        "mxfp4": (4, 32, 16, 6.0, 2.0**127, False, 48, 3, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu),
        "mxfp8": (8, 32, 32, 448.0, 2.0**127, False, 96, 3, torch.float8_e4m3fn, torch.float8_e8m0fnu),
        "mxfp8_e5m2": (8, 32, 32, 57344.0, 2.0**127, False, 96, 3, torch.float8_e5m2, torch.float8_e8m0fnu),
    }
    with pytest.raises(AttributeError):
        formats.NVFP4.block = 32  # type: ignore[misc]


@pytest.mark.parametrize("k", [0, -16, 8, 24])
def test_descriptor_refuses_k(k: int) -> None:
    with pytest.raises(OperandError, match=f"got {k}, expected a positive multiple of 16"):
        formats.NVFP4.scale_columns(k)
    with pytest.raises(OperandError, match="positive multiple of 16"):
        formats.NVFP4.data_columns(k)
