"""The variants of the packing kernel, and its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...formats import Format
from ...runtime.signature import INT32, INT64, Pointer, Scalar
from ...target import Architecture
from ...weight_layout import DTYPES, PACKINGS, Packing
from ..quantize.arguments import Strides

WARPS = 8


@dataclass(frozen=True)
class PackConfig:
    """One variant. format: the weight's; dtype: the MMA's; layout: the scale factors', "blocked" or "rowmajor"."""

    format: Format
    dtype: str
    layout: str
    arch: Architecture

    @property
    def packing(self) -> Packing:
        """The packing. This kernel takes MX scales of any exponent: a packing that limits exponents is not for it."""
        return PACKINGS[self.format.name][DTYPES[self.dtype]]


class PackArguments(NamedTuple):
    """Packs data (batch, rows, bytes) and scales into tiles (batch, row tiles, k_tiles, bytes); strides in bytes."""

    data: Pointer = Pointer("Uint8", lambda c: min(c.format.block_bytes, 16))
    scale: Pointer = Pointer("Uint8", lambda c: 16 if c.layout == "blocked" else 1)
    packed: Pointer = Pointer("Uint8", 16)
    rows: Scalar = INT32
    k: Scalar = INT32
    k_tiles: Scalar = INT32
    batch: Scalar = INT32
    data_strides: Strides = Strides()
    scale_strides: Strides = Strides()
    packed_batch_stride: Scalar = INT64
