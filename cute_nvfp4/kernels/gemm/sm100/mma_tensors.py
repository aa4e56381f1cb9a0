"""The operands, scales and accumulators of the block-scaled MMA as CuTe tensors.

No tensor here holds an address. The iterator is a constant, so that an element is a distance, known while tracing: from
the first A or the first scale atom of a stage, from the first column of one matrix's scales, or from the first
accumulator. The mainloop adds the distance to a base that it keeps in a register.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute

from ....ptx.tcgen05 import DESCRIPTOR_UNIT
from ....scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, ATOM_SHAPE, ATOM_STRIDE
from ..config import GemmConfig
from ..operands import SCALE_WORD, SharedOperands
from ..shared_plan import StagePlan
from .operands import accumulator_layout

COLUMN_BYTES = 4
"""Bytes of one column of tensor memory in one lane."""
LANE_BYTES = COLUMN_BYTES << 16
"""Bytes from one lane of tensor memory to the next, where an address (lane in its upper half) counts bytes."""


class MmaTensors(NamedTuple):
    """Tensors of a stage's operands and scales, one for each matrix, and tensors of tensor memory.

    tCr…: matrix descriptors, which count 16 bytes. tCs…: sources of ``tcgen05.cp``, counted alike.
    tCt…: tensor memory, in bytes for scales (a column has four) and in columns for accumulators.
    """

    tCrA: tuple[cute.Tensor, ...]  # (MMA, MMA_M, MMA_K, STAGE)
    tCrB: tuple[cute.Tensor, ...]  # (MMA, MMA_N, MMA_K, STAGE)
    tCsSFA: tuple[cute.Tensor, ...]  # (ATOM, ATOM_K, ATOM_M, STAGE)
    tCsSFB: tuple[cute.Tensor, ...]  # (ATOM, ATOM_K, ATOM_N, STAGE)
    tCtSFA: cute.Tensor  # (MMA, MMA_M, MMA_K)
    tCtSFB: cute.Tensor  # (MMA, MMA_N, MMA_K)
    tCtSFA_copy: cute.Tensor  # (ATOM, ATOM_M, ATOM_K)
    tCtSFB_copy: cute.Tensor  # (ATOM, ATOM_N, ATOM_K)
    tCtAcc: cute.Tensor  # (MMA, MMA_M, MMA_N, PRODUCT, STAGE)


def atom_in_tensor_memory() -> cute.Layout:
    """The layout of a scale atom, (row, column) to bytes: ``((32, 4), 4) : ((lane, 4), 1)``.

    ``tcgen05.cp.32x128b`` moves to one lane the sixteen bytes that one of 32 rows has in ``scale_layout``'s atom.
    """
    (_, within_lane), column = ATOM_STRIDE
    return cute.make_layout(ATOM_SHAPE, stride=((LANE_BYTES, within_lane), column))


def scales_in_tensor_memory(config: GemmConfig, atoms_mn: int) -> cute.Layout:
    """The layout of a tile's scales, (row, scale along K) to bytes: atoms along the rows first, then along K."""
    atom, atoms_k = atom_in_tensor_memory(), StagePlan(config).atoms_k
    lane_bytes = ATOM_BYTES // ATOM_SHAPE[0][0]  # of one atom
    shape, stride = atom.shape, atom.stride
    return cute.make_layout(
        ((shape[0], atoms_mn), (shape[1], atoms_k)),
        stride=((stride[0], lane_bytes), (stride[1], lane_bytes * atoms_mn)),
    )


def mma_tensors(config: GemmConfig, mma: cute.TiledMma, shared: SharedOperands) -> MmaTensors:
    """The partitions of one CTA's operands, scales and accumulators for ``mma``."""
    stage = StagePlan(config)

    def data(offsets: tuple[int, ...], layout: cute.Layout) -> tuple[cute.Tensor, ...]:
        return tuple(cute.make_tensor((x - stage.offsets.a[0]) // DESCRIPTOR_UNIT, layout) for x in offsets)

    def atoms(offsets: tuple[int, ...], scales: cute.Tensor) -> tuple[cute.Tensor, ...]:
        layout = cute.recast_layout(DESCRIPTOR_UNIT * 8, SCALE_WORD.width, scales.layout)
        return tuple(cute.make_tensor((x - stage.offsets.sfa[0]) // DESCRIPTOR_UNIT, layout) for x in offsets)

    sfa, sfb = scales_in_tensor_memory(config, 1), scales_in_tensor_memory(config, stage.atoms_n)
    scales, atom = config.kind.scales, (ATOM_ROWS, ATOM_COLS)
    return MmaTensors(
        tCrA=data(stage.offsets.a, mma.make_fragment_A(shared.sA[0]).layout),
        tCrB=data(stage.offsets.b, mma.make_fragment_B(shared.sB[0]).layout),
        tCsSFA=atoms(stage.offsets.sfa, shared.sSFA[0]),
        tCsSFB=atoms(stage.offsets.sfb, shared.sSFB[0]),
        tCtSFA=cute.make_tensor(0, cute.tiled_divide(sfa, (ATOM_ROWS, scales))),
        tCtSFB=cute.make_tensor(0, cute.tiled_divide(sfb, (ATOM_ROWS * stage.atoms_n, scales))),
        tCtSFA_copy=cute.make_tensor(0, cute.tiled_divide(sfa, atom)),
        tCtSFB_copy=cute.make_tensor(0, cute.tiled_divide(sfb, atom)),
        tCtAcc=cute.make_tensor(0, accumulator_layout(config, mma)),
    )
