"""Quantization with one scale for each square tile of 16 × 16 elements (MX 32 × 32).

Work distribution. A lane takes a whole square tile, row by row, because sums over tiles have an order. A warp's *work
tile* is 4 × 8 square tiles, one for each lane: eight neighbouring block columns, in rows r … r + 15 (MX r + 31) of a
scale atom and in those rows + 32, + 64 and + 96. In the blocked layout the scales of four block columns of such a work
tile are sixteen contiguous bytes (four columns of four square tiles), which repeat for each of the rows.

x is read once for the largest magnitudes and again for the codes (4/6: a third time in between, for the errors). The
second read comes from the caches; shared memory therefore is left to L1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ...ptx.arithmetic import abs_f32, add_rn, max_abs_f32, mul_rn
from ...ptx.memory import store_global, store_global_byte
from ...scale_layout import ATOM_COLS, ATOM_ROWS
from ..arith import div, mod
from .arguments import QuantizeArguments
from .block import four_six_by_sums as by_sums
from .block.definition import (
    candidate_scales,
    encode_elements,
    largest_magnitude,
    ordered_sum,
    residuals,
    to_f32,
    wanted_scale,
)
from .block.quantize_block import NAN_E4M3, encode_block
from .block.records import BlockContext, Draw
from .config import ELEMENTS, ROW_STEP, WARP, WARP_ROWS, QuantizeConfig
from .kernel import Matrices, QuantizeKernel, address_of
from .rotation import rotated_words

# block columns of a work tile
TILE_COLS = WARP // WARP_ROWS
# bytes of a square tile that a lane loads before it uses any of them
_BATCH_BYTES = 256
_INFINITY = float("inf")


class SquareTile(NamedTuple):
    """The square tile of a lane.

    start, stride: the address of its first row in x, and bytes between rows. height: its rows that exist, 0 if the tile
    does not. index, pitch: the index of its first element in the result, and elements between rows.
    """

    start: Int64
    stride: Int64
    height: Int32
    index: Int64
    pitch: Int64


class Best(NamedTuple):
    """4/6's scale of a square tile: its code, its value, and the index of the candidate."""

    code: Uint32
    value: Float32
    candidate: Int32


