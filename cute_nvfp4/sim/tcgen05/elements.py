"""Decodes the bytes of operands (PTX ISA, "Packing formats of elements in Tensor and Shared memory").

The result is f32, which represents every value of every input type exactly.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from cute_nvfp4.sim.numerics import half, narrow


@cache
def table(t: str) -> np.ndarray:
    """Returns the f32 value of each of the 256 bytes, for a type with one element in a byte; bits above the code have
    no effect."""
    if t in ("u8", "s8"):
        return np.arange(256, dtype="u1").view("u1" if t == "u8" else "i1").astype("f4")
    return np.resize(narrow.decode_table(t), 256)


@cache
def _fp4_quads() -> np.ndarray:
    """Returns the four E2M1 values of each 16-bit word as one 16-byte item of four f32; the low nibble comes first."""
    word = np.arange(65536)
    values = table("e2m1")[np.stack([word >> s & 15 for s in (0, 4, 8, 12)], axis=1)]
    return np.ascontiguousarray(values).view("c16").reshape(-1)


def decode(raw: np.ndarray, t: str, *, tensor_memory: bool = False) -> np.ndarray:
    """Returns f32 values (..., elements) from ``raw`` (..., bytes), which is contiguous uint8.

    The 4- and 6-bit types of kinds f8f6f4 and mxf8f6f4 (``e2m1``, ``e2m3``, ``e3m2``) are packed differently in the two
    memories. In shared memory, 16 elements fill the low end of 16 bytes. In tensor memory, each element is in the
    middle of a byte. ``e2m1x2`` is E2M1 with two elements in a byte (kinds mxf4 and mxf4nvf4).
    """
    if t == "e2m1x2":
        return _fp4_quads().take(raw.view("u2")).view("f4")
    if t in ("f16", "bf16"):
        return half.widen(raw.view("u2"), t)
    if t == "tf32":
        return (raw.view("u4") & np.uint32(0xFFFFE000)).view("f4")
    if t in ("e2m1", "e2m3", "e3m2"):
        raw = (raw >> np.uint8(2 if t == "e2m1" else 1)) if tensor_memory else unpack(raw, 4 if t == "e2m1" else 6)
    return table(t).take(raw)


def unpack(raw: np.ndarray, bits: int) -> np.ndarray:
    """Returns codes (..., 16 n), one in a byte, from bytes (..., 16 n); each 16 bytes hold 16 codes of 4 or 6 bits and
    then padding."""
    chunks = raw.reshape(*raw.shape[:-1], -1, 16)
    if bits == 4:
        packed = chunks[..., :8]
        codes = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    else:
        triple = chunks[..., :12].reshape(*chunks.shape[:-1], 4, 3).astype("u4")
        word = triple[..., 0] | triple[..., 1] << np.uint32(8) | triple[..., 2] << np.uint32(16)
        codes = np.stack([word >> np.uint32(6 * j) & np.uint32(63) for j in range(4)], axis=-1).astype("u1")
    return np.ascontiguousarray(codes.reshape(raw.shape))


def containers(raw: np.ndarray, bits: int) -> np.ndarray:
    """Returns what tcgen05.cp writes when it decompresses: the codes of ``unpack``, each in the middle of its byte."""
    return unpack(raw, bits) << np.uint8(2 if bits == 4 else 1)


@cache
def scale_table(t: str) -> np.ndarray:
    """Returns the f32 value of each of the 256 scale bytes. UE8M0 code c means 2 ** (c - 127), and 255 means NaN.
    UE4M3 has no sign bit: codes above 0x7e are NaN here, so that an invalid scale shows in the result."""
    if t == "ue8m0":
        return (narrow.decode_ue8m0(np.arange(256).astype("u1")).astype("u4") << np.uint32(16)).view("f4")
    values = narrow.decode_table("e4m3").copy()
    values[128:] = np.nan
    return values
