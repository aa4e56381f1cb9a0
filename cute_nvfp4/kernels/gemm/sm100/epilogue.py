"""The epilogue warps: a tile's accumulators from tensor memory to registers, through a function, to the output.

Each of 128 threads has a row of the tile and takes it ``config.piece`` columns at a time, so that registers hold one
piece of each product. What is stored is ``finish(values)``: the gate of two products, times alpha, plus bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import tcgen05 as cute_tcgen05

from ....ptx import mbarrier, tcgen05
from .. import grouped_scheduler
from ..barriers import Barriers, advance
from ..config import CTA_ROWS, GemmConfig
from ..gates import join
from ..tile_scheduler import Work, next_unit, tile_of, units
from . import reduction
from .memory_plan import OUT_STAGES, TensorPlan
from .operands import make_mma
from .output import Output, finish_writing, make_writer, write
from .reduction import Partials


@dataclass
class Finish:
    """What turns sums into output values: alpha times numbers on the device, and a bias.

    factors: for each product a tuple of pointers, of which the first ``config.factors`` are read.
    bias: pointer to (L, N) or (L, M) numbers, ``bias_batch`` apart (0: one for all of L).
    """

    alpha: Any
    factors: tuple
    bias: Any
    bias_batch: Any


def accumulator_load(config: GemmConfig, base: Any, thread: Int32, columns: int) -> tuple:
    """tcgen05.ld of ``columns`` columns of this thread's row: (copy, source at column 0, shape of the registers)."""
    mma = make_mma(config)
    layout = mma.make_fragment_C(mma.partition_shape_C((config.tile_m, config.tile_n))).layout
    acc = cute.make_tensor(base, layout)
    pieces = cute.flat_divide(acc[((None, None), 0, 0)], (CTA_ROWS, columns))  # (M, PIECE_N, 1, PIECES)
    repeat = cute_tcgen05.Repetition(columns)
    atom = cute.make_copy_atom(cute_tcgen05.Ld32x32bOp(repeat, cute_tcgen05.Pack.NONE), Float32)
    copy = cute_tcgen05.make_tmem_copy(atom, pieces[None, None, 0, 0])
    part = copy.get_slice(thread)
    identity = part.partition_D(cute.make_identity_tensor((CTA_ROWS, columns)))
    source = part.partition_S(pieces[None, None, 0, 0])  # (LD, LD_M, LD_N)
    return copy, source, identity.shape


@cute.jit
def read_piece(config: cutlass.Constexpr[GemmConfig], tensor_base, thread: Int32, acc: Int32, column, values: list):
    """Reads the columns from ``column`` on of accumulator ``acc`` of every product, and waits until they are there."""
    base = cute.make_ptr(Float32, tensor_base, cute.AddressSpace.tmem, assumed_align=16)
    copy, source, shape = accumulator_load(config, base, thread, config.piece)
    for p in cutlass.range_constexpr(config.products):
        start = acc * TensorPlan(config).acc + p * config.tile_n + column
        from_columns = cute.make_tensor(source.iterator + start, source.layout)
        cute.copy(copy, from_columns, cute.make_tensor(values[p].iterator, cute.make_layout(shape)))
    cute.arch.fence_view_async_tmem_load()


@cute.jit
def scale_factors(config: cutlass.Constexpr[GemmConfig], finish: Finish):
    """For each product alpha times its numbers on the device, in fp32."""
    alphas = []
    for p in cutlass.range_constexpr(config.products):
        factor = finish.alpha
        for i in cutlass.range_constexpr(config.factors):
            factor = factor * cute.make_tensor(finish.factors[p][i], cute.make_layout(1))[0]
        alphas.append(factor)
    return alphas