class QuantizeTile(QuantizeKernel):
    """The kernel of one :class:`QuantizeConfig` whose ``tile`` is set."""

    # all shared memory is left to L1
    smem_carveout = 0

    @cute.kernel
    def kernel(self, arguments: QuantizeArguments):
        cfg, walk = self.config, arguments.walk
        thread, _, _ = cute.arch.thread_idx()
        cta, batch, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(div(thread, WARP))
        lane = mod(thread, WARP)
        matrices = self.matrices(arguments, batch)
        rows, columns = matrices.rows, matrices.columns
        context = self.context(arguments, SmemAllocator(), thread, cta + batch)
        for work_tile in cutlass.range(cta * cfg.warps + warp, walk.count, ctas * cfg.warps, unroll=1):
            # a band is a row of square tiles along K
            band, first_column = work_tile // walk.inner, work_tile % walk.inner * TILE_COLS
            atom, first = div(band, ROW_STEP // cfg.block), mod(band, ROW_STEP // cfg.block) * cfg.block
            base = atom * ATOM_ROWS + div(lane, TILE_COLS) * ROW_STEP + first
            column = first_column + mod(lane, TILE_COLS)
            line = Int64(batch) * Int64(rows) + Int64(base)
            tile = SquareTile(
                start=address_of(matrices.mX, (base, column)),
                stride=arguments.x_strides.row,
                height=cutlass.select_(column < columns, rows - base, Int32(0)),
                index=(line * Int64(columns) + Int64(column)) * cfg.block,
                pitch=Int64(columns) * cfg.block,
            )
            largest = self.largest(tile, context)
            best = None
            if cutlass.const_expr(cfg.choice):
                best = self.better(tile, largest, context)
            code = Uint32(0)
            out_address = address_of(matrices.mData, (base, column * cfg.out_bytes))
            for i in cutlass.range(cfg.block, unroll=1):
                words = tuple(self.row(tile, i, context))
                found, out = self.encode(words, largest, best, context, tile.index + Int64(i) * tile.pitch)
                code = Uint32(found)
                if i < tile.height:
                    self.store(out_address, out)
                    if cutlass.const_expr(cfg.layout != "blocked"):
                        store_global_byte(address_of(matrices.mScale, (base + i, column)), code)
                out_address = out_address + arguments.data_strides.row
            if cutlass.const_expr(cfg.layout == "blocked"):
                code = cutlass.select_(tile.height > 0, code, Uint32(0))
                self.repeat_scales(matrices, code, lane, atom, first, first_column)

    def row(self, tile: SquareTile, i: Any, context: BlockContext) -> list[Uint32]:
        """The words of row ``i`` of a square tile, rotated if so configured; zeros if the row does not exist."""
        words = self.load(tile.start + Int64(i) * tile.stride, i < tile.height)
        return rotated_words(self.config, words, context.signs)

    def rows(self, tile: SquareTile, first: Int32, count: int, context: BlockContext) -> list[Uint32]:
        """The words of ``count`` rows from ``first`` on."""
        return [word for step in range(count) for word in self.row(tile, first + step, context)]

    @property
    def fixed_scale(self) -> QuantizeConfig:
        """The configuration for a row whose scale is decided."""
        return replace(self.config.after_rotation, choice="")

    @cute.jit
    def largest(self, tile: SquareTile, context: BlockContext):
        """The largest magnitude of a square tile; NaN if it contains one."""
        cfg = self.config
        batch = _BATCH_BYTES // cfg.block_bytes
        largest = Float32(0.0)
        for i in cutlass.range(0, cfg.block, batch, unroll=1):
            words = self.rows(tile, i, batch, context)
            largest = max_abs_f32(largest, largest_magnitude(cfg.after_rotation, words))
        return largest

    @cute.jit
    def better(self, tile: SquareTile, largest: Float32, context: BlockContext) -> Best:
        """4/6's choice for a square tile: by sums in any order where they decide, else by the definition."""
        cfg, factor = self.config, context.factor
        wanted = wanted_scale(cfg, largest, factor)
        codes, values = candidate_scales(cfg, wanted)
        four = Int32(0)
        if cutlass.const_expr(by_sums.decides_by_sums(cfg)):
            batch = _BATCH_BYTES // cfg.block_bytes // 2
            multipliers = by_sums.multipliers(cfg, values, factor)
            # (CHAINS · CANDIDATES)
            sums = _zeros(2 * by_sums.CHAINS)
            for i in cutlass.range(0, cfg.block, batch, unroll=1):
                x = to_f32(self.fixed_scale, self.rows(tile, i, batch, context))
                self.add_errors(sums, x, multipliers)
            totals = [ordered_sum([sums[first + i] for i in range(by_sums.CHAINS)]) for first in (0, by_sums.CHAINS)]
            less, decided = by_sums.compare(cfg, totals, values, wanted, factor, cfg.block * cfg.block)
            four = cutlass.select_(less, Int32(1), Int32(0))
            # zeros, and values that are not finite, need no second try
            if (largest > Float32(0.0)) & (largest < Float32(_INFINITY)):
                if not decided:
                    four = self.better_by_definition(tile, values, context)
        else:
            four = self.better_by_definition(tile, values, context)
        code = Uint32(cutlass.select_(four != 0, codes[1], codes[0]))
        return Best(code, cutlass.select_(four != 0, values[1], values[0]), four)

    def add_errors(self, sums: cute.Tensor, x: list[Float32], multipliers: list[Float32]) -> None:
        """Adds the errors of ``x`` under both candidates to ``sums``."""
        for candidate, multiplier in enumerate(multipliers):
            chains = range(by_sums.CHAINS * candidate, by_sums.CHAINS * (candidate + 1))
            added = by_sums.add_errors(self.config, x, multiplier, [sums[i] for i in chains])
            for place, total in zip(chains, added):
                sums[place] = total

    @cute.jit
    def better_by_definition(self, tile: SquareTile, values: tuple[Float32, ...], context: BlockContext) -> Int32:
        """The index of the better candidate, by the definition.

        Rows j and j + 8 are added together, as ``quantization.block_request.ordered_sum`` adds: row sums as well as
        column sums.
        """
        cfg, kind = self.config, self.fixed_scale
        half = cfg.block // 2
        # ((COLUMNS, 1) · CANDIDATES): sums of columns so far, and the sum of the rows' sums
        sums = _zeros((cfg.block + 1) * 2)
        for j in cutlass.range(half, unroll=1):
            pair = [(to_f32(kind, self.row(tile, j + step, context)), step) for step in (0, half)]
            for candidate in cutlass.range_constexpr(2):
                errors = []
                for x, step in pair:
                    draw = Draw(context.seed, tile.index + Int64(j + step) * tile.pitch, candidate)
                    words = encode_elements(kind, x, values[candidate], context.factor, draw)
                    errors.append(self.errors(residuals(kind, x, words, values[candidate], context.factor)))
                self.add_rows(sums, candidate * (cfg.block + 1), *errors)
        totals = []
        for candidate in cutlass.range_constexpr(2):
            first = candidate * (cfg.block + 1)
            if cutlass.const_expr(cfg.choice == "abs_max"):
                totals.append(sums[first])
            else:
                columns = ordered_sum([sums[first + i] for i in range(cfg.block)])
                totals.append(add_rn(sums[first + cfg.block], columns))
        return cutlass.select_(totals[1] < totals[0], Int32(1), Int32(0))

    def errors(self, difference: Sequence[Float32]) -> list[Float32]:
        """The errors that the rule sums: squares or magnitudes."""
        return [mul_rn(d, d) if self.config.choice == "mse" else abs_f32(d) for d in difference]

    def add_rows(self, sums: cute.Tensor, first: int, low: list[Float32], high: list[Float32]) -> None:
        """Adds two rows' errors to the sums at ``first``; for abs_max it keeps the largest error there."""
        if self.config.choice == "abs_max":
            for error in (*low, *high):
                sums[first] = max_abs_f32(sums[first], error)
            return
        for i, (a, b) in enumerate(zip(low, high)):
            sums[first + i] = add_rn(sums[first + i], add_rn(a, b))
        place = first + len(low)
        sums[place] = add_rn(sums[place], add_rn(ordered_sum(low), ordered_sum(high)))

    def encode(
        self, words: tuple[Uint32, ...], largest: Float32, best: Best | None, context: BlockContext, index: Int64
    ) -> tuple[Uint32, tuple[Uint32, ...]]:
        """The scale's code, and the words of codes, of one row of a square tile."""
        if best is None:
            return encode_block(self.config.after_rotation, words, largest, context, index)
        kind = self.fixed_scale
        valid = (largest < Float32(_INFINITY)) & (context.factor.valid != 0)
        draw = Draw(context.seed, index, best.candidate)
        found = encode_elements(kind, to_f32(kind, words), best.value, context.factor, draw)
        nan_word = Uint32(ELEMENTS[kind.element].nan_word)
        out = tuple(cutlass.select_(valid, word, nan_word) for word in found)
        return cutlass.select_(valid, best.code, Uint32(NAN_E4M3)), out

    @cute.jit
    def repeat_scales(
        self, matrices: Matrices, code: Uint32, lane: Int32, atom: Int32, first: Int32, first_column: Int32
    ):
        """Stores the scales of a work tile, sixteen bytes for each row, with zeros where the matrix has no row."""
        cfg = self.config
        # the word of the four columns that the lane's quad has
        word = code << Uint32(mod(lane, ATOM_COLS) * 8)
        word = word | cute.arch.shuffle_sync_bfly(word, offset=1)
        word = word | cute.arch.shuffle_sync_bfly(word, offset=2)
        # each half of the warp stores the scales of one atom's columns, each lane those of every 16th row
        lanes = WARP // (TILE_COLS // ATOM_COLS)
        upper = div(lane, lanes)
        words = [cute.arch.shuffle_sync(word, upper * ATOM_COLS + i * TILE_COLS) for i in range(WARP_ROWS)]
        column = first_column + upper * ATOM_COLS
        for i in cutlass.range_constexpr(0, cfg.block, lanes):
            row = first + mod(lane, lanes) + i
            left = matrices.rows - atom * ATOM_ROWS - row
            stored = [cutlass.select_(left > r * ROW_STEP, word, Uint32(0)) for r, word in enumerate(words)]
            if column < matrices.columns:
                store_global(matrices.blocked_scale((row, 0), atom, div(column, ATOM_COLS)), stored)


def _zeros(count: int) -> cute.Tensor:
    """A tensor of ``count`` zeros in registers."""
    sums = cute.make_rmem_tensor(count, Float32)
    for i in range(count):
        sums[i] = Float32(0.0)
    return sums
