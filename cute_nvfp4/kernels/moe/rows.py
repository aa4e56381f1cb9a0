"""Rows of experts: gathered before the first product, activated between the two, combined after the second.

A thread processes sixteen bytes of a row at a time. The grids depend on shapes only: the map of offsets, which the host
never reads, says which rows exist.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32

from ...ptx.arithmetic import add_rn, mul_rn
from ...ptx.convert import bf16x2_to_f32, f16x2_to_f32
from ...ptx.encode import f32x2_to_16bit
from ...ptx.memory import load_global, load_global_if, store_global
from ...ptx.move import f32_bits, f32_from_bits
from ..gemm.gates import activate
from .config import (
    THREADS,
    VECTOR,
    VECTOR_BYTES,
    ActivationArguments,
    ActivationConfig,
    CombineArguments,
    CombineConfig,
    GatherArguments,
    GatherConfig,
)
from .few import SlotIds
from .maps import Maps, maps_of

AHEAD = 8
"""Slots of a token whose rows are loaded at a time."""
WORD_TO_F32 = {"bfloat16": bf16x2_to_f32, "float16": f16x2_to_f32}


def load_values(address: Int64, dtype: str) -> list[Float32]:
    """Loads eight elements of ``dtype``."""
    if dtype == "float32":
        words = load_global(address, VECTOR_BYTES) + load_global(address + VECTOR_BYTES, VECTOR_BYTES)
        return [f32_from_bits(x) for x in words]
    return [x for word in load_global(address, VECTOR_BYTES) for x in WORD_TO_F32[dtype](word)]


def store_values(address: Int64, values: Sequence[Float32], dtype: str) -> None:
    """Stores eight elements, each rounded once to ``dtype``."""
    if dtype == "float32":
        for i in (0, 4):
            store_global(address + 4 * i, [f32_bits(x) for x in values[i : i + 4]])
    else:
        store_global(address, [f32x2_to_16bit(x, y, dtype) for x, y in zip(values[::2], values[1::2])])


class Gather:
    """The host function and the kernel that gathers rows of x in the order of experts, and clears rows without a
    slot."""

    def __init__(self, config: GatherConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: GatherArguments, stream: CUstream):
        """Launches a CTA for each row."""
        self.kernel(arguments).launch(grid=(arguments.slots, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, arguments: GatherArguments):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        maps = maps_of(arguments.maps, arguments.experts, arguments.slots)
        target = arguments.out.toint() + Int64(row) * arguments.row_bytes
        step, start = THREADS * VECTOR_BYTES, thread * VECTOR_BYTES
        if row < maps.mOffsets[arguments.experts]:
            token = maps.mSlots[row] // arguments.top
            source = arguments.x.toint() + Int64(token) * arguments.stride
            for at in cutlass.range(start, arguments.row_bytes, step, unroll=1):
                store_global(target + at, load_global(source + at, VECTOR_BYTES))
        else:
            for at in cutlass.range(start, arguments.row_bytes, step, unroll=1):
                store_global(target + at, [Uint32(0)] * 4)


class Activation:
    """The host function and the kernel of one :class:`ActivationConfig`. It clears rows without a slot."""

    def __init__(self, config: ActivationConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: ActivationArguments, stream: CUstream):
        """Launches CTAs for the columns of each row."""
        columns = cute.ceil_div(arguments.inner, THREADS * VECTOR)
        self.kernel(arguments).launch(grid=(arguments.slots, columns, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, arguments: ActivationArguments):
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        row, part, _ = cute.arch.block_idx()
        column = (part * THREADS + thread) * VECTOR
        maps = maps_of(arguments.maps, arguments.experts, arguments.slots)
        inner = arguments.inner
        # (ROWS, INNER) and (ROWS or EXPERTS, HALVES · INNER), whose elements have two bytes, and four in the bias
        target = arguments.out.toint() + 2 * (Int64(row) * inner + column)
        if column < inner:
            if row < maps.mOffsets[arguments.experts]:
                first = Int64(row) * (inner * cfg.halves) + column
                source = arguments.product.toint() + 2 * first
                values = [load_values(source + half * 2 * Int64(inner), cfg.dtype) for half in range(cfg.halves)]
                if cutlass.const_expr(cfg.bias):
                    at = Int64(maps.mExperts[row]) * (inner * cfg.halves) + column
                    bias = arguments.bias.toint() + 4 * at
                    added = [load_values(bias + half * 4 * Int64(inner), "float32") for half in range(cfg.halves)]
                    values = [[add_rn(x, y) for x, y in zip(*pair)] for pair in zip(values, added)]
                constants = cfg.alpha, cfg.limit
                found = [activate(cfg.activation, *x, constants=constants) for x in zip(*values)]
                store_values(target, found, cfg.dtype)
            else:
                store_global(target, [Uint32(0)] * 4)


class Combine:
    """The host function and the kernel of one :class:`CombineConfig`. The output of a token is its shared row plus, in
    the order of its slots, Σ weight · (row + bias), or Σ row if rows have both already. The sum is in fp32, rounded
    once, and omits slots without a row."""

    def __init__(self, config: CombineConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, arguments: CombineArguments, stream: CUstream):
        """Launches CTAs for the columns of each token."""
        columns = cute.ceil_div(arguments.hidden, THREADS * VECTOR)
        grid = arguments.tokens, columns, 1
        self.kernel(arguments).launch(grid=grid, block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, arguments: CombineArguments):
        cfg = self.config
        thread, _, _ = cute.arch.thread_idx()
        token, part, _ = cute.arch.block_idx()
        column = (part * THREADS + thread) * VECTOR
        slots, hidden = arguments.tokens * cfg.top, arguments.hidden
        # this launch starts while another writes the rows, which waited for the maps before it let this one start
        if cutlass.const_expr(cfg.ids):
            maps, lane = None, cute.arch.lane_idx()
            ids = SlotIds(arguments.maps, slots, arguments.experts, arguments.first)
            of_lane = ids.row(lane)
            rows = [cute.arch.shuffle_sync(of_lane, token * cfg.top + i) for i in range(cfg.top)]
        else:
            maps = maps_of(arguments.maps, arguments.experts, slots)
            rows = [maps.mRows[token * cfg.top + i] for i in range(cfg.top)]
        cute.arch.griddepcontrol_wait()
        if column < hidden:
            sums = cute.make_rmem_tensor(VECTOR, Float32)
            sums.fill(0.0)
            if cutlass.const_expr(cfg.shared):
                row = arguments.shared.toint() + Int64(token) * arguments.shared_stride
                for i, value in enumerate(load_values(row + column * 2, cfg.dtype)):
                    sums[i] = value
            for begin in cutlass.range_constexpr(0, cfg.top, AHEAD):
                first = token * cfg.top + begin
                summands = self.summands(arguments, maps, first, rows[begin : begin + AHEAD], column)
                for values in summands:
                    for i in cutlass.range_constexpr(VECTOR):
                        sums[i] = add_rn(sums[i], values[i])
            size = 4 if cfg.out == "float32" else 2
            target = arguments.out.toint() + Int64(token) * arguments.stride + column * size
            store_values(target, [sums[i] for i in range(VECTOR)], cfg.out)

    def summands(
        self, arguments: CombineArguments, maps: Maps | None, first: Int32, rows: list[Int32], column: Int32
    ) -> list[list[Float32]]:
        """Eight weighted columns of the slots from ``first`` on, which have the rows ``rows``; zeros for a slot without
        a row. All loads are in flight before the first value is used."""
        cfg, hidden, to_f32 = self.config, arguments.hidden, WORD_TO_F32[self.config.dtype]
        there = [cutlass.select_(row >= 0, Int32(1), Int32(0)) for row in rows]
        places = [Int64(row) * hidden + column for row in rows]
        words = [load_global_if(p, arguments.rows.toint() + 2 * at, VECTOR_BYTES) for p, at in zip(there, places)]
        found = [[x for word in some for x in to_f32(word)] for some in words]
        if cfg.bias:
            for i, row in enumerate(rows):
                expert = maps.mExperts[cutlass.max(row, Int32(0))]
                at = arguments.bias.toint() + 4 * (Int64(expert) * hidden + column)
                halves = [load_global_if(there[i], at + side, VECTOR_BYTES) for side in (0, VECTOR_BYTES)]
                found[i] = [add_rn(x, f32_from_bits(y)) for x, y in zip(found[i], halves[0] + halves[1])]
        if cfg.weights:
            slots = cute.make_layout(arguments.tokens * cfg.top)
            for i in range(len(rows)):
                weight = Float32(cute.make_tensor(arguments.weights, slots)[first + i])
                weight = cutlass.select_(rows[i] >= 0, weight, Float32(0.0))
                found[i] = [mul_rn(weight, x) for x in found[i]]
        return found
