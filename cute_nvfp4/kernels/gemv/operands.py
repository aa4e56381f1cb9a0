"""Records that the GEMV's device functions pass to one another, and the places of a tile's rows and scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_SHAPE, cute_layout
from ..arith import div, mod
from .arguments import GemvArguments
from .config import ROWS_SHAPE, ROWS_STRIDE, TILE_STEP_ROWS, TILES_PER_ATOM, GemvConfig
from .dot import BLOCK_K, LANE_BLOCKS, QUAD, SLICE_BLOCKS


class Thread(NamedTuple):
    """A thread's place in the CTA: its index, its lane, its warp's group (``warp_m``) and place there (``warp_k``)."""

    index: Int32
    lane: Int32
    warp_m: Int32
    warp_k: Int32


class Span(NamedTuple):
    """Consecutive tiles of a CTA, or consecutive slices of K."""

    first: Int32
    count: Int32


class MatrixA(NamedTuple):
    """One matrix A and its scale factors: addresses, sizes, and strides in bytes.

    Tensors of these layouts would change the PTX and machine code of every variant: they add row, column and batch in
    another order, compute K / 16 and the atoms along K ahead of the loop, and keep pointers (17 instructions more in a
    chunked kernel of sm_100a). A warp's cursor advances by constants, and is computed anew only for a new tile.
    """

    data: Int64  # (M, K / 2) : (row, 1)
    scale: Int64  # (M, K / 16) : (scale_row, 1), or ``blocked_scales``
    m: Int32
    k: Int32
    row: Int64
    scale_row: Int64

    @property
    def blocked_scales(self) -> cute.Layout:
        """The layout of blocked scales, (((32, 4), M / 128), (4, K / 64), 1)."""
        return cute_layout(self.m, div(self.k, BLOCK_K))


class VectorB(NamedTuple):
    """One vector b (row 0) and its scale factors, as addresses."""

    data: Int64  # (BYTE_OF_BLOCK, K / 16) : (1, 8)
    scale: Int64  # (K / 16) : (1), or blocked: (((32, 4), 1), (4, K / 64), 1)


class SharedB(NamedTuple):
    """A chunk of b as the dot engine reads it, the engine's constants, and the scales of b in f16.

    These are addresses in shared memory: the engine lays out the bytes of ``values``, and volatile inline PTX reads
    them where the loop has it (:mod:`.dot`).
    """

    values: Int32
    constants: Int32
    scales: cute.Tensor  # (CAPACITY / 16)
    scale_address: Int32


class Offset(NamedTuple):
    """The distance between two places, in bytes of A and in bytes of its scales."""

    data: Int64
    scale: Int64


class LaneAddresses(NamedTuple):
    """The addresses that a lane reads next: of A, and of its two rows' scales (one for both if they are neighbours)."""

    data: Int64
    scale: Int64
    second_scale: Int64 | None = None

    @property
    def scales(self) -> tuple:
        return (self.scale,) if self.second_scale is None else (self.scale, self.second_scale)

    def advanced(self, by: Offset) -> LaneAddresses:
        return LaneAddresses(self.data + by.data, *(address + by.scale for address in self.scales))


class Cursor(NamedTuple):
    """The next slice to load: its addresses, its tile, its index among the warp's slices, and the tile's offset."""

    addresses: LaneAddresses
    tile: Int32
    step: Int32
    offset: Offset


class Rest(NamedTuple):
    """The rest of the matrix: rows from a tile's first row on, and blocks of K from a slice's first block on."""

    rows: Int32
    blocks: Int32

    def existing_blocks(self, row: Any, first_block: Any) -> Any:
        """Blocks that exist in ``row`` of the tile, from ``first_block`` of the slice on; may be negative."""
        return cutlass.select_(row < self.rows, self.blocks - first_block, Int32(0))


class Fragment(NamedTuple):
    """A lane's part of a slice: eight words, and a word of four scales, of each of its two rows."""

    rows: list
    scales: list


def matrix_a(config: GemvConfig, arguments: GemvArguments, batch: Int32, k: Int32) -> MatrixA:
    """Matrix A number ``batch`` and its scales."""
    # rows are contiguous if K is compiled in
    row = Int64(config.k // 2) if config.k else arguments.a_strides.row
    data = arguments.a.toint() + Int64(batch) * arguments.a_strides.batch
    scale = arguments.sfa.toint() + Int64(batch) * arguments.sfa_strides.batch
    return MatrixA(data, scale, arguments.m, k, row, arguments.sfa_strides.row)


def vector_b(arguments: GemvArguments, batch: Int32) -> VectorB:
    """Vector b number ``batch`` and its scales."""
    data = arguments.b.toint() + Int64(batch) * arguments.b_batch
    return VectorB(data, arguments.sfb.toint() + Int64(batch) * arguments.sfb_batch)


def tile_row(tile: Any, quad: Any, row_of_lane: Any) -> Any:
    """The row of the matrix that quad ``quad`` (0–7) of a warp has as row 0 or 1 of its lanes in tile ``tile``."""
    # splitting coordinates takes a shift and a mask here
    rows = cute.make_layout(ROWS_SHAPE, stride=ROWS_STRIDE)  # (QUAD_OF_WARP, ROW_OF_LANE, TILE)
    quads = ROWS_SHAPE[0][0]
    quad_crd = (mod(quad, quads), div(quad, quads))
    tile_crd = (mod(tile, TILES_PER_ATOM), div(tile, TILES_PER_ATOM))
    return cute.crd2idx((quad_crd, row_of_lane, tile_crd), rows)


def blocked_offset(row_of_atom: Any, atom: Any, column: Any, layout: cute.Layout) -> Any:
    """The byte offset of a blocked scale: ``column`` of row ``row_of_atom`` of the 128 rows of ``atom``."""
    row_crd = (mod(row_of_atom, ATOM_SHAPE[0][0]), div(row_of_atom, ATOM_SHAPE[0][0]))
    return cute.crd2idx(((row_crd, atom), (mod(column, ATOM_COLS), div(column, ATOM_COLS)), 0), layout)


def tile_offset(config: GemvConfig, a: MatrixA, tile: Any) -> Offset:
    """The distance from tile 0 to ``tile`` in bytes."""
    row = tile_row(tile, 0, 0)
    if config.a_scale == "rowmajor":
        return Offset(Int64(row) * a.row, Int64(row) * a.scale_row)
    first_row, atom = mod(tile, TILES_PER_ATOM) * TILE_STEP_ROWS, div(tile, TILES_PER_ATOM)
    scale = blocked_offset(first_row, atom, 0, a.blocked_scales)
    return Offset(Int64(row) * a.row, Int64(scale))


def slice_scale_bytes(config: GemvConfig) -> int:
    """The distance from a slice's scales to the next slice's in the same row, in bytes."""
    return ATOM_BYTES * (SLICE_BLOCKS // ATOM_COLS) if config.a_scale == "blocked" else SLICE_BLOCKS


def lane_scales(config: GemvConfig, a: MatrixA, lane: Any, slice_index: Any) -> list[Int64]:
    """Addresses, in tile 0, of the lane's four scales of each row; blocked rows are neighbours, with one address."""
    column = slice_index * SLICE_BLOCKS + mod(lane, QUAD) * LANE_BLOCKS
    rows = [tile_row(0, div(lane, QUAD), r) for r in range(2)]
    if config.a_scale == "blocked":
        return [a.scale + Int64(blocked_offset(rows[0], 0, column, a.blocked_scales))]
    return [a.scale + Int64(row) * a.scale_row + Int64(column) for row in rows]
