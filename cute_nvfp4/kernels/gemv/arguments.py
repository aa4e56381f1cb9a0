"""The arguments of the GEMV's host function and kernel."""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.signature import INT32, INT64, VARYING_FLOAT32, Pointer, Scalar
from .config import GemvConfig

_BLOCKED_ALIGNMENT = 16
_DTYPES = {"float16": ("Float16", 2), "bfloat16": ("BFloat16", 2), "float32": ("Float32", 4)}


def _a_scale_alignment(config: GemvConfig) -> int:
    return _BLOCKED_ALIGNMENT if config.a_scale == "blocked" else 4 if config.scale_word else 1


class Strides(NamedTuple):
    """Distances between rows and between matrices: in bytes for A, b and scale factors, in elements for c."""

    row: Scalar = INT64
    batch: Scalar = INT64


class GemvArguments(NamedTuple):
    """c = alpha · a_global · b_global · (A · b), for each of ``batch`` matrices.

    a, sfa: (batch, m, k) E2M1 elements and their scales; b, sfb: (batch, k) and their scales; c: (batch, m). a_global,
    b_global: one value each, read if the configuration has them. b_batch, sfb_batch: bytes between matrices. ctas: CTAs
    for each matrix, whose clusters divide its tiles evenly. The kernel gets their TileShare in this place instead: with
    other orders of the parameters, ptxas spills in ragged kernels of sm_100a.
    """

    a: Pointer = Pointer("Uint8", lambda c: c.vector_bytes)
    sfa: Pointer = Pointer("Uint8", _a_scale_alignment)
    b: Pointer = Pointer("Uint8", 8)
    sfb: Pointer = Pointer("Uint8", lambda c: _BLOCKED_ALIGNMENT if c.b_scale == "blocked" else 1)
    c: Pointer = Pointer(lambda c: _DTYPES[c.out][0], lambda c: _DTYPES[c.out][1])
    a_global: Pointer = Pointer("Float32", 4)
    b_global: Pointer = Pointer("Float32", 4)
    alpha: Scalar = VARYING_FLOAT32
    m: Scalar = INT32
    k: Scalar = INT32
    batch: Scalar = INT32
    ctas: Scalar = INT32
    a_strides: Strides = Strides()
    sfa_strides: Strides = Strides()
    b_batch: Scalar = INT64
    sfb_batch: Scalar = INT64
    c_strides: Strides = Strides()
