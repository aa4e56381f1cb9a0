"""Device-side pieces: shared and tensor memory of a tile, the loads of a stage, the MMAs of a stage, the epilogue."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from .tile import BLOCK, ELEMENT, MMA_K, OUT, SCALE, SharedLayouts, Tile

EPILOGUE_COLUMNS = 32


@dataclass
class Shared:
    """Operands in shared memory, (MMA, MMA_M or MMA_N, MMA_K, STAGE): A and its scales, then every B with its own."""

    a: cute.Tensor
    sfa: cute.Tensor
    b: list[cute.Tensor]
    sfb: list[cute.Tensor]


def allocate_shared(smem: SmemAllocator, tile: Tile, mma: cute.TiledMma) -> Shared:
    layouts = SharedLayouts(tile, mma)

    # a 128-byte swizzle repeats every 1024 bytes, and matrix descriptors with base offset 0 start on such a boundary
    def data(layout):
        return smem.allocate_tensor(
            element_type=ELEMENT, layout=layout.outer, byte_alignment=1024, swizzle=layout.inner
        )

    def scale(layout):
        return smem.allocate_tensor(element_type=SCALE, layout=layout, byte_alignment=128)

    several = range(tile.products)
    return Shared(
        data(layouts.a), scale(layouts.sfa), [data(layouts.b) for _ in several], [scale(layouts.sfb) for _ in several]
    )


def split_a(tile: Tile, mma, load: tuple, data: cute.Tensor, scale: cute.Tensor, v=0, place=0, places=1):
    """TMA source and target of A and of its scales: [(source, target), (source, target)].

    Sources are ((atom, rest), RestM, RestK, RestL), targets ((atom, rest), STAGE). ``v`` is the CTA's place in its
    MMA; ``place`` of ``places`` says which part of the tile this CTA fetches for all that it is multicast to.
    """
    atom, tensor, atom_sf, tensor_sf = load
    part = mma.get_slice(v)
    return [
        _split(atom, data, part.partition_A(_tiles(tensor, (tile.m, tile.k))), place, places),
        _without_repeats(_split(atom_sf, scale, part.partition_A(_tiles(tensor_sf, (tile.m, tile.k))), place, places)),
    ]


def split_b(tile: Tile, mma, mma_sf, load: tuple, data, scale, v=0, place=0, places=1, place_sf=0, places_sf=1):
    """The same of one B; its scales have places of their own."""
    atom, tensor, atom_sf, tensor_sf = load
    tiles = mma.get_slice(v).partition_B(_tiles(tensor, (tile.n, tile.k)))
    tiles_sf = mma_sf.get_slice(0).partition_B(_tiles(tensor_sf, (tile.n, tile.k)))
    return [
        _split(atom, data, tiles, place, places),
        _without_repeats(_split(atom_sf, scale, tiles_sf, place_sf, places_sf)),
    ]


def _tiles(tensor: cute.Tensor, shape: tuple[int, int]) -> cute.Tensor:
    """(rows, K, L) to (tile rows, tile K, RestRows, RestK, RestL)."""
    return cute.local_tile(tensor, shape, (None, None, None))


def _split(atom, shared, tiles, place, places):
    target, source = cpasync.tma_partition(
        atom, place, cute.make_layout(places), cute.group_modes(shared, 0, 3), cute.group_modes(tiles, 0, 3)
    )
    return source, target


def _without_repeats(pair):
    """Scales without the modes of stride 0 that repeat each of them over its block."""
    return tuple(cute.filter_zeros(tensor) for tensor in pair)


class TensorMemory:
    """Where accumulators and scales lie in tensor memory, from a base address.

    ``acc``: a (MMA, MMA_M, MMA_N) accumulator for each product and each of ``stages``; then the scales of A, then
    those of every B, each (MMA, MMA_MN, MMA_K).
    """

    def __init__(self, tile: Tile, mma: cute.TiledMma, base: cute.Pointer, stages: int = 1) -> None:
        layouts = SharedLayouts(tile, mma)
        acc = mma.make_fragment_C(mma.partition_shape_C((tile.m, tile.n))).layout
        self.acc = [
            [cute.make_tensor(base + (stage * tile.products + i) * tile.n, acc) for i in range(tile.products)]
            for stage in range(stages)
        ]
        column = stages * tile.products * tile.n
        sfa = blockscaled.make_tmem_layout_sfa(mma, tile.mnk, BLOCK, cute.slice_(layouts.sfa, (None, None, None, 0)))
        sfb = blockscaled.make_tmem_layout_sfb(mma, tile.mnk, BLOCK, cute.slice_(layouts.sfb, (None, None, None, 0)))
        self.sfa = cute.make_tensor(cute.recast_ptr(base + column, dtype=SCALE), sfa)
        column += scale_columns(tile.cta_m, tile.k)
        self.sfb = []
        for _ in range(tile.products):
            self.sfb.append(cute.make_tensor(cute.recast_ptr(base + column, dtype=SCALE), sfb))
            column += scale_columns(tile.n, tile.k)


def scale_columns(rows: int, k: int) -> int:
    """Columns of tensor memory for the scales of ``rows`` by ``k``: four for each 128 rows and each MMA."""
    return 4 * -(-rows // 128) * (k // MMA_K)


def allocated_columns(tile: Tile, stages: int = 1) -> int:
    """Columns to allocate: what is needed, rounded up to a power of two."""
    need = stages * tile.products * tile.n + scale_columns(tile.cta_m, tile.k)
    need += tile.products * scale_columns(tile.n, tile.k)
    return max(32, 1 << (need - 1).bit_length())


def scale_copy(tile: Tile, shared: cute.Tensor, tmem: cute.Tensor) -> tuple:
    """tcgen05.cp of a stage's scales: (copy, source descriptors (…, STAGE), target)."""
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tile.group), SCALE)
    target = cute.filter_zeros(tmem)
    copy = tcgen05.make_s2t_copy(atom, target)
    part = copy.get_slice(0)
    source = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(cute.filter_zeros(shared)))
    return copy, source, part.partition_D(target)


