"""Stores of the output: by TMA through shared memory, or by threads in whole sectors.

TMA stores 128 rows of an epilogue tile as one box, and clips the box at the output's edge.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum

from ..arguments import Output
from ..config import CTA_ROWS, GemmConfig
from ..epilogue import OUT_TYPES, OutputMatrix, Position
from ..operands import TmaCopy
from ..output import VECTOR_BYTES, ThreadStore, rounded, thread_store
from ..shared_plan import OUT_STAGES
from .warp_roles import WARP, WARPGROUP

STORE_BARRIER = 2
"""Named barrier of the epilogue warps."""


def staged_layout(config: GemmConfig) -> cute.ComposedLayout:
    """The layout of epilogue tiles in shared memory: (EPI_TILE_M, EPI_TILE_N, STAGE)."""
    tile = (CTA_ROWS, config.epi_tile_n)
    return blackwell.make_smem_layout_epi(OUT_TYPES[config.out], LayoutEnum.ROW_MAJOR, tile, OUT_STAGES)


def describe_store(config: GemmConfig, out: Output, m: Int32, n: Int32, batch: Int32) -> TmaCopy:
    """The TMA store of epilogue tiles to a row-major output."""
    aligned = VECTOR_BYTES // config.out_bytes
    strides = (cute.assume(out.stride, aligned), 1, cute.assume(out.batch_stride, aligned))
    tensor = cute.make_tensor(out.pointer, cute.make_layout((m, n, batch), stride=strides))  # (M, N, L)
    one = cute.slice_(staged_layout(config), (None, None, 0))
    made = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, one, (CTA_ROWS, config.epi_tile_n))
    return TmaCopy(made[0], made[1])


def _together() -> None:
    pipeline.NamedBarrier(barrier_id=STORE_BARRIER, num_threads=WARP * WARPGROUP).arrive_and_wait()


@dataclass(frozen=True)
class TmaStore:
    """Stores to a row-major output through shared memory: all threads write their rows, one thread issues the store."""

    config: GemmConfig
    atom: cute.CopyAtom
    staged: cute.Tensor  # (EPI_TILE_M, EPI_TILE_N, STAGE)
    source: cute.Tensor  # ((atom, rest), STAGE)
    target: cute.Tensor  # ((atom, rest), REST_M, REST_N, L)
    thread: Int32

    @cute.jit
    def write(self, values: cute.Tensor, at: Position, out: OutputMatrix, buffer: cutlass.Constexpr[int], warp: Int32):
        config = self.config
        cute.autovec_copy(rounded(config, values), self.staged[self.thread, None, buffer])
        cute.arch.fence_proxy("async.shared", space="cta")
        _together()
        # with an odd number of epilogue tiles, the next work tile starts with the buffer that this one used last
        pending = OUT_STAGES - 1 if config.slice_n // config.epi_tile_n % OUT_STAGES == 0 else 0
        if warp == 0:
            at_tile = (None, at.row // CTA_ROWS, at.column // config.epi_tile_n, at.batch)
            cute.copy(self.atom, self.source[None, buffer], self.target[at_tile])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(pending, read=True)
        _together()

    @cute.jit
    def finish(self, warp: Int32):
        """Waits until TMA has read shared memory, which must stay valid until then."""
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def tma_store(config: GemmConfig, copy: TmaCopy, base: cute.Pointer, thread: Int32) -> TmaStore:
    """The store of this thread. base: the epilogue tiles in shared memory."""
    layout = staged_layout(config)
    pointer = cute.recast_ptr(base.align(1024), swizzle_=layout.inner, dtype=OUT_TYPES[config.out])
    staged = cute.make_tensor(pointer, layout.outer)  # (EPI_TILE_M, EPI_TILE_N, STAGE)
    # (EPI_TILE_M, EPI_TILE_N, REST_M, REST_N, L)
    tiles = cute.local_tile(copy.tensor, (CTA_ROWS, config.epi_tile_n), (None, None, None))
    source, target = cpasync.tma_partition(
        copy.atom, 0, cute.make_layout(1), cute.group_modes(staged, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return TmaStore(config, copy.atom, staged, source, target, thread)


def exchanged(left: Uint32, right: Uint32, odd: Int32) -> tuple[Uint32, Uint32]:
    """Exchanges a word of the left vector and one of the right vector of a lane's row with the neighbouring lane.

    Of both rows the even lane gets the words of the left vectors, the odd lane those of the right; upper row first."""
    got = cute.arch.shuffle_sync_bfly(cutlass.select_(odd == 0, right, left), 1)
    return cutlass.select_(odd == 0, left, got), cutlass.select_(odd == 0, got, right)


@dataclass(frozen=True)
class SectorStore:
    """Stores by threads to a row-major output, in whole sectors; its rows start and end at multiples of 16 bytes.

    Two neighbouring lanes have two neighbouring rows. One instruction of both stores 32 bytes of the upper row, another
    32 of the lower row. If each lane stored its own row, every instruction would write half of twice as many sectors.
    """

    config: GemmConfig

    @cute.jit
    def write(self, values: cute.Tensor, at: Position, out: OutputMatrix, buffer: cutlass.Constexpr[int], warp: Int32):
        numbers, words = VECTOR_BYTES // self.config.out_bytes, VECTOR_BYTES // 4
        mine = cute.recast_tensor(rounded(self.config, values), Uint32)  # (EPI_TILE_N · bytes / 4)
        odd = cute.arch.lane_idx() % 2
        row, column = at.row - odd, at.column + odd * numbers
        first = out.pointer + (Int64(at.batch) * out.batch_stride + Int64(row) * out.stride + column)
        for pair in cutlass.range_constexpr(cute.size(mine) // (2 * words)):
            upper, lower = (cute.make_rmem_tensor(words, Uint32) for _ in range(2))
            for i in cutlass.range_constexpr(words):
                left, right = mine[2 * words * pair + i], mine[2 * words * pair + words + i]
                upper[i], lower[i] = exchanged(left, right, odd)
            if column + 2 * numbers * pair < out.n:
                to = first + 2 * numbers * pair
                if row < out.m:
                    self._store(upper, to)
                if row + 1 < out.m:
                    self._store(lower, to + out.stride)

    def _store(self, words: cute.Tensor, to: cute.Pointer) -> None:
        target = cute.recast_ptr(to.align(VECTOR_BYTES), dtype=Uint32)
        cute.autovec_copy(words, cute.make_tensor(target, words.layout))


Store = ThreadStore | TmaStore | SectorStore


def make_store(
    config: GemmConfig, out: Output, copy: TmaCopy | None, base: cute.Pointer | None, thread: Int32
) -> Store:
    """The object that stores the output of ``config``."""
    if config.store == "tma":
        return tma_store(config, copy, base, thread)
    row_major = config.out_major == "n" and config.out in OUT_TYPES
    sectors = row_major and config.vector and config.epi_tile_n * config.out_bytes % (2 * VECTOR_BYTES) == 0
    return SectorStore(config) if sectors else thread_store(config, out)
