"""The second product of the experts of one token, and the sum of their outputs, in one launch.

A CTA has sixteen rows of each expert's weight. Its warps share the packed tiles along K of all experts, one expert
after the other. Each warp loads its tiles straight from global memory to registers, before the launch that makes the
rows has ended. Then it loads its part of the rows, multiplies by ``mma.sync``, and scales the result of each tile by
its expert's factor and router weight. The CTA adds the sums of its warps in shared memory, always in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.memory import SmemAllocator

from ...ptx.async_copy import commit_group, copy_async, wait_group
from ...ptx.memory import load_global_if, load_shared, store_shared
from ...ptx.mma import load_matrices, mma_m16n8k16
from ...ptx.move import f32_bits, f32_from_bits
from ...weight_layout import SLAB_ROWS, SLABS, STEPS, TILE_K
from ..arith import div, mod
from ..factors import Factor, factor_of, scaled
from ..gemm.arguments import OUT_DTYPES
from ..gemm.epilogue import device_scalar
from ..gemm.packed.decode import ROW_LANES, PackedLane, decode_step
from .config import WARP
from .few import NOBODY, SlotIds
from .summed_config import SummedArguments, SummedConfig

CHUNK = 16
"""Bytes of one copy of a lane."""
CHUNK_ELEMENTS = CHUNK // 2
MATRIX_ROWS = 8
"""Rows of a matrix that ``ldmatrix`` loads, and lanes that give their addresses."""
TILE_CHUNKS = TILE_K // CHUNK_ELEMENTS
"""Chunks of a row that belong to one packed tile."""


class Rows(NamedTuple):
    """The token's rows, one a lane, in the order of the experts that this GPU has: the expert, the router weight, and
    the factor of its product (``alpha``, ``shift``). count: the number of rows, in every lane."""

    expert: Int32
    weight: Float32
    alpha: Float32
    shift: Int32
    count: Int32


class Place(NamedTuple):
    """The place of a packed tile of the token: the row whose expert has it, and its index along K."""

    row: Int32
    k_tile: Int32


class Summed:
    """The host function and the kernel of one :class:`SummedConfig`."""

    def __init__(self, config: SummedConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: SummedArguments, stream: CUstream):
        """Launches a CTA for each sixteen rows of an expert's weight."""
        grid = cute.ceil_div(arguments.weight.rows, SLAB_ROWS), 1, 1
        self.kernel(arguments).launch(
            grid=grid,
            block=(WARP * self.config.warps, 1, 1),
            min_blocks_per_mp=1,
            # as in the launch before: CTAs of launches with different carveouts do not run at the same time on an SM
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: SummedArguments):
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        smem = SmemAllocator()
        shared_x = smem.allocate_array(Uint8, cfg.warps * cfg.x_bytes, byte_alignment=128).toint()
        shared_sums = smem.allocate_array(Float32, cfg.warps * SLAB_ROWS).toint()
        # the launch before this one writes the rows; everything else was written before it
        rows = self.rows(arguments, lane)
        first = warp * cfg.tiles
        packed = self.load(arguments, rows, cta, first, lane)
        at = cta * SLAB_ROWS + mod(thread, SLAB_ROWS)
        rest = self.rest(arguments, rows, at)
        cute.arch.griddepcontrol_wait()
        x = shared_x + warp * cfg.x_bytes
        sums = cute.make_rmem_tensor(2, Float32)
        sums.fill(0.0)
        self.add(sums, arguments, rows, packed, first, x, lane)
        if mod(lane, ROW_LANES) == 0:
            own = shared_sums + (warp * SLAB_ROWS + div(lane, ROW_LANES)) * 4
            for half in cutlass.range_constexpr(2):
                store_shared(own + half * (SLAB_ROWS // 2 * 4), [f32_bits(sums[half])])
        cute.arch.sync_threads()
        if (thread < SLAB_ROWS) & (at < arguments.weight.rows):
            total = rest
            for i in cutlass.range_constexpr(cfg.warps):
                total = total + f32_from_bits(load_shared(shared_sums + (i * SLAB_ROWS + thread) * 4, 4)[0])
            dtype = getattr(cutlass, OUT_DTYPES[cfg.dtype])
            cute.make_tensor(arguments.out + at, cute.make_layout(1))[0] = total.to(dtype)

    def rows(self, arguments: SummedArguments, lane: Int32) -> Rows:
        """The lane's row, and its factors; zeros in lanes without a row."""
        cfg = self.config
        ids = SlotIds(arguments.ids, Int32(cfg.top), arguments.experts, arguments.first)
        of_slot = ids.expert(lane)
        place = ids.place(of_slot, lane)
        count, slot = Int32(0), Int32(0)
        for i in range(cfg.top):
            count += Int32(cute.arch.shuffle_sync(of_slot, i) < NOBODY)
            slot = cutlass.select_(cute.arch.shuffle_sync(place, i) == lane, Int32(i), slot)
        expert = cutlass.min(cute.arch.shuffle_sync(of_slot, slot), arguments.experts - 1)
        here = lane < count
        weight = device_scalar(arguments.weights + slot).to(Float32)
        scalars = [device_scalar(x.pointer + expert * x.stride) for x in arguments.factors]
        factor = factor_of(arguments.alpha, scalars, cfg.packed.factor)
        shift = Int32(0) if factor.shift is None else factor.shift
        return Rows(
            expert,
            cutlass.select_(here, weight, Float32(0.0)),
            cutlass.select_(here, factor.alpha, Float32(0.0)),
            cutlass.select_(here, shift, Int32(0)),
            count,
        )

    def places(self, k_tiles: Int32, first: Int32) -> list[Place]:
        """The places of a warp's tiles, from tile ``first`` on."""
        row = first // k_tiles
        found = [Place(row, first - row * k_tiles)]
        for _ in range(self.config.tiles - 1):
            row, k_tile = found[-1]
            last = k_tile + 1 == k_tiles
            found.append(Place(row + Int32(last), cutlass.select_(last, Int32(0), k_tile + 1)))
        return found

    def address(self, arguments: SummedArguments, rows: Rows, cta: Int32, place: Place) -> Int64:
        """The address of a packed tile in which this CTA has a slab. All lanes of a warp call this together."""
        weight = arguments.weight
        expert = cute.arch.shuffle_sync(rows.expert, mod(place.row, WARP))
        matrix = weight.tiles.toint() + Int64(expert) * weight.batch_stride
        return matrix + Int64(div(cta, SLABS) * weight.k_tiles + place.k_tile) * self.config.packed.tile_bytes

    def load(self, arguments: SummedArguments, rows: Rows, cta: Int32, first: Int32, lane: Int32) -> list[PackedLane]:
        """Loads a lane's words of the tiles from ``first`` on; zeros beyond the last."""
        packing, slab, found = self.config.packed, mod(cta, SLABS), []
        codes_at = slab * packing.slab_code_bytes + lane * CHUNK
        scales_at = (
            packing.code_bytes + slab * packing.slab_scale_bytes + div(lane, ROW_LANES) * packing.row_scale_bytes
        )
        for place in self.places(arguments.weight.k_tiles, first):
            tile, there = self.address(arguments, rows, cta, place), Int32(place.row < rows.count)
            codes = load_global_if(there, tile + codes_at, CHUNK, l1="no_allocate")
            scales = load_global_if(there, tile + scales_at, packing.row_scale_bytes)
            found.append(PackedLane(tuple(codes), tuple(scales)))
        return found

    def rest(self, arguments: SummedArguments, rows: Rows, at: Int32) -> Float32:
        """The terms of row ``at`` besides products: the shared row, and weighted biases. All lanes of a warp call it
        together."""
        cfg, total, size = self.config, Float32(0.0), arguments.weight.rows
        inside = cutlass.min(at, size - 1)
        if cfg.shared:
            total = device_scalar(arguments.shared + inside).to(Float32)
        if cfg.biased:
            for i in range(cfg.top):
                expert = cute.arch.shuffle_sync(rows.expert, i)
                bias = device_scalar(arguments.bias + (Int64(expert) * size + inside))
                weight = cute.arch.shuffle_sync(rows.weight, i)
                total = total + cutlass.select_(Int32(i) < rows.count, weight * bias, Float32(0.0))
        return total

    @cute.jit
    def copy_x(self, arguments: SummedArguments, rows: Rows, first: Int32, target: Int32, lane: Int32):
        """Copies this warp's part of the rows, with zeros beyond the last element of K, and waits for it."""
        cfg, k_tiles = self.config, arguments.weight.k_tiles
        for begin in cutlass.range_constexpr(0, cfg.tiles * TILE_CHUNKS, WARP):
            index = begin + lane
            tile = first + div(index, TILE_CHUNKS)
            row = tile // k_tiles
            k = (tile - row * k_tiles) * TILE_K + mod(index, TILE_CHUNKS) * CHUNK_ELEMENTS
            valid = cutlass.select_((row < rows.count) & (k < arguments.k), Int32(CHUNK), Int32(0))
            source = arguments.rows.toint() + (Int64(row) * arguments.k + k) * 2
            if index < cfg.tiles * TILE_CHUNKS:
                copy_async(target + index * CHUNK, source, CHUNK, valid)
        commit_group()
        wait_group(0)
        cute.arch.sync_warp()

    def add(
        self,
        sums: cute.Tensor,
        arguments: SummedArguments,
        rows: Rows,
        packed: list[PackedLane],
        first: Int32,
        x: Int32,
        lane: Int32,
    ) -> None:
        """Adds the products of the tiles from ``first`` on to the sums of rows g and g + 8 of the CTA's sixteen."""
        cfg = self.config
        self.copy_x(arguments, rows, first, x, lane)
        for u, place in enumerate(self.places(arguments.weight.k_tiles, first)):
            # every column of B is the token's row: eight lanes give the same address
            at = x + u * (TILE_K * 2) + div(lane, MATRIX_ROWS) * CHUNK
            b = load_matrices(at) + load_matrices(at + TILE_K)
            acc = [Float32(0.0)] * 4
            for step in range(STEPS):
                a = decode_step(packed[u], step, cfg.packed)
                acc = mma_m16n8k16(a, b[2 * step : 2 * step + 2], acc, cfg.dtype)
            source = mod(place.row, WARP)
            alpha, shift, weight = (cute.arch.shuffle_sync(v, source) for v in (rows.alpha, rows.shift, rows.weight))
            for half in range(2):
                number = scaled(acc[2 * half], Factor(alpha, shift)) * weight
                sums[half] = sums[half] + number
