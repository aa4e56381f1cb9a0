"""wgmma of mixes of subnormal and normal numbers: the results of an H200, of which this file keeps the digests.

Each case was one CTA's wgmma.m64n8k16 on the matrices that ``mixes`` makes; cases of odd numbers accumulate.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from cute_nvfp4.sim.wgmma import sums

CASES = 201
RECORDED = {("f16", "f32"): "982b7ea88271ddd0", ("bf16", "f32"): "5bffef740b0b2d39", ("f16", "f16"): "129f4b87895185cc"}
"""The start of the SHA-256 of an H200's D (cases, 64, 8), by the types of A and D (driver of CUDA 13.0)."""


def elements(rng: np.random.Generator, count: int, kind: str) -> np.ndarray:
    """Bits of subnormals, of normals whose exponents lie around a centre, and of some zeros."""
    width, bias = (10, 15) if kind == "f16" else (7, 127)
    span, centre = rng.integers(0, 8), rng.integers(-13, 4) if kind == "f16" else rng.integers(-100, 90)
    exponent = centre + rng.integers(-span, span + 1, count) + bias
    subnormal = rng.integers(0, 1 << width, count) >> rng.integers(0, width + 1, count) << rng.integers(0, 3, count)
    mantissa = rng.integers(0, 1 << width, count) & -1 << rng.integers(0, width + 1)
    normal = np.clip(exponent, 1, 2 * bias - 1) << width | mantissa
    bits = np.where(rng.random(count) < rng.choice([0.1, 0.3, 0.6]), subnormal & (1 << width) - 1, normal)
    bits = np.where(rng.random(count) < 0.1, 0, bits)
    return (bits | rng.integers(0, 2, count) << 15).astype("u2")


def values(bits: np.ndarray, kind: str) -> np.ndarray:
    return bits.view("f2").astype("f4") if kind == "f16" else (bits.astype("u4") << np.uint32(16)).view("f4")


def mixes(kind: str, out: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A (cases, 64, 16), B (cases, 8, 16) and C (cases, 64, 8)."""
    a, b = np.zeros((CASES, 64, 16), "f4"), np.zeros((CASES, 8, 16), "f4")
    c = np.zeros((CASES, 64, 8), {"f32": "f4", "f16": "f2"}[out])
    most = {"f32": 1e38, "f16": 6e4}[out]
    for i in range(1, CASES):
        rng = np.random.default_rng([i, len(kind), 4 if out == "f16" else 0])
        a[i], b[i] = (values(elements(rng, 16 * rows, kind), kind).reshape(rows, 16) for rows in (64, 8))
        size = np.abs(a[i].astype("f8")).max() * np.abs(b[i].astype("f8")).max()
        scale = 2.0 ** rng.integers(-30, 3, (64, 8))
        c[i] = np.clip(rng.standard_normal((64, 8)) * size * scale, -most, most)
    # 1 less the smallest subnormal times a little more than 1
    tiny, ulp = (2.0**-24, 2.0**-10) if kind == "f16" else (2.0**-133, 2.0**-7)
    a[0, :, :2], b[0, :, :2] = [1, -tiny], [1, 1 + ulp]
    if out == "f16":  # 2^-25 + 2^-44 + 2^-23: a tie but for 2^-44, which is 30 places below 2^-14
        a[1], b[1], c[1] = 0, 0, 2.0**-23
        a[1, :, :2], b[1, :, :2] = [2.0**-12, 2.0**-22], [2.0**-13, 2.0**-22]
    return a, b, c


@pytest.mark.parametrize(("kind", "out"), RECORDED)
def test_sums_of_subnormals_are_those_of_an_h200(kind: str, out: str) -> None:
    a, b, c = mixes(kind, out)
    d = np.empty_like(c)
    for i in range(CASES):
        at = slice(i, i + 1)
        d[at] = sums.multiply(a[at], b[at], c[at] if i % 2 else None, (kind, kind, out))
    if (kind, out) == ("f16", "f32"):
        assert (d[0] == np.float32(1 - 2.0**-24)).all()
    if out == "f16":
        assert (d[1] == np.float16(2.0**-23)).all()
    assert hashlib.sha256(d.tobytes()).hexdigest()[:16] == RECORDED[kind, out]
