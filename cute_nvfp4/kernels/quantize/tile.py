"""Quantization with one scale for a square tile: 16 × 16 elements (MX 32 × 32).

Who does what. A lane takes a whole tile, row after row, because sums over tiles have an order. A *unit* is 4 × 8 tiles,
one for each lane of a warp: eight neighbouring block columns, and rows r … r + 15 (MX r + 31), the same + 32, + 64 and
+ 96 of a scale atom. In the blocked layout the scales of four block columns of such a unit are contiguous: sixteen
bytes (four columns of four tiles), which repeat for each of the rows.

x is read once for the largest magnitudes and again for the codes (4/6: a third time in between, for the errors). It
comes back from the caches, and shared memory is left to L1 for that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from ...ptx.arithmetic import abs_f32, add_rn, max_abs_f32, mul_rn
from ...ptx.memory import store_global, store_global_byte
from ...scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS, ATOM_STRIDE
from ..arith import ceil_div, div, mod
from .arguments import QuantizeArguments
from .block import four_six_bounds as compare
from .block.definition import exact_candidate, largest_magnitude, ordered_sum, residuals, scales, to_f32, wanted_scale
from .block.fast_path import units_of
from .block.reciprocal_table import fill_table, is_usable, largest_wanted, table_bytes
from .block.rules import NAN_E4M3, encode_block
from .config import ELEMENTS, ROW_STEP, WARP, WARP_ROWS
from .rotation import rotated_words
from .row import Quantize

# block columns of a unit
UNIT_COLS = WARP // WARP_ROWS
# bytes of a tile that a lane loads before it looks at them
_BATCH_BYTES = 256
_INFINITY = float("inf")


class QuantizeTile(Quantize):
    """The kernel of one :class:`QuantizeConfig` whose ``tile`` is set.

    steps: units along K, units of a matrix, and two numbers that are not looked at.
    """

    # shared memory is left to L1
    smem_carveout = 0

    @cute.kernel
    def kernel(self, arguments: QuantizeArguments):
        cfg = self.config
        x, data, scale, global_in, global_out = arguments[:5]
        rows, columns, powers = arguments.rows, arguments.columns, arguments.powers
        strides = (arguments.x_strides, arguments.data_strides, arguments.scale_strides)
        random, steps = (*arguments.seed, arguments.signs), arguments.walk
        thread, _, _ = cute.arch.thread_idx()
        block, batch, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(div(thread, WARP))
        lane = mod(thread, WARP)
        # (batch's start, bytes of a row)
        x_rows, data_rows, scale_rows = (
            (pointer.toint() + Int64(batch) * stride[1], stride[0])
            for pointer, stride in zip((x, data, scale), strides)
        )
        factor, valid = self.global_factor(global_in, global_out, thread, block + batch)
        quick = (Int32(0), Float32(0.0), units_of(cfg, powers), Int32(0))
        if cutlass.const_expr(cfg.has_usual_way and not cfg.choice):
            smem = SmemAllocator()
            table = smem.allocate_array(cutlass.Uint8, table_bytes(cfg), byte_alignment=16)
            flags = smem.allocate_array(cutlass.Uint32, cfg.warps, byte_alignment=16)
            usable = is_usable(factor[0], valid)
            tied = fill_table(cfg, table.toint(), flags.toint(), factor[0], usable, thread)
            quick = (table.toint(), largest_wanted(usable), quick[2], tied)

        chunks, units, _, _ = steps
        for unit in cutlass.range(block * cfg.warps + warp, units, blocks * cfg.warps, unroll=1):
            atom, base = self.place(unit // chunks, lane)
            column = unit % chunks * UNIT_COLS + mod(lane, UNIT_COLS)
            # a tile that does not exist has no rows
            height = cutlass.select_(column < columns, rows - base, Int32(0))
            source = (x_rows[0] + Int64(base) * x_rows[1] + Int64(column * cfg.block_bytes), x_rows[1], height, random)
            line = Int64(batch) * Int64(rows) + Int64(base)
            index = (line * Int64(columns) + Int64(column)) * cfg.block
            pitch = Int64(columns) * cfg.block
            largest = self.largest(source)
            sound = (largest < Float32(_INFINITY)) & (valid != 0)
            best = (Uint32(0), Float32(0.0), Int32(0))
            if cutlass.const_expr(cfg.choice):
                best = self.better(source, largest, factor, random, (index, pitch))
            code = Uint32(0)
            out_address = data_rows[0] + Int64(base) * data_rows[1] + Int64(column * cfg.out_bytes)
            scale_address = scale_rows[0] + Int64(base) * scale_rows[1] + Int64(column)
            for i in cutlass.range(cfg.block, unroll=1):
                words = tuple(self.row(source, i))
                place = index + Int64(i) * pitch
                found, out = self.encode(words, largest, best, factor, quick, (valid, sound), random, place)
                code = Uint32(found)
                if i < height:
                    self.store(out_address, out)
                    if cutlass.const_expr(cfg.layout != "blocked"):
                        store_global_byte(scale_address, code)
                out_address = out_address + data_rows[1]
                scale_address = scale_address + scale_rows[1]
            if cutlass.const_expr(cfg.layout == "blocked"):
                code = cutlass.select_(height > 0, code, Uint32(0))
                self.repeat_scales(scale_rows[0], code, lane, (unit, chunks, atom), (rows, columns))

    def place(self, band: Int32, lane: Int32) -> tuple:
        """(atom, first row of the lane's tile) in a band of units along K."""
        cfg = self.config
        bands = ROW_STEP // cfg.block
        atom = div(band, bands)
        return atom, atom * ATOM_ROWS + div(lane, UNIT_COLS) * ROW_STEP + mod(band, bands) * cfg.block

    def row(self, source: tuple, i: Any) -> list[Uint32]:
        """The words of row ``i`` of a tile, rotated if so configured; zeros if it does not exist."""
        cfg = self.config
        start, stride, height, random = source
        words = self.load(start + Int64(i) * stride, i < height)
        return rotated_words(cfg, words, Uint32(random[2])) if cfg.hadamard else words

    @cute.jit
    def largest(self, source: tuple):
        """The largest magnitude of a tile, NaN if it holds one."""
        cfg = self.config
        kind = cfg.of_rotated if cfg.hadamard else cfg
        batch = _BATCH_BYTES // cfg.block_bytes
        largest = Float32(0.0)
        for i in cutlass.range(0, cfg.block, batch, unroll=1):
            words = [word for step in range(batch) for word in self.row(source, i + step)]
            largest = max_abs_f32(largest, largest_magnitude(kind, words))
        return largest

    @cute.jit
    def better(self, source: tuple, largest: Float32, factor: tuple, random: tuple, indices: tuple):
        """4/6 for a tile: (scale code, its value, number of the candidate)."""
        cfg = self.config
        kind = self.plain()
        wanted = wanted_scale(cfg, largest, factor[1])
        codes, values = scales(cfg, wanted)
        four = Int32(0)
        if cutlass.const_expr(compare.compares(cfg)):
            batch = _BATCH_BYTES // cfg.block_bytes // 2
            multipliers = compare.factors(cfg, values, factor[0])
            sums = cute.make_rmem_tensor(2 * compare.CHAINS, Float32)
            for i in cutlass.range_constexpr(2 * compare.CHAINS):
                sums[i] = Float32(0.0)
            for i in cutlass.range(0, cfg.block, batch, unroll=1):
                x = to_f32(kind, [word for step in range(batch) for word in self.row(source, i + step)])
                self.add_errors(sums, x, multipliers)
            totals = [compare.total([sums[first + i] for i in range(compare.CHAINS)]) for first in (0, compare.CHAINS)]
            less, certain = compare.compare(cfg, totals, values, wanted, factor[0], cfg.block * cfg.block)
            four = cutlass.select_(less, Int32(1), Int32(0))
            # neither zeros nor what is not finite need a second look
            if (largest > Float32(0.0)) & (largest < Float32(_INFINITY)):
                if not certain:
                    four = self.better_exactly(source, values, factor, random, indices)
        else:
            four = self.better_exactly(source, values, factor, random, indices)
        code = Uint32(cutlass.select_(four != 0, codes[1], codes[0]))
        return code, cutlass.select_(four != 0, values[1], values[0]), four

    def add_errors(self, sums: Any, x: list[Float32], multipliers: list[Float32]) -> None:
        """Adds the errors of ``x`` under both candidates."""
        for stream, multiplier in enumerate(multipliers):
            chains = range(compare.CHAINS * stream, compare.CHAINS * (stream + 1))
            for place, total in zip(chains, compare.errors(self.config, x, multiplier, [sums[i] for i in chains])):
                sums[place] = total

    @cute.jit
    def better_exactly(self, source: tuple, values: list, factor: tuple, random: tuple, indices: tuple):
        """The number of the better candidate, step by step.

        Rows j and j + 8 come together: that is how ``cute_nvfp4.quantization.blocks.ordered_sum`` adds, the row sums
        as well as the columns.
        """
        cfg = self.config
        kind = self.plain()
        half = cfg.block // 2
        # per candidate: sums of columns so far, and the sum of the rows'
        sums = cute.make_rmem_tensor((cfg.block + 1) * 2, Float32)
        for i in cutlass.range_constexpr((cfg.block + 1) * 2):
            sums[i] = Float32(0.0)
        for j in cutlass.range(half, unroll=1):
            pair = [(to_f32(kind, self.row(source, j + step)), step) for step in (0, half)]
            for stream in cutlass.range_constexpr(2):
                errors = []
                for x, step in pair:
                    draw = (random[:2], indices[0] + Int64(j + step) * indices[1], stream)
                    words, _ = exact_candidate(kind, x, values[stream], factor, draw)
                    errors.append(self.errors(residuals(kind, x, words, values[stream], factor)))
                self.add_rows(sums, stream * (cfg.block + 1), errors)
        totals = []
        for stream in cutlass.range_constexpr(2):
            first = stream * (cfg.block + 1)
            if cutlass.const_expr(cfg.choice == "abs_max"):
                totals.append(sums[first])
            else:
                columns = ordered_sum([sums[first + i] for i in range(cfg.block)])
                totals.append(add_rn(sums[first + cfg.block], columns))
        return cutlass.select_(totals[1] < totals[0], Int32(1), Int32(0))

    def plain(self) -> Any:
        """The configuration of a block of which the scale is decided."""
        cfg = self.config.of_rotated if self.config.hadamard else self.config
        return replace(cfg, choice="")

    def errors(self, difference: list[Float32]) -> list[Float32]:
        return [mul_rn(d, d) if self.config.choice == "mse" else abs_f32(d) for d in difference]

    def add_rows(self, sums: Any, first: int, errors: list) -> None:
        """Adds two rows' errors to the sums at ``first``; for abs_max keeps the largest in their place."""
        low, high = errors
        if self.config.choice == "abs_max":
            for error in (*low, *high):
                sums[first] = max_abs_f32(sums[first], error)
            return
        for i, (a, b) in enumerate(zip(low, high)):
            sums[first + i] = add_rn(sums[first + i], add_rn(a, b))
        place = first + len(low)
        sums[place] = add_rn(sums[place], add_rn(ordered_sum(low), ordered_sum(high)))

    def encode(
        self,
        words: tuple,
        largest: Float32,
        best: tuple,
        factor: tuple,
        quick: tuple,
        valid: tuple,
        random: tuple,
        index: Int64,
    ) -> tuple:
        """(scale code, words of codes) of a row of a tile."""
        cfg = self.config
        if not cfg.choice:
            kind = cfg.of_rotated if cfg.hadamard else cfg
            return encode_block(kind, words, largest, factor, quick, valid[0], random[:2], index)
        kind = self.plain()
        code, value, stream = best
        found, _ = exact_candidate(kind, to_f32(kind, words), value, factor, (random[:2], index, stream))
        nan_word = Uint32(ELEMENTS[cfg.element].nan_word)
        out = tuple(cutlass.select_(valid[1], word, nan_word) for word in found)
        return cutlass.select_(valid[1], code, Uint32(NAN_E4M3)), out

    @cute.jit
    def repeat_scales(self, address: Int64, code: Uint32, lane: Int32, where: tuple, limits: tuple):
        """Stores the scales of a unit, sixteen bytes for each row, zeros where the matrix has none.

        ``where``: (unit, units along K, atom).
        """
        cfg = self.config
        unit, chunks, atom = where
        rows, columns = limits
        # the word of the lane's four columns
        word = code << Uint32(mod(lane, ATOM_COLS) * 8)
        word = word | cute.arch.shuffle_sync_bfly(word, offset=1)
        word = word | cute.arch.shuffle_sync_bfly(word, offset=2)
        # a half of the warp stores the scales of one atom's columns, a lane those of every 16th row
        atoms = UNIT_COLS // ATOM_COLS
        upper = div(lane, WARP // atoms)
        words = [cute.arch.shuffle_sync(word, upper * ATOM_COLS + i * UNIT_COLS) for i in range(WARP_ROWS)]
        column = unit % chunks * UNIT_COLS + upper * ATOM_COLS
        first = mod(unit // chunks, ROW_STEP // cfg.block) * cfg.block
        rest_k = ceil_div(columns, ATOM_COLS)
        start = address + Int64(atom * rest_k + div(column, ATOM_COLS)) * ATOM_BYTES
        for i in cutlass.range_constexpr(0, cfg.block, WARP // atoms):
            row = first + mod(lane, WARP // atoms) + i
            left = rows - atom * ATOM_ROWS - row
            stored = [cutlass.select_(left > r * ROW_STEP, word, Uint32(0)) for r, word in enumerate(words)]
            if column < columns:
                store_global(start + Int64(row * ATOM_STRIDE[0][0]), stored)