@cute.jit
def finished(
    config: cutlass.Constexpr[GemmConfig], finish: Finish, alphas: list, values: list, place: tuple, bounds: tuple
):
    """The output values of a piece, fp32 registers: (row, column, batch) of its first element, (m, n) of the output."""
    row, column, batch = place
    result = cute.make_rmem_tensor(cute.make_layout(config.piece), Float32)
    if cutlass.const_expr(config.products == 2):
        join(config.gate, values, alphas, result)
    else:
        result.store(values[0].load() * alphas[0])
    if cutlass.const_expr(config.bias != ""):
        add_bias(config, finish.bias + Int64(batch) * finish.bias_batch, result, row, column, bounds)
    return result


@cute.jit
def add_bias(
    config: cutlass.Constexpr[GemmConfig], bias: cute.Pointer, result: cute.Tensor, row, column, bounds: tuple
):
    """Adds this row's number, or those of the piece's columns."""
    m, n = bounds
    if cutlass.const_expr(config.bias == "m"):
        number = Float32(0.0)
        if row < m:
            number = cute.make_tensor(bias + row, cute.make_layout(1))[0].to(Float32)
        for i in cutlass.range_constexpr(config.piece):
            result[i] = result[i] + number
    else:
        # a lane reads one column's number, and every lane gets it from there
        lane = cute.arch.lane_idx()
        own = Float32(0.0)
        if (lane < config.piece) & (column + lane < n):
            own = cute.make_tensor(bias + (column + lane), cute.make_layout(1))[0].to(Float32)
        for i in cutlass.range_constexpr(config.piece):
            result[i] = result[i] + cute.arch.shuffle_sync(own, i)


@dataclass
class Epilogue:
    """What a thread of the epilogue works with. values: registers of a piece of every product; alphas: one for each."""

    barriers: Barriers
    tensor_base: Any
    partials: Partials
    finish: Finish
    out: Output
    writer: tuple
    work: Work
    alphas: list
    values: list
    thread: Any
    warp: Any


@cute.jit
def store_tiles(
    config: cutlass.Constexpr[GemmConfig],
    barriers: Barriers,
    tensor_base: Int32,
    partials: Partials,
    finish: Finish,
    out: Output,
    work: Work,
    thread: Int32,
    warp: Int32,
):
    """The loop of the epilogue warps."""
    values = [cute.make_rmem_tensor(cute.make_layout(config.piece), Float32) for _ in range(config.products)]
    alphas, writer = scale_factors(config, finish) if config.maps == "" else [], make_writer(config, out)
    e = Epilogue(barriers, tensor_base, partials, finish, out, writer, work, alphas, values, thread, warp)
    acc, acc_phase = Int32(0), Int32(0)
    partial_phase = Int32(0)
    unit, end = units(config, work)
    while unit < end:
        tile_m, tile_n, batch, first, count = tile_of(config, work, unit, end)
        # (row of this thread, first column of the tile, batch)
        place = (tile_m * CTA_ROWS + thread, tile_n * config.tile_n, batch)
        here = of_group(config, e, batch) if config.maps else e
        if cutlass.const_expr(config.split_k > 1):
            reduction.announce(config, barriers, thread)
        mbarrier.wait(barriers.address(config, "accumulators", "full", acc), acc_phase)
        tcgen05.fence_after()
        if cutlass.const_expr(config.scheduler == "stream_k"):
            store_segment(config, here, acc, place, unit, first, count)
            release(config, barriers, work, acc)
        elif cutlass.const_expr(config.split_k > 1):
            store_slice(config, here, acc, place, partial_phase)
            partial_phase = partial_phase ^ 1
        else:
            store_tile(config, here, acc, place)
        acc, acc_phase = advance(TensorPlan(config).acc_stages, acc, acc_phase)
        unit = next_unit(config, work, unit, count)
    finish_writing(config, warp)


def of_group(config: GemmConfig, e: Epilogue, group: Any) -> Epilogue:
    """The same with the output and the factors of a group."""
    out = grouped_scheduler.output_of(config, e.work.groups, group, e.out)
    alphas = grouped_scheduler.alphas_of(config, e.finish.alpha, e.finish.factors, group)
    return replace(e, out=out, alphas=alphas)