def accumulator_load(acc: cute.Tensor, thread, columns: int = EPILOGUE_COLUMNS) -> tuple:
    """tcgen05.ld of one accumulator: (copy, source (LD, LD_M, LD_N, 1, pieces), registers of a piece).

    A piece is ``columns`` columns of the row that has the thread's number.
    """
    rows = cute.size(acc, mode=[0, 0])
    pieces = cute.flat_divide(acc[((None, None), 0, 0)], (rows, columns))  # (M, EPI_N, 1, pieces)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(columns), tcgen05.Pack.NONE), cutlass.Float32)
    copy = tcgen05.make_tmem_copy(atom, pieces[None, None, 0, 0])
    part = copy.get_slice(thread)
    identity = part.partition_D(cute.make_identity_tensor((rows, columns)))
    return copy, part.partition_S(pieces), cute.make_rmem_tensor(identity.shape, cutlass.Float32)


@cute.jit
def store_row(values: cute.Tensor, c: cute.Pointer, row, column, m, n):
    """Stores the part of a row that lies inside (m, n): 16 bytes at a time, so n must be a multiple of 8.

    ``values``: fp32 registers of ``EPILOGUE_COLUMNS`` columns from ``column`` on.
    """
    rounded = cute.make_rmem_tensor(cute.make_layout(EPILOGUE_COLUMNS), OUT)
    rounded.store(values.load().to(OUT).reshape((EPILOGUE_COLUMNS,)))
    target = c + (cutlass.Int64(row) * n + column)
    for i in cutlass.range_constexpr(EPILOGUE_COLUMNS // 8):
        if (row < m) & (column + 8 * i < n):
            piece = cute.make_tensor((target + 8 * i).align(16), cute.make_layout(8))
            cute.autovec_copy(cute.make_tensor(rounded.iterator + 8 * i, cute.make_layout(8)), piece)
