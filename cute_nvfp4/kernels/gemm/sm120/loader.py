"""TMA loads of a stage: every CTA loads its own operands, without multicast."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from .. import operands
from ..arguments import Operand
from ..config import CTA_ROWS, GemmConfig
from ..operands import OperandLoad, SharedOperands, TmaCopy, shared_types
from ..stage_copies import CtaTile, Slot, TmaLoader, first_atom
from ..tile_scheduler import WorkTile
from .memory_plan import MmaSyncSharedPlan


def data_layouts(config: GemmConfig) -> tuple[Any, Any]:
    """Layouts of A and B in shared memory: (ROW, K, STAGE), swizzled rows of 128 bytes."""

    def layout(rows: int, element: type) -> Any:
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, element)
        one = cute.tile_to_shape(atom, (rows, config.tile_k), (0, 1))
        return operands.staged(one.inner, one.outer, config, element, MmaSyncSharedPlan(config).stages)

    a, b = shared_types(config)
    return layout(CTA_ROWS, a), layout(config.tile_n, b)


def shared_operands(config: GemmConfig, base: cute.Pointer) -> SharedOperands:
    """The tensors of all stages; the first stage starts at ``base``."""
    return operands.shared_operands(config, base, data_layouts(config), MmaSyncSharedPlan(config).stages)


def describe_operand(config: GemmConfig, which: int, operand: Operand, k: Int32, batch: Int32) -> OperandLoad:
    """The TMA loads of an A (``which`` 0) or a B (1), and of its scales."""
    op = cpasync.CopyBulkTensorTileG2SOp()
    tensor = operands.data_tensor(operand, k, operands.interleaved(config, which))
    one = cute.slice_(data_layouts(config)[which], (None, None, 0))
    shape, options = ((CTA_ROWS, config.tile_n)[which], config.tile_k), operands.unpacking(config, which)
    data = cpasync.make_tiled_tma_atom(op, tensor, one, shape, **options)
    scales = operands.describe_scales(config, which, operand, k, batch, op)
    return OperandLoad(TmaCopy(data[0], data[1]), scales, operand.batches)


class TileLoader(TmaLoader):
    """The loading warp's copies, for its own CTA only."""

    def tiles(self, work: WorkTile) -> Iterator[CtaTile]:
        only = Slot(Int32(0), 1, Int16(0))
        for rows, index in ((CTA_ROWS, work.m), (self.config.tile_n, work.n)):
            yield CtaTile(lambda x: x, rows, index, only, partial(first_atom, index, rows), only)
