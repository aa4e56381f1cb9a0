"""The configurations and arguments of the decoding kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ...formats import Format
from ...runtime.signature import INT32, INT64, PerConfig, Pointer, Scalar
from ...scale_layout import ATOM_ROWS, ATOM_SHAPE
from ...target import Architecture
from ..arith import ceil_div
from ..quantize.arguments import Strides
from ..quantize.config import ITEM_BYTES, WARP

VECTOR_BYTES = 16
"""Bytes that a lane stores at once."""
WARPS = 8
LANE_ROWS = 4
"""Rows of a lane: r, r + 32, r + 64, r + 96 of a scale atom, whose scales are sixteen contiguous bytes."""


@dataclass(frozen=True)
class DequantizeConfig:
    """One variant of the kernel.

    format: the matrix's. out: dtype of the values. layout: of the scales, "blocked" or "rowmajor". global_scale:
    whether there is one. order: of the values in a row: "columns", or the order in which the GEMM of weights that lie
    in rows reads x (``gemm.packed.rows.column_of``), for which K is a multiple of 128.
    """

    format: Format
    out: str
    layout: str
    global_scale: bool
    arch: Architecture
    order: str = "columns"

    @property
    def elements(self) -> int:
        """Elements of a row that a lane decodes, sixteen bytes of the result."""
        return VECTOR_BYTES // ITEM_BYTES[self.out]

    @property
    def data_bytes(self) -> int:
        """Bytes of data from which a lane decodes its elements of a row."""
        return self.elements // self.format.elements_per_byte

    @property
    def cta_columns(self) -> int:
        """Columns that the lanes of a warp decode together."""
        return WARP * self.elements

    def ctas(self, rows: Any, k: Any) -> Any:
        """CTAs for a matrix: each has 32 rows, eight of each quarter of a scale atom, and the columns of a warp."""
        return ceil_div(rows, ATOM_ROWS) * (ATOM_SHAPE[0][0] // WARPS) * ceil_div(k, self.cta_columns)


class DequantizeArguments(NamedTuple):
    """Decodes data (batch, rows, bytes) and scales to contiguous values (batch, rows, k); strides in bytes."""

    data: Pointer = Pointer("Uint8", lambda c: min(c.format.block_bytes, 16))
    scale: Pointer = Pointer("Uint8", lambda c: 16 if c.layout == "blocked" else 1)
    global_scale: Pointer | None = PerConfig(lambda c: Pointer("Float32", 4) if c.global_scale else None)
    out: Pointer = Pointer("Uint8", VECTOR_BYTES)
    rows: Scalar = INT32
    k: Scalar = INT32
    batch: Scalar = INT32
    data_strides: Strides = Strides()
    scale_strides: Strides = Strides()
    out_batch_stride: Scalar = INT64


SLOTS = (1, 2, 4, 8, 16)
"""Numbers of matrices that a launch of the grouped kernel has room for."""


@dataclass(frozen=True)
class GroupedDequantizeConfig(DequantizeConfig):
    """One variant for up to ``slots`` matrices of different sizes, with blocked scales and no global scale."""

    slots: int = 1


class GroupedMatrix(NamedTuple):
    """One matrix of a launch. stride: bytes between rows; out_offset: bytes from the first matrix's values to its."""

    data: Pointer = Pointer("Uint8", lambda c: min(c.format.block_bytes, 16))
    scale: Pointer = Pointer("Uint8", 16)
    rows: Scalar = INT32
    k: Scalar = INT32
    stride: Scalar = INT64
    out_offset: Scalar = INT64


class GroupedDequantizeArguments(NamedTuple):
    """``count`` matrices, followed by unused slots. ctas: for the largest matrix."""

    groups: tuple[GroupedMatrix, ...] = PerConfig(lambda c: (GroupedMatrix(),) * c.slots)
    out: Pointer = Pointer("Uint8", VECTOR_BYTES)
    ctas: Scalar = INT32
    count: Scalar = INT32


@dataclass(frozen=True)
class GroupRowsConfig(DequantizeConfig):
    """One variant for rows of groups (``GroupedRows``), without global scale. capacity: groups, a multiple of 32."""

    capacity: int = WARP

    def ctas(self, rows: Any, k: Any) -> Any:
        """CTAs for all rows: each warp has four rows and the columns of its lanes."""
        return ceil_div(rows, WARPS * LANE_ROWS) * ceil_div(k, self.cta_columns)


class GroupRowsArguments(NamedTuple):
    """Decodes data, rows ``stride`` bytes apart, to contiguous values (rows, k). scale: the scales of each group are
    padded for themselves to atoms of 128 rows, ``atoms`` in all; offsets: of the ``count`` groups."""

    data: Pointer = Pointer("Uint8", lambda c: min(c.format.block_bytes, 16))
    scale: Pointer = Pointer("Uint8", 16)
    offsets: Pointer = Pointer("Int32", 4)
    out: Pointer = Pointer("Uint8", VECTOR_BYTES)
    rows: Scalar = INT32
    k: Scalar = INT32
    stride: Scalar = INT64
    atoms: Scalar = INT32
    count: Scalar = INT32
