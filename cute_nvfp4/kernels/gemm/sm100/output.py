"""The output, stored by TMA through shared memory: TMA turns 128 rows of an epilogue tile into one box, and
clips it at the output's edge.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum

from ..arguments import Output
from ..config import CTA_ROWS, GemmConfig
from ..epilogue import OUT_TYPES, OutputMatrix, Position
from ..operands import TmaCopy
from ..output import VECTOR_BYTES, ThreadStore, rounded, thread_store
from ..shared_plan import OUT_STAGES
from .warp_roles import ROLES

STORE_BARRIER = 2
"""Named barrier of the epilogue warps."""


def staged_layout(config: GemmConfig) -> cute.ComposedLayout:
    """Epilogue tiles in shared memory: (EPI_TILE_M, EPI_TILE_N, STAGE)."""
    tile = (CTA_ROWS, config.epi_tile_n)
    return blackwell.make_smem_layout_epi(OUT_TYPES[config.out], LayoutEnum.ROW_MAJOR, tile, OUT_STAGES)


def describe_store(config: GemmConfig, out: Output, m: Int32, n: Int32, batch: Int32) -> TmaCopy:
    """TMA store of epilogue tiles of a row-major output."""
    aligned = VECTOR_BYTES // config.out_bytes
    strides = (cute.assume(out.stride, aligned), 1, cute.assume(out.batch_stride, aligned))
    tensor = cute.make_tensor(out.pointer, cute.make_layout((m, n, batch), stride=strides))  # (M, N, L)
    one = cute.slice_(staged_layout(config), (None, None, 0))
    made = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, one, (CTA_ROWS, config.epi_tile_n))
    return TmaCopy(made[0], made[1])


def _together() -> None:
    pipeline.NamedBarrier(barrier_id=STORE_BARRIER, num_threads=ROLES.epilogue_threads).arrive_and_wait()


@dataclass(frozen=True)
class TmaStore:
    """A row-major output, through shared memory: all threads write their rows to a buffer, one has it stored."""

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
        # with an odd number of epilogue tiles the next work tile starts with the buffer that this one ended with
        pending = OUT_STAGES - 1 if config.slice_n // config.epi_tile_n % OUT_STAGES == 0 else 0
        if warp == 0:
            at_tile = (None, at.row // CTA_ROWS, at.column // config.epi_tile_n, at.batch)
            cute.copy(self.atom, self.source[None, buffer], self.target[at_tile])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(pending, read=True)
        _together()

    @cute.jit
    def finish(self, warp: Int32):
        """Shared memory must stay until TMA has read it."""
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def tma_store(config: GemmConfig, copy: TmaCopy, base: cute.Pointer, thread: Int32) -> TmaStore:
    """``base``: of the epilogue tiles in shared memory."""
    layout = staged_layout(config)
    pointer = cute.recast_ptr(base.align(1024), swizzle_=layout.inner, dtype=OUT_TYPES[config.out])
    staged = cute.make_tensor(pointer, layout.outer)  # (EPI_TILE_M, EPI_TILE_N, STAGE)
    # (EPI_TILE_M, EPI_TILE_N, REST_M, REST_N, L)
    tiles = cute.local_tile(copy.tensor, (CTA_ROWS, config.epi_tile_n), (None, None, None))
    source, target = cpasync.tma_partition(
        copy.atom, 0, cute.make_layout(1), cute.group_modes(staged, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return TmaStore(config, copy.atom, staged, source, target, thread)


Store = ThreadStore | TmaStore


def make_store(
    config: GemmConfig, out: Output, copy: TmaCopy | None, base: cute.Pointer | None, thread: Int32
) -> Store:
    """How the output of ``config`` is stored."""
    return tma_store(config, copy, base, thread) if config.store == "tma" else thread_store(config, out)
