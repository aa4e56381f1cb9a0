"""The rows and columns of a CTA's tile that a warp and a lane have.

``mma.sync`` leaves open which row of the tile is row g of an instruction, and which column is column i. This module
chooses both so that loads of shared memory have no bank conflicts and a lane gets neighbours of a row. Lane 4g + q:

* rows: an instruction's rows g and g + 8 are row 8r + g of two of the four 32-row blocks of a scale atom. The scales of
  the atom's rows 8r … 8r + 7 of all blocks are 128 contiguous bytes, in the order in which the lanes need them: lane
  4g + q loads word 4g + q.
* columns: an instruction's columns 2q and 2q + 1 are one pair of run q, which is sixteen contiguous columns of the
  tile. Of the eight instructions along N, instruction (x, t) takes pair t ^ q of half x of the run. The eight rows that
  an ``ldmatrix`` reads then differ modulo 8, and so do the scales that the 32 lanes load. From four instructions a lane
  gets eight contiguous columns of a row, in an order that two exchanges of registers restore. In tiles of 32 columns a
  run has one half; in tiles of 16 it has two pairs, of which instruction t takes pair t ^ (q / 2).

There are 4 warps along M and 2 along N where a tile has 128 columns, and 8 along M where it has fewer.

Rows are (ROW, GROUP, BLOCK) : (1, 8, 32), columns are (COLUMN, WARP, RUN) : (1, run, tile_n / 4). Written as CuTe
layouts they take up to three more instructions ahead of the loop; as sums they are as short as they get.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32

from ....scale_layout import ATOM_STRIDE
from ..config import CTA_ROWS, MMA_BYTES, TILE_BYTES, GemmConfig
from .memory_plan import MMA_WARPS

WARP_COLUMNS = 64
BLOCK_ROWS = 32
GROUP_ROWS = 8
_ROW_OF_BLOCK, _BLOCK = ATOM_STRIDE[0]
CHUNK_BYTES = 16


@dataclass(frozen=True)
class WarpTile:
    """A lane's part of the tile. m, n: the warp's place in the tile; lane: 4g + q."""

    config: GemmConfig
    m: Int32
    n: Int32
    lane: Int32

    @property
    def g(self) -> Int32:
        return self.lane >> 2

    @property
    def q(self) -> Int32:
        return self.lane & 3

    @property
    def m_tiles(self) -> int:
        """MMA instructions along M."""
        return CTA_ROWS // (16 * warps_m(self.config))

    @property
    def run(self) -> int:
        """Contiguous columns of a row in one lane: sixteen are a block of NVFP4, or 32 bytes of a 16-bit output."""
        return self.config.epi_tile_n

    @property
    def pairs(self) -> int:
        """Pairs of columns in a half of a run; each pair belongs to another instruction."""
        return min(4, self.run // 2)

    @property
    def halves(self) -> int:
        return self.run // (2 * self.pairs)

    def turn(self, run: Int32) -> Int32:
        """The value by which instruction t of ``run`` is permuted: it takes pair t ^ turn."""
        return run if self.pairs == 4 else run >> 1

    @property
    def first_block(self) -> Int32:
        """The first 32-row block of the warp; each of its instructions takes two blocks."""
        return (self.m >> 2) * 2

    @property
    def group(self) -> Int32:
        """The warp's group of eight rows in every block."""
        return self.m & 3

    def row(self, m_tile: int, half: int) -> Int32:
        """The tile's row of the lane's results: row g (half 0) or g + 8 (half 1) of instruction ``m_tile``."""
        return (self.first_block + (2 * m_tile + half)) * BLOCK_ROWS + self.group * GROUP_ROWS + self.g

    @property
    def column(self) -> Int32:
        """The first column of the lane's run."""
        return self.q * (self.config.tile_n // 4) + self.n * self.run

    # Data is swizzled: bits 7 to 9 of an address are added to its bits 4 to 6, without carry. The offsets of k-blocks
    # and pairs therefore differ from the first one's in bits that an exclusive or flips, wherever a stage starts.

    @staticmethod
    def k_bits(k: int) -> int:
        """The bits of a data offset that k-block ``k`` flips."""
        return k * MMA_BYTES

    @staticmethod
    def pair_bits(two: int) -> int:
        """The bits that instructions 2 · ``two`` and 2 · ``two`` + 1 along N flip: bit 1 of pair t ^ turn."""
        return two * 4 * (TILE_BYTES + CHUNK_BYTES)

    @property
    def a_offset(self) -> Int32:
        """Bytes from A to the row of 16 bytes whose address this lane gives to ``ldmatrix`` for the first k-block of
        the first instruction along M. Its matrices are rows g and g + 8 of the first half of K, then of the second."""
        i, matrix = self.lane & 7, self.lane >> 3
        row = (self.first_block + (matrix & 1)) * BLOCK_ROWS + self.group * GROUP_ROWS + i
        return row * TILE_BYTES + ((matrix >> 1) ^ i) * CHUNK_BYTES

    @property
    def a_step(self) -> int:
        """Bytes to the next instruction along M."""
        return 2 * BLOCK_ROWS * TILE_BYTES

    @property
    def b_offset(self) -> Int32:
        """Bytes from B to such a row, for instructions (x, t) = (0, 0) and (0, 1). The matrices are the two halves of K
        of the first instruction, then of the second."""
        i, matrix = self.lane & 7, self.lane >> 3
        run, within = i >> 1, i & 1
        first = run * (self.config.tile_n // 4) + self.n * self.run
        row = first + (2 * ((matrix >> 1) ^ self.turn(run)) + within)
        return row * TILE_BYTES + ((matrix & 1) ^ (row & 7)) * CHUNK_BYTES

    @property
    def b_step(self) -> int:
        """Bytes to the other half of a run."""
        return GROUP_ROWS * TILE_BYTES

    @property
    def sfa_offset(self) -> Int32:
        """Bytes from an atom of A's scales to this lane's word. Lanes 2j and 2j + 1 of a quad have the scales of rows g
        and g + 8 of instruction j."""
        block = self.first_block + (self.q & (2 * self.m_tiles - 1))
        return (self.group * GROUP_ROWS + self.g) * _ROW_OF_BLOCK + block * _BLOCK

    def sfb_offset(self, tile_n: Int32) -> Int32:
        """Bytes from an atom of B's scales to this lane's word for x = 0: the scales of column g of instruction q (q &
        1 where there are two). tile_n: index of the tile, since a narrow tile may start in the middle of an atom."""
        run, within = self.g >> 1, self.g & 1
        pair = (self.q & (self.pairs - 1)) ^ self.turn(run)
        column = run * (self.config.tile_n // 4) + self.n * self.run + 2 * pair + within
        if self.config.tile_n < CTA_ROWS:
            column = column + (tile_n & (CTA_ROWS // self.config.tile_n - 1)) * self.config.tile_n
        return (column & (BLOCK_ROWS - 1)) * _ROW_OF_BLOCK + (column >> 5) * _BLOCK

    @property
    def sfb_step(self) -> int:
        """Bytes to the other half of a run."""
        return GROUP_ROWS * _ROW_OF_BLOCK


def warps_m(config: GemmConfig) -> int:
    """The number of warps along M."""
    return MMA_WARPS // max(1, config.tile_n // WARP_COLUMNS)


def warp_tile(config: GemmConfig, warp: Int32, lane: Int32) -> WarpTile:
    """The part of lane ``lane`` of warp ``warp``."""
    along_m = warps_m(config)
    return WarpTile(config, warp & (along_m - 1), warp // along_m if along_m < MMA_WARPS else Int32(0), lane)
