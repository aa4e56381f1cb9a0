"""wgmma over shapes, types and layouts: exact products against integers, and sums of floats against a slow model of
what an H200 does, which the recordings of ``test_recorded_async.py`` confirm."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from ptx_lab import launch_kernel, module

from cute_nvfp4.sim import UnsupportedInstruction
from cute_nvfp4.sim.tcgen05.descriptor import DescriptorError
from cute_nvfp4.sim.wgmma import descriptor, fragments, sums

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

from async_kernels.recording import replay
from async_kernels.wgmma import Form, case

FORMS = [
    Form("widest", "bf16", n=256, swizzle=1),
    Form("widest from registers", "bf16", n=256, swizzle=0, a_registers=True),
    Form("widest into f16", n=256, swizzle=1, accumulator="f16", a_registers=True),
    Form("odd width", n=8 * 17, swizzle=0),
    Form("narrowest into f16", accumulator="f16", n=8, steps=2),
    Form("narrow, transposed", "bf16", n=8, b_mn=True, swizzle=0),
    Form("wide and transposed", n=128, b_mn=True, steps=2),
    Form("A from registers, B transposed", "bf16", n=64, a_registers=True, b_mn=True, swizzle=2),
    Form("B negated", a_registers=True, scale_b=-1),
    Form("integers from registers", "s8", "s32", n=96, swizzle=1, a_registers=True, b_type="u8"),
    Form("integers beyond 32 bits", "u8", "s32", n=16, satfinite=True),
    Form("floats of 8 bits", "e5m2", n=128, swizzle=2, a_registers=True, b_type="e4m3"),
    Form("floats of 8 bits into f16", "e5m2", "f16", n=24),
    Form("tf32", "tf32", n=200, swizzle=1),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name.replace(" ", "-"))
def test_exact_products(form: Form) -> None:
    made = case(form)
    found = replay(made, [], checks=True)
    want = made.expected(made.buffers)[0]
    np.testing.assert_array_equal(found[0][: want.size], want)


def slow(a: np.ndarray, b: np.ndarray, c: np.float32, bits: int, keep: int) -> np.float32:
    """One element of D, by fractions: cut off below the largest exponent, added, cut off to ``keep`` bits."""

    def exponent(x: float) -> int:
        return int(np.frexp(np.float64(x))[1]) - 1

    pairs = [(float(x), float(y)) for x, y in zip(a, b) if x and y]
    tops = [exponent(x) + exponent(y) for x, y in pairs] + ([exponent(c)] if c else [])
    if not tops:
        return np.float32(0)
    unit = Fraction(2) ** (max(tops) - bits)
    terms = [Fraction(x) * Fraction(y) for x, y in pairs] + [Fraction(float(c))]
    total = sum(int(t / unit) for t in terms) * unit
    if not total:
        return np.float32(0)
    size = abs(total)
    places = Fraction(2) ** (len(bin(int(size * 2**400))) - 3 - 400 + 1 - keep)
    return np.float32(float(int(total / places) * places))


@pytest.mark.parametrize(
    ("types", "k", "bits", "keep"), [(("bf16", "bf16"), 16, 25, 24), (("e4m3", "e5m2"), 32, 13, 14)]
)
@pytest.mark.parametrize("spread", [1, 20, 90])
def test_sums_of_floats(types: tuple[str, str], k: int, bits: int, keep: int, spread: int) -> None:
    """Factors of few bits whose exponents lie far apart, zeros among them, and accumulators of any size."""
    rng = np.random.default_rng(spread)
    spread = min(spread, 5) if bits == 13 else spread

    def numbers(*shape: int, binary: int = 3) -> np.ndarray:
        x = rng.integers(-(1 << binary), (1 << binary) + 1, shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
        return (x * (rng.random(shape) < 0.9)).astype("f4")

    a, b, c = numbers(1, 64, k), numbers(1, 8, k), numbers(1, 64, 8, binary=22)
    found = sums.multiply(a, b, c, (*types, "f32"))
    want = [[slow(a[0, i], b[0, j], c[0, i, j], bits, keep) for j in range(8)] for i in range(64)]
    np.testing.assert_array_equal(found[0].view("u4"), np.array(want, "f4").view("u4"))


def test_infinities_and_nans_go_their_own_way() -> None:
    a, b = np.ones((1, 64, 16), "f4"), np.ones((1, 8, 16), "f4")
    c = np.zeros((1, 64, 8), "f4")
    a[0, 3, 5], b[0, 2, 7], c[0, 60, 1] = np.inf, np.nan, -np.inf
    found = sums.multiply(a, b, c, ("f16", "f16", "f32"))[0]
    want = np.full((64, 8), 16, "f4")
    want[3], want[60, 1], want[:, 2] = np.inf, -np.inf, np.nan
    np.testing.assert_array_equal(found, want)


def test_fragments() -> None:
    """The formulas of the ISA, and back."""
    words = np.arange(16 * 8 * 32, dtype="u4").reshape(16, 8, 32)
    matrix = fragments.matrix_d(words)
    w, warp, lane, i = 1, 2, 13, 7
    row, column = 16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2
    assert matrix[w, row, column] == words[i, 4 * w + warp, lane]
    np.testing.assert_array_equal(fragments.registers_d(matrix), words)
    np.testing.assert_array_equal(fragments.packed(fragments.unpacked(words)), words)


def test_descriptors() -> None:
    one = descriptor.decode(1 << 62 | 64 << 32 | 1 << 16 | 0x123)
    assert (one.layout, one.sbo, one.lbo, one.base_offset) == ("128B", 1024, 16, 0)
    with pytest.raises(DescriptorError, match="bits 0x400000000000 mean nothing to wgmma"):
        descriptor.decode(1 << 46)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("m64n8k16.f32.f16.bf16 {%r0, %r1, %r2, %r3}, %rd0, %rd0, %q0, 1, 1, 0, 0", "combination of types"),
        ("m64n8k8.f32.f16.f16 {%r0, %r1, %r2, %r3}, %rd0, %rd0, %q0, 1, 1, 0, 0", "does not exist for .f16"),
        ("m64n40k32.s32.s8.s8 {%r0, %r1, %r2, %r3}, %rd0, %rd0, %q0", "does not exist for .s8"),
        ("m64n8k16.f32.f16.f16 {%r0, %r1, %r2, %r3}, %rd0, %rd0, %q0, 1, 1", "4 constants are wanted"),
        ("m64n8k16.f32.f16.f16 {%r0, %r1, %r2, %r3}, %rd0, %rd0, %q0, 1, 2, 0, 0", "imm-scale is 1 or -1"),
        ("m64n8k16.f32.f16.f16 {%r0, %r1}, %rd0, %rd0, %q0, 1, 1, 0, 0", "a vector of 4 elements is wanted"),
        ("m64n12k16.f32.f16.f16 {%r0, %r1}, %rd0, %rd0, %q0, 1, 1, 0, 0", "expected one of"),
    ],
)
def test_refused(text: str, why: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=why):
        launch_kernel(module(f"wgmma.mma_async.sync.aligned.{text};", 0), [], block=(128, 1, 1))


def test_one_wrong_layout_is_noticed() -> None:
    made = case(replace(FORMS[0], n=64, swizzle=3))
    wrong = replace(made, ptx=made.ptx.replace(str(64 << 32 | 1 << 16 | 1 << 62), str(32 << 32 | 1 << 16 | 1 << 62)))
    assert wrong.ptx != made.ptx
    want = made.expected(made.buffers)[0]
    assert (replay(wrong, [])[0][: want.size] != want).any()
