"""A machine of arrays for the tests of tcgen05, and references written from the ISA's text.

``place`` puts an operand into shared memory by the atoms of PTX ISA table "Layout for swizzle atoms": inside an atom
the index of a 16-byte unit is XORed with the row. The simulator works on absolute addresses instead.
"""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.layout import SHARED_BASE
from cute_nvfp4.sim.tcgen05 import TensorMemory
from cute_nvfp4.sim.tcgen05.descriptor import encode

SHARED = 200 * 1024
FLOATS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m1x2": ml_dtypes.float4_e2m1fn,
}
CODE_BITS = {"e2m3": 6, "e3m2": 6, "e2m1": 4, "e2m1x2": 4, "f16": 16, "bf16": 16, "tf32": 32}
SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}


def instruction(text: str = "tcgen05.test;") -> Instruction:
    return Instruction(text.split()[0].rstrip(";"), (), None, text, 1)


def machine(ctas: int = 1, cluster: int = 1) -> SimpleNamespace:
    """What the tensor core sees of a wave: CTAs of one warp each, all columns allocated."""
    raw = np.zeros(ctas * SHARED + 128, np.uint8)
    start = -raw.ctypes.data % 128
    wave = SimpleNamespace(
        count=ctas,
        rank=np.arange(ctas) % cluster,
        cta_of_warp=np.arange(ctas),
        shared2d=raw[start : start + ctas * SHARED].reshape(ctas, SHARED),
        shared_bytes=SHARED,
        tmem=np.zeros((ctas, 128, 512), np.uint32),
        progress=0,
        cta_name=lambda cta: f"CTA {cta}",
        run=SimpleNamespace(launch=SimpleNamespace(kernel="lab")),
    )
    wave.peer = lambda cta, rank, where="": cta - wave.rank[cta] + rank
    wave.tensor_memory = TensorMemory(wave)
    wave.tensor_memory.allocated[:] = True
    return wave


def codes(rng: np.random.Generator, t: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random codes of a type whose products of a few dozen sum exactly in f32; as unsigned integers."""
    if t in ("f16", "bf16", "tf32"):
        small = rng.integers(-8, 9, shape) * np.exp2(rng.integers(-3, 2, shape))
        if t == "f16":
            return small.astype("f2").view("u2")
        word = small.astype("f4").view("u4")
        return (word >> 16).astype("u2") if t == "bf16" else word
    if t in ("u8", "s8"):
        return rng.integers(0, 256, shape).astype("u1")
    out = rng.integers(0, 1 << CODE_BITS.get(t, 8), shape).astype("u1")
    if t == "e4m3":
        out = (out & 0x87) | (rng.integers(5, 9, shape) << 3).astype("u1")
    if t == "e5m2":
        out = (out & 0x83) | (rng.integers(13, 18, shape) << 2).astype("u1")
    return out


def values(code: np.ndarray, t: str) -> np.ndarray:
    """f64 values of codes."""
    if t == "f16":
        return code.view("f2").astype("f8")
    if t == "bf16":
        return (code.astype("u4") << 16).view("f4").astype("f8")
    if t == "tf32":
        return code.view("f4").astype("f8")
    if t in ("u8", "s8"):
        return code.view("i1" if t == "s8" else "u1").astype("f8")
    return code.view(FLOATS[t]).astype("f8")


def row_bytes(code: np.ndarray, t: str) -> np.ndarray:
    """(rows, K) codes to (rows, bytes) as they follow each other along K in shared memory."""
    rows = code.shape[0]
    if t == "e2m1x2":
        return (code[:, ::2] | code[:, 1::2] << 4).astype("u1")
    if t in ("e2m1", "e2m3", "e3m2"):
        out = np.zeros(code.shape, "u1")
        for r in range(rows):
            for first in range(0, code.shape[1], 16):
                packed = sum(int(c) << (CODE_BITS[t] * j) for j, c in enumerate(code[r, first : first + 16]))
                out[r, first : first + 16] = list(packed.to_bytes(16, "little"))
        return out
    return np.ascontiguousarray(code).view("u1").reshape(rows, -1)


def _turn(layout: str, row: int) -> int:
    """What the unit index is XORed with in row ``row`` of an atom."""
    return {"none": 0, "32B": row // 4 % 2, "64B": row // 2 % 4, "128B": row % 8}[layout]


def place_k_major(shared: np.ndarray, start: int, data: np.ndarray, layout: str) -> tuple[int, int, int]:
    """Writes (rows, bytes) at offset ``start`` of one CTA; returns (LBO, SBO, bytes between rows of atoms)."""
    rows, width = data.shape
    span = SPAN[layout]
    atom_row = 8 * span
    far = -(-rows // 8) * atom_row
    for r in range(rows):
        for unit in range(width // 16):
            atom, inside = unit // (span // 16), unit % (span // 16)
            inside ^= _turn(layout, r % 8)
            at = start - SHARED_BASE + atom * far + r // 8 * atom_row + r % 8 * span + inside * 16
            shared[at : at + 16] = data[r, 16 * unit : 16 * unit + 16]
    return far, atom_row, far


def place_mn_major(shared: np.ndarray, start: int, data: np.ndarray, layout: str) -> tuple[int, int]:
    """Writes (K, bytes along M or N); returns (LBO, SBO)."""
    depth, width = data.shape
    span, deep = (128, 4) if layout == "128B_BASE32B" else (SPAN[layout], 8)
    atom = span * deep
    across = -(-width // span)
    for k in range(depth):
        for unit in range(width // 16):
            inside = unit % (span // 16)
            inside ^= 2 * (k % 4) if layout == "128B_BASE32B" else _turn(layout, k % 8)
            at = (
                start - SHARED_BASE + (k // deep * across + unit // (span // 16)) * atom + k % deep * span + inside * 16
            )
            shared[at : at + 16] = data[k, 16 * unit : 16 * unit + 16]
    return (across * atom, atom) if layout == "none" else (atom, across * atom)


def place(wave, cta: int, start: int, code: np.ndarray, t: str, layout: str, mn_major: bool = False) -> int:
    """Puts (rows, K) codes into shared memory and returns their descriptor."""
    if mn_major:
        data = np.ascontiguousarray(code.T).view("u1").reshape(code.shape[1], -1)
        return encode(start, layout, *place_mn_major(wave.shared2d[cta], start, data, layout))
    lbo, sbo, _ = place_k_major(wave.shared2d[cta], start, row_bytes(code, t), layout)
    return encode(start, layout, lbo, sbo)