@cute.jit
def store_piece(
    config: cutlass.Constexpr[GemmConfig], e: Epilogue, place: tuple, column, piece: cutlass.Constexpr[int]
):
    """Finishes the sums in ``e.values``, which start ``column`` columns into the tile, and stores them."""
    row, column0, batch = place
    where = (row, column0 + column, batch)
    result = finished(config, e.finish, e.alphas, e.values, where, (e.out.m, e.out.n))
    write(config, e.out, e.writer, result, where, piece % OUT_STAGES, e.thread, e.warp)


@cute.jit
def store_tile(config: cutlass.Constexpr[GemmConfig], e: Epilogue, acc: Int32, place: tuple):
    """A whole tile whose sums are all here; its accumulator is free once the last piece is in registers."""
    for column in cutlass.range_constexpr(0, config.tile_n, config.piece):
        read_piece(config, e.tensor_base, e.thread, acc, Int32(column), e.values)
        if cutlass.const_expr(column + config.piece == config.tile_n):
            release(config, e.barriers, e.work, acc)
        store_piece(config, e, place, column, column // config.piece)


@cute.jit
def store_slice(config: cutlass.Constexpr[GemmConfig], e: Epilogue, acc: Int32, place: tuple, phase: Int32):
    """split_k: sends every other CTA along K its slice of these sums, gets theirs of its own slice, and stores that."""
    barriers, work = e.barriers, e.work
    mbarrier.wait(barriers.address(config, "partials", "empty"), phase ^ 1, cluster=True)
    for distance in cutlass.range_constexpr(1, config.split_k):
        part = (work.part + distance) % config.split_k
        for column in cutlass.range_constexpr(0, config.slice_n, config.piece):
            read_piece(config, e.tensor_base, e.thread, acc, part * config.slice_n + column, e.values)
            reduction.send(config, barriers, e.partials, work, e.thread, distance, column, e.values)
    mbarrier.wait(barriers.address(config, "partials", "full"), phase, cluster=True)
    own = work.part * config.slice_n
    for column in cutlass.range_constexpr(0, config.slice_n, config.piece):
        read_piece(config, e.tensor_base, e.thread, acc, own + column, e.values)
        reduction.add_received(config, e.partials, e.thread, column, e.values)
        store_piece(config, e, place, own + column, column // config.piece)
    release(config, barriers, work, acc)
    reduction.give_back(config, barriers, work)


@cute.jit
def store_segment(
    config: cutlass.Constexpr[GemmConfig],
    e: Epilogue,
    acc: Int32,
    place: tuple,
    unit: Int32,
    first: Int32,
    count: Int32,
):
    """stream_k: a segment that does not begin its tile goes to the workspace; one that does is finished here."""
    if first > 0:
        for column in cutlass.range_constexpr(0, config.tile_n, config.piece):
            read_piece(config, e.tensor_base, e.thread, acc, Int32(column), e.values)
            reduction.write_workspace(config, e.partials, e.work, e.thread, column, e.values)
        reduction.raise_flag(config, e.partials, e.work, e.warp)
    else:
        others = reduction.contributors(config, e.work, unit, count)
        reduction.wait_for_flags(config, e.partials, e.work, e.warp, others)
        for column in cutlass.range_constexpr(0, config.tile_n, config.piece):
            read_piece(config, e.tensor_base, e.thread, acc, Int32(column), e.values)
            reduction.add_workspace(config, e.partials, e.work, e.thread, column, others, e.values)
            store_piece(config, e, place, column, column // config.piece)


@cute.jit
def release(config: cutlass.Constexpr[GemmConfig], barriers: Barriers, work: Work, acc: Int32):
    """Gives an accumulator back to the MMA warp; one thread of every warp arrives, at the CTA that issues the MMAs."""
    tcgen05.fence_before()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        address = barriers.address(config, "accumulators", "empty", acc)
        if cutlass.const_expr(config.pair):
            cm, cn = config.cluster
            mbarrier.arrive_at(address, (work.part * cn + work.y) * cm + work.x - work.v)
        else:
            mbarrier.arrive(address)
