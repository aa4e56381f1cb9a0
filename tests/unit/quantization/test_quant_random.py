"""Philox against published numbers, stochastic rounding, and the Hadamard transform."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import decode_e2m1, decode_e4m3, decode_e5m2
from cute_nvfp4.ops.dequantize import dequantize
from cute_nvfp4.ops.quantize import (
    quantize,
)
from cute_nvfp4.quantization import philox
from cute_nvfp4.quantization.hadamard import Hadamard
from cute_nvfp4.quantization.rounding import encode, encode_stochastic, round_e2m1

# Random123 1.14, tests/kat_vectors: philox4x32 with ten rounds
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_in_python(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """The definition, in Python integers."""
    for number in range(10):
        k0, k1 = ((key[i] + number * w) % 2**32 for i, w in enumerate((0x9E3779B9, 0xBB67AE85)))
        p0, p1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = ((p1 >> 32) ^ counter[1] ^ k0, p1 % 2**32, (p0 >> 32) ^ counter[3] ^ k1, p0 % 2**32)
    return counter


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...]) -> None:
    got = philox.philox4x32(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in got) == want == philox_in_python(counter, key)


def test_random_bits_are_a_function_of_seed_and_index() -> None:
    seed = 0x0123456789ABCDEF
    index = torch.tensor([0, 1, 2, 3, 4, 1000003, 2**33 + 5, 2**40 - 1])
    for stream in (0, 1):
        got = philox.random_bits(seed, index, stream).tolist()
        for i, bits in zip(index.tolist(), got):
            counter = ((i >> 2) % 2**32, i >> 34, stream, 0)
            assert bits == philox_in_python(counter, (seed % 2**32, seed >> 32))[i % 4]
    uniform = philox.uniform(seed, torch.arange(1 << 16))
    assert uniform.dtype is torch.float32 and 0 <= uniform.min() and uniform.max() < 1
    assert abs(float(uniform.mean()) - 0.5) < 0.005
    histogram = torch.histc(uniform, 16, 0, 1)
    assert ((histogram - 4096).abs() < 300).all()


def test_seeds() -> None:
    assert philox.resolve_seed(5) == 5
    a, b = (philox.resolve_seed(torch.Generator().manual_seed(3)) for _ in range(2))
    assert a == b
    torch.manual_seed(0)
    first, second = philox.resolve_seed(None), philox.resolve_seed(None)
    torch.manual_seed(0)
    assert first != second and philox.resolve_seed(None) == first


@pytest.mark.parametrize(
    ("fmt", "rule"), [("nvfp4", "max"), ("nvfp4", "four_six_mse"), ("mxfp4", "max"), ("mxfp8_e4m3", "max")]
)
def test_stochastic_rounding_is_unbiased(fmt: str, rule: str) -> None:
    """The mean over seeds approaches x where nothing saturates, at the pace of independent draws."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    # every block's largest magnitude is exact, so that its scale clips nothing
    x[:, ::16] = 6.0
    # an exact scale for E4M3 and UE8M0 alike
    options = {"global_scale": 2.0**-6} if fmt == "nvfp4" else {}
    number = 400
    total = torch.zeros_like(x)
    for seed in range(number):
        total += dequantize(quantize(x, fmt, rule, rounding="stochastic", generator=seed, **options))
    nearest = dequantize(quantize(x, fmt, rule, **options))
    # no step is larger than 2 here, so that a mean's standard deviation is at most 1 / √number
    assert (total / number - x).abs().max() < 4.5 / number**0.5
    assert (total / number - x).square().mean() < 0.1 * (nearest - x).square().mean()


