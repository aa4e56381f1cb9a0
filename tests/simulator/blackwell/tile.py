"""What the kernels share on both sides of a launch: the tile, its layouts in memory, and how operands are described.

Layouts are static, so that host and device each build them from the same :class:`Tile` and none is passed along.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass.cute.nvgpu import cpasync, tcgen05

from cute_nvfp4 import scale_layout

ELEMENT = cutlass.Float4E2M1FN
SCALE = cutlass.Float8E4M3FN
OUT = cutlass.Float16
BLOCK = 16  # elements that share a scale
MMA_K = 64  # elements of K that one tcgen05.mma of kind::mxf4nvf4 takes


@dataclass(frozen=True)
class Tile:
    """One output tile of (m, n) and the slice of k that a stage of shared memory holds.

    ``pair``: two CTAs work on the tile together (cta_group::2). ``cluster`` is (m, n) in CTAs. ``products`` is how
    many matrices B there are, each with an accumulator of its own.
    """

    m: int = 128
    n: int = 128
    k: int = 256
    stages: int = 4
    products: int = 1
    pair: bool = False
    cluster: tuple[int, int] = (1, 1)

    @property
    def mnk(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    @property
    def ctas(self) -> int:
        """CTAs that share one MMA."""
        return 2 if self.pair else 1

    @property
    def cta_m(self) -> int:
        """Rows of the tile that each CTA loads and stores."""
        return self.m // self.ctas

    @property
    def group(self) -> tcgen05.CtaGroup:
        return tcgen05.CtaGroup.TWO if self.pair else tcgen05.CtaGroup.ONE

    @property
    def stage_bytes(self) -> int:
        """Bytes that the TMA loads of one stage bring to all CTAs of an MMA together."""
        a = self.m * (self.k // 2 + self.k // BLOCK)
        b = self.n * (self.k // 2 + self.k // BLOCK * self.ctas)
        return a + self.products * b


def make_mma(tile: Tile) -> cute.TiledMma:
    """The block-scaled MMA of the tile: scales in UE4M3, one for 16 elements."""
    shape = (tile.m, tile.n, MMA_K)
    return cute.make_tiled_mma(tcgen05.MmaMXF4NVF4Op(SCALE, shape, tile.group, tcgen05.OperandSource.SMEM))


def make_scale_mma(tile: Tile) -> cute.TiledMma:
    """An MMA of one CTA, to partition B's scales: both CTAs of a pair need those of all columns."""
    shape = (tile.cta_m, tile.n, MMA_K)
    return cute.make_tiled_mma(tcgen05.MmaMXF4NVF4Op(SCALE, shape, tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM))


def cluster_layout(tile: Tile, mma: cute.TiledMma) -> cute.Layout:
    """(V, M, N, K) to rank in the cluster, V being the CTA's place in its MMA."""
    return cute.tiled_divide(cute.make_layout((*tile.cluster, 1)), (mma.thr_id.shape,))


class SharedLayouts:
    """Layouts in shared memory, each (MMA, MMA_M or MMA_N, MMA_K, STAGE)."""

    def __init__(self, tile: Tile, mma: cute.TiledMma) -> None:
        self.a = blackwell.make_smem_layout_a(mma, tile.mnk, ELEMENT, tile.stages)
        self.b = blackwell.make_smem_layout_b(mma, tile.mnk, ELEMENT, tile.stages)
        self.sfa = blockscaled.make_smem_layout_sfa(mma, tile.mnk, BLOCK, tile.stages)
        self.sfb = blockscaled.make_smem_layout_sfb(mma, tile.mnk, BLOCK, tile.stages)


def operand(data: cute.Pointer, rows, k, batch) -> cute.Tensor:
    """(rows, K, L) elements, K contiguous; K a multiple of 32, as TMA wants strides of 16 bytes."""
    k = cute.assume(k, 32)
    return cute.make_tensor(data, cute.make_layout((rows, k, batch), stride=(k, 1, cute.assume(rows * k, 32))))


def scales(data: cute.Pointer, rows, k, batch) -> cute.Tensor:
    """The scales of such an operand as the MMA sees them: (rows, K, L), with stride 0 inside a block of 16.

    The memory is that of ``scale_layout``: ((32, 4), rest) : ((16, 4), …) by ((16, 4), rest) : ((0, 1), …).
    """
    (r0, r1), columns = scale_layout.ATOM_SHAPE
    (s0, s1), s_column = scale_layout.ATOM_STRIDE
    rest_m = cute.ceil_div(rows, scale_layout.ATOM_ROWS)
    rest_k = cute.ceil_div(k, scale_layout.ATOM_COLS * BLOCK)
    size = scale_layout.ATOM_BYTES
    shape = (((r0, r1), rest_m), ((BLOCK, columns), rest_k), (1, batch))
    stride = (((s0, s1), size * rest_k), ((0, s_column), size), (0, size * rest_k * rest_m))
    return cute.make_tensor(data, cute.make_layout(shape, stride=stride))


def describe_a(tile: Tile, mma: cute.TiledMma, data: cute.Tensor, scale: cute.Tensor) -> tuple:
    """TMA loads of A and of its scales: (atom, tensor, atom of the scales, tensor of the scales)."""
    layouts, shape = SharedLayouts(tile, mma), cluster_layout(tile, mma).shape
    op = blackwell.cluster_shape_to_tma_atom_A(tile.cluster, mma.thr_id)
    stage = cute.slice_(layouts.a, (None, None, None, 0))
    stage_sf = cute.slice_(layouts.sfa, (None, None, None, 0))
    atom, tensor = cute.nvgpu.make_tiled_tma_atom_A(op, data, stage, tile.mnk, mma, shape)
    # scales go as 16-bit numbers: 256 of them are the 512 bytes of an atom, the longest row of a TMA box
    atom_sf, tensor_sf = cute.nvgpu.make_tiled_tma_atom_A(
        op, scale, stage_sf, tile.mnk, mma, shape, internal_type=cutlass.Int16
    )
    return atom, tensor, atom_sf, tensor_sf


def describe_b(tile: Tile, mma: cute.TiledMma, data: cute.Tensor, scale: cute.Tensor) -> tuple:
    """The same of B; its scales are multicast to both CTAs of a pair."""
    layouts = SharedLayouts(tile, mma)
    op = blackwell.cluster_shape_to_tma_atom_B(tile.cluster, mma.thr_id)
    stage = cute.slice_(layouts.b, (None, None, None, 0))
    atom, tensor = cute.nvgpu.make_tiled_tma_atom_B(op, data, stage, tile.mnk, mma, cluster_layout(tile, mma).shape)
    mma_sf = make_scale_mma(tile)
    op_sf = blackwell.cluster_shape_to_tma_atom_SFB(tile.cluster, mma.thr_id)
    stage_sf = cute.slice_(layouts.sfb, (None, None, None, 0))
    atom_sf, tensor_sf = cute.nvgpu.make_tiled_tma_atom_B(
        op_sf,
        scale,
        stage_sf,
        (tile.cta_m, tile.n, tile.k),
        mma_sf,
        cluster_layout(tile, mma_sf).shape,
        internal_type=cutlass.Int16,
    )
    return atom, tensor, atom_sf, tensor_sf


def prefetch(loads: tuple) -> None:
    """prefetch.tensormap of every descriptor."""
    for atom, _, atom_sf, _ in loads:
        cpasync.prefetch_descriptor(atom)
        cpasync.prefetch_descriptor(atom_sf)
