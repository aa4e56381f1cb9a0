"""The configuration of the GEMV kernel, and the shape of its tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...scale_layout import ATOM_ROWS, ATOM_SHAPE
from ...target import Architecture
from ..arith import ceil_div, div, mod
from .dot import QUAD, SLICE_BLOCKS, SLICE_K

TILE_ROWS = 16
TILES_PER_ATOM = ATOM_ROWS // TILE_ROWS
# bytes of a row of A in a slice, and of a lane's part of it; bytes of the widest cp.async; f16 scales of b in a slice
SLICE_BYTES = SLICE_K // 2
LANE_BYTES = SLICE_BYTES // QUAD
SEGMENT_BYTES = 16
ROW_SEGMENTS = SLICE_BYTES // SEGMENT_BYTES
SLICE_SCALE_BYTES = 2 * SLICE_BLOCKS

# (QUAD_OF_WARP, ROW_OF_LANE, TILE) → row of the matrix: ((4, 2), 2, (8, atoms)) : ((1, 64), 32, (4, 128)).
# The two rows of a lane, r and r + 32, are neighbours in the scale atom. The last mode has any number of atoms.
ROWS_SHAPE = ((4, 2), 2, (TILES_PER_ATOM, 1 << 24))
ROWS_STRIDE = ((1, 2 * ATOM_SHAPE[0][0]), ATOM_SHAPE[0][0], (4, ATOM_ROWS))
# rows from one tile to the next of its atom, and from the first row of a tile to its last
TILE_STEP_ROWS = ROWS_STRIDE[2][0]
TILE_LAST_ROW = 3 * ROWS_STRIDE[0][0] + ROWS_STRIDE[0][1] + ROWS_STRIDE[1]


def count_tiles(m: Any, minimum: Callable[[Any, Any], Any] = min) -> Any:
    """The number of tiles that have rows: eight in a full atom, in the last atom those that start in the matrix.

    m: an integer, or a traced one with ``minimum=cutlass.min``.
    """
    rest = ceil_div(mod(m, ATOM_ROWS), TILE_STEP_ROWS)
    return div(m, ATOM_ROWS) * TILES_PER_ATOM + minimum(rest, TILES_PER_ATOM)


@dataclass(frozen=True)
class GemvConfig:
    """One variant of the kernel: everything that the compiled code depends on.

    warps_m: groups of warps, which take different tiles; warps_k: warps of a group, which share a tile along K. tiles:
    most tiles of a CTA. stages: slices of A that a warp has in flight; shared_stages: whether they are in shared memory
    (cp.async) or in registers. k: K if it is compiled in, else 0. capacity: elements of b that shared memory holds at a
    time, a multiple of 256; chunked: whether K may be more than that. vector_bytes: the widest load that A's alignment
    allows (8, 16, 32). ragged: whether M may not be a multiple of 128, or K of 256. a_scale, b_scale: "blocked" or
    "rowmajor"; scale_word: whether one load may read four row-major scales of A. a_global, b_global: whether there is a
    global scale. out: dtype. min_blocks: CTAs that must fit on an SM, which bounds the registers (0: no bound).
    cluster: CTAs that share their tiles along K, each with a range of slices. dot: the engine, "" for the
    architecture's default.
    """

    arch: Architecture
    warps_m: int = 4
    warps_k: int = 4
    tiles: int = 16
    stages: int = 4
    shared_stages: bool = True
    k: int = 0
    capacity: int = 16384
    chunked: bool = False
    vector_bytes: int = 16
    ragged: bool = False
    a_scale: str = "blocked"
    b_scale: str = "blocked"
    scale_word: bool = True
    a_global: bool = False
    b_global: bool = False
    out: str = "float16"
    min_blocks: int = 0
    cluster: int = 1
    dot: str = ""

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_k

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def copy_bytes(self) -> int:
        """Bytes of one asynchronous copy by a lane."""
        return min(self.vector_bytes, SEGMENT_BYTES)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage of a warp: the slice of a tile, and two words of scales for each lane."""
        return TILE_ROWS * SLICE_BYTES + 32 * 8

    @property
    def capacity_slices(self) -> int:
        return self.capacity // SLICE_K