def test_stochastic_bits_depend_on_the_place_alone() -> None:
    """A row quantized in a batch, or with others, gets the bits of its place; and a seed is a seed."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    options = {"global_scale": 0.01, "rounding": "stochastic"}
    whole = quantize(x, generator=11, **options)
    assert torch.equal(whole.data, quantize(x, generator=11, **options).data)
    assert torch.equal(whole.data[:20], quantize(x[:20], generator=11, **options).data)
    assert torch.equal(whole.data.reshape(2, 32, -1), quantize(x.reshape(2, 32, 64), generator=11, **options).data)
    assert not torch.equal(whole.data, quantize(x, generator=12, **options).data)


@pytest.mark.parametrize("element", ["e2m1", "e4m3", "e5m2"])
def test_stochastic_rounding_takes_a_neighbour(element: str) -> None:
    """Up or down to the codes on either side, with the right threshold, for every magnitude; exact codes stay."""
    decode = {"e2m1": decode_e2m1, "e4m3": decode_e4m3, "e5m2": decode_e5m2}[element]
    finite = {"e2m1": 8, "e4m3": 0x7F, "e5m2": 0x7C}[element]
    grid = decode(torch.arange(finite, dtype=torch.uint8))
    fraction = torch.linspace(0, 1, 9)[1:-1]
    y = (grid[:-1, None] + (grid[1:] - grid[:-1])[:, None] * fraction).reshape(-1)
    low, high = grid[:-1].repeat_interleave(7), grid[1:].repeat_interleave(7)
    for sign in (1, -1):
        for u in (0.0, 0.05, 0.3, 0.62, 0.95, 1 - 2.0**-24):
            got = decode(encode_stochastic(sign * y, torch.full_like(y, u), element))
            up = fraction.repeat(finite - 1) > 1 - u
            near = (fraction.repeat(finite - 1) - (1 - u)).abs() < 1e-6
            want = sign * torch.where(up, high, low)
            assert torch.equal(got[~near], want[~near]), (sign, u)
        exact = decode(encode_stochastic(sign * grid, torch.full_like(grid, 0.999), element))
        assert torch.equal(exact, sign * grid)
    over = torch.tensor([1e30, -1e30, torch.inf])
    largest = float(grid[-1])
    assert decode(encode_stochastic(over, torch.zeros(3), element)).tolist() == [largest, -largest, largest]


def test_fast_rounding_is_the_encoder() -> None:
    y = torch.cat((torch.linspace(-8, 8, 100001), torch.tensor([0.0, -0.0, 1e-38, 1e38, -1e-45])))
    grid = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.cat([torch.nextafter(midpoints, torch.full_like(midpoints, to)) for to in (-9.0, 9.0)])
    y = torch.cat((y, grid, midpoints, -midpoints, near, -near))
    assert torch.equal(round_e2m1(y), decode_e2m1(encode(y, "e2m1")))


def test_hadamard_matrix() -> None:
    for size in (2, 16, 64):
        rotation = Hadamard.from_seed(9, size)
        matrix = rotation.matrix(torch.float64)
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-6)
        i, j = np.indices((size, size))
        popcount = np.vectorize(lambda n: bin(n).count("1"))(i & j)
        want = np.array(rotation.signs)[:, None] * (-1.0) ** popcount / np.sqrt(size)
        np.testing.assert_allclose(matrix.numpy(), want, rtol=1e-6)
    assert Hadamard.from_seed(9) == Hadamard.from_seed(9) != Hadamard.from_seed(10)
    signs = [Hadamard.from_seed(seed).signs for seed in range(200)]
    assert abs(np.mean(signs)) < 0.06


def test_rotation_and_back() -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    rotation = Hadamard.from_seed(1)
    rotated = rotation.rotate(x)
    torch.testing.assert_close(rotated, (x.unflatten(-1, (-1, 16)) @ rotation.matrix()).flatten(-2))
    torch.testing.assert_close(rotation.unrotate(rotated), x)
    assert rotation.rotate(x.bfloat16()).dtype is torch.bfloat16
    for wrong in ((1, -1, 1), (1,), (1, 2), (1,) * 512):
        with pytest.raises(OperandError, match="Hadamard"):
            Hadamard(wrong)
    with pytest.raises(OperandError, match="rotate"):
        rotation.rotate(torch.zeros(3, 24))


def test_quantizing_rotated_values() -> None:
    """Rotated first, then as any other values; and the product of two operands does not see the rotation."""
    random = torch.Generator().manual_seed(3)
    a, b = torch.randn(32, 64, generator=random), torch.randn(48, 64, generator=random)
    rotation = Hadamard.from_seed(4)
    qa, qb = (quantize(x, hadamard=4) for x in (a, b))
    same = quantize(rotation.rotate(a))
    assert torch.equal(qa.data, same.data) and torch.equal(qa.scale, same.scale)
    got, want = dequantize(qa) @ dequantize(qb).T, a @ b.T
    assert (got - want).norm() / want.norm() < 0.15
    torch.testing.assert_close(dequantize(qa, hadamard=4), rotation.unrotate(dequantize(qa)))
    padded = quantize(torch.randn(4, 40, generator=random), hadamard=Hadamard.from_seed(1, 32), pad=True)
    assert padded.k == 64
