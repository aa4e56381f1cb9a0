"""TMA loads and shared-memory layouts of the operands of tcgen05 MMAs, in clusters and in pairs of CTAs.

CuTe's tiled MMA partitions a tile, and the partition is also the tile's place in shared memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from .. import operands
from ..arguments import Operand
from ..config import CTA_ROWS, GemmConfig
from ..operands import OperandLoad, SharedOperands, TmaCopy, element_types, shared_types
from .memory_plan import Tcgen05SharedPlan, TensorPlan


def make_mma(config: GemmConfig, ctas: int | None = None) -> cute.TiledMma:
    """The tiled MMA that partitions A, B and C as the instructions do. ctas: CTAs of an MMA, else ``config``'s."""
    ctas = config.ctas if ctas is None else ctas
    group = tcgen05.CtaGroup.TWO if ctas == 2 else tcgen05.CtaGroup.ONE
    shape = (CTA_ROWS * ctas, config.tile_n, config.kind.k)
    source, k_major = tcgen05.OperandSource.SMEM, OperandMajorMode.K
    if config.kind.name == "mxf4nvf4":
        return cute.make_tiled_mma(tcgen05.MmaMXF4NVF4Op(cutlass.Float8E4M3FN, shape, group, source))
    if config.kind.name == "mxf4":
        return cute.make_tiled_mma(tcgen05.MmaMXF4Op(shape, group, source))
    a, b = element_types(config)
    return cute.make_tiled_mma(tcgen05.MmaMXF8F6F4Op(a, b, shape, group, source, k_major, k_major))


def data_layouts(config: GemmConfig, mma: cute.TiledMma) -> tuple[Any, Any]:
    """Swizzled layouts of A and B in shared memory: (MMA, MMA_M or MMA_N, MMA_K, STAGE)."""
    tile = (config.tile_m, config.tile_n, config.tile_k)
    a, b = shared_types(config)
    return (
        _staged(blackwell.make_smem_layout_a(mma, tile, a, 1), config, a),
        _staged(blackwell.make_smem_layout_b(mma, tile, b, 1), config, b),
    )


def _staged(layout: Any, config: GemmConfig, element: type) -> Any:
    one = cute.slice_(layout.outer, (None, None, None, 0))
    return operands.staged(layout.inner, one, config, element, Tcgen05SharedPlan(config).stages)


def shared_operands(config: GemmConfig, mma: cute.TiledMma, base: cute.Pointer) -> SharedOperands:
    """The tensors of all stages; the first stage starts at ``base``."""
    return operands.shared_operands(config, base, data_layouts(config, mma), Tcgen05SharedPlan(config).stages)


def accumulator_layout(config: GemmConfig, mma: cute.TiledMma) -> cute.Layout:
    """The layout of accumulators in tensor memory, in columns: (MMA, MMA_M, MMA_N, PRODUCT, STAGE)."""
    plan = TensorPlan(config)
    one = mma.make_fragment_C(mma.partition_shape_C((config.tile_m, config.tile_n))).layout  # (MMA, MMA_M, MMA_N)
    products = cute.append(one, cute.make_layout(config.products, stride=config.tile_n))
    return cute.append(products, cute.make_layout(plan.acc_stages, stride=plan.acc))


def describe_operand(
    config: GemmConfig, mma: cute.TiledMma, which: int, operand: Operand, k: Int32, batch: Int32
) -> OperandLoad:
    """The TMA loads of an A (``which`` 0) or a B (1), and of its scales.

    Scales of B go to every CTA of a column of the cluster, both CTAs of a pair included.
    """
    make_op, make_atom = (
        (blackwell.cluster_shape_to_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_A),
        (blackwell.cluster_shape_to_tma_atom_B, cute.nvgpu.make_tiled_tma_atom_B),
    )[which]
    data = make_atom(
        make_op(config.cluster, mma.thr_id),
        operands.data_tensor(operand, k, operands.interleaved(config, which)),
        cute.slice_(data_layouts(config, mma)[which], (None, None, None, 0)),
        (config.tile_m, config.tile_n, config.tile_k),
        mma,
        cute.tiled_divide(cute.make_layout(config.cluster_mnk), (mma.thr_id.shape,)).shape,  # (V, M, N, K)
        **operands.unpacking(config, which),
    )
    scales = operands.describe_scales(config, which, operand, k, batch, *_scale_op(config, which))
    return OperandLoad(TmaCopy(data[0], data[1]), scales, operand.batches)


def _scale_op(config: GemmConfig, which: int) -> tuple[Any, int]:
    """The operation that loads scales, and the number of CTAs that share the load."""
    places = config.cluster[1 - which]
    group = tcgen05.CtaGroup.TWO if config.pair else tcgen05.CtaGroup.ONE
    op = cpasync.CopyBulkTensorTileG2SMulticastOp(group) if places > 1 else cpasync.CopyBulkTensorTileG2SOp(group)
    return op, places
