"""Sums over CTAs that share a tile along K, always in the same order, so that results repeat bit for bit.

split_k: each CTA of the cluster stores one slice of the tile's columns. The others send it their sums of that slice
by st.async into its shared memory; it adds them to its own in the order of the ring, starting with its own.

stream_k: a cluster that starts in the middle of a tile writes its sums to a workspace in global memory and raises a
flag; the one that has the tile's first step adds those of the clusters after it, in order, and lowers the flags again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ....ptx import mbarrier
from ....ptx.cluster import remote_address, store_async
from ....ptx.memory import load_flag, load_shared_floats, store_flag
from ..barriers import Barriers
from ..config import CTA_ROWS, GemmConfig
from ..pipeline_graph import edge_of
from ..tile_scheduler import Work, share
from .warp_roles import WARP

FLOATS = 4  # of a store or load of sixteen bytes


@dataclass
class Partials:
    """Where sums of other CTAs are found: shared address (split_k), or workspace and flags in global memory (stream_k).

    In both a slot is (PRODUCT, COLUMN / 4, ROW, 4) fp32.
    """

    shared: Any
    workspace: Any = None
    flags: Any = None


def slot_floats(config: GemmConfig, columns: int) -> int:
    """fp32 numbers of one slot."""
    return config.products * columns * CTA_ROWS


def quad_offset(config: GemmConfig, columns: int, product: int, column: int, row: Any) -> Any:
    """Bytes from a slot's start to four columns of a row."""
    return ((product * columns + column) // FLOATS * CTA_ROWS + row) * (FLOATS * 4)


# ---- split_k -------------------------------------------------------------------------------------------------------


@cute.jit
def announce(config: cutlass.Constexpr[GemmConfig], barriers: Barriers, thread: Int32):
    """One thread says how many bytes of partial sums this tile will bring."""
    if thread == 0:
        num_bytes = edge_of(config, "partials").full.tx_bytes
        mbarrier.expect_bytes(barriers.address(config, "partials", "full"), Int32(num_bytes))


@cute.jit
def send(
    config: cutlass.Constexpr[GemmConfig],
    barriers: Barriers,
    partials: Partials,
    work: Work,
    row: Int32,
    distance: cutlass.Constexpr[int],
    column: cutlass.Constexpr[int],
    values: list,
):
    """Sends a piece of the slice of the CTA ``distance`` after this one along K; ``column`` counts from its start."""
    cm, cn = config.cluster
    part = (work.part + distance) % config.split_k
    rank = part * (cm * cn) + work.y * cm + work.x
    # that CTA finds this one split_k - distance places after itself
    slot = partials.shared + (config.split_k - distance - 1) * slot_floats(config, config.slice_n) * 4
    barrier = remote_address(barriers.address(config, "partials", "full"), rank)
    target = remote_address(slot, rank)
    for p in cutlass.range_constexpr(config.products):
        for j in cutlass.range_constexpr(0, config.piece, FLOATS):
            offset = quad_offset(config, config.slice_n, p, column + j, row)
            store_async(target + offset, [values[p][j + i] for i in range(FLOATS)], barrier)


@cute.jit
def add_received(
    config: cutlass.Constexpr[GemmConfig], partials: Partials, row: Int32, column: cutlass.Constexpr[int], values: list
):
    """Adds the sums of all other CTAs along K to a piece of this CTA's slice."""
    for slot in cutlass.range_constexpr(config.split_k - 1):
        start = partials.shared + slot * slot_floats(config, config.slice_n) * 4
        for p in cutlass.range_constexpr(config.products):
            for j in cutlass.range_constexpr(0, config.piece, FLOATS):
                offset = quad_offset(config, config.slice_n, p, column + j, row)
                received = load_shared_floats(start + offset)
                for i in cutlass.range_constexpr(FLOATS):
                    values[p][j + i] = values[p][j + i] + received[i]


@cute.jit
def give_back(config: cutlass.Constexpr[GemmConfig], barriers: Barriers, work: Work):
    """Tells the other CTAs along K that their sums have been read; one thread of every warp."""
    cm, cn = config.cluster
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for distance in cutlass.range_constexpr(1, config.split_k):
            part = (work.part + distance) % config.split_k
            rank = part * (cm * cn) + work.y * cm + work.x
            mbarrier.arrive_at(barriers.address(config, "partials", "empty"), rank)


# ---- stream_k ------------------------------------------------------------------------------------------------------


@cute.jit
def workspace_slot(config: cutlass.Constexpr[GemmConfig], partials: Partials, work: Work, worker: Int32):
    """Address of the slot of this CTA's rows in cluster ``worker``."""
    index = Int64(worker) * config.ctas + work.v
    return partials.workspace + index * (slot_floats(config, config.tile_n) * 4)


@cute.jit
def flag_address(config: cutlass.Constexpr[GemmConfig], partials: Partials, work: Work, worker: Int32, warp: Int32):
    """Address of the flag that warp ``warp`` of the epilogue of cluster ``worker`` raises."""
    return partials.flags + (((Int64(worker) * config.ctas + work.v) * (CTA_ROWS // WARP)) + warp) * 4


@cute.jit
def raise_flag(config: cutlass.Constexpr[GemmConfig], partials: Partials, work: Work, warp: Int32):
    """Says that this warp's rows of the workspace are written."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        store_flag(flag_address(config, partials, work, work.worker, warp), Int32(1))


@cute.jit
def contributors(config: cutlass.Constexpr[GemmConfig], work: Work, unit: Int32, count: Int32):
    """How many clusters after this one have steps of the tile of which this one has the first ``count``."""
    tile_end = unit + work.steps
    others = Int32(0)
    first = unit + count
    while first < tile_end:
        others = others + 1
        after, size = share(work.rest_m * work.rest_n * work.batch * work.steps, work.workers, work.worker + others)
        first = after + size
    return others


@cute.jit
def wait_for_flags(config: cutlass.Constexpr[GemmConfig], partials: Partials, work: Work, warp: Int32, others: Int32):
    """Waits until the next ``others`` clusters have written their sums, and lowers their flags."""
    for other in cutlass.range(1, others + 1, unroll=1):
        address = flag_address(config, partials, work, work.worker + other, warp)
        raised = load_flag(address)
        while raised == 0:
            raised = load_flag(address)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            store_flag(address, Int32(0))


@cute.jit
def write_workspace(
    config: cutlass.Constexpr[GemmConfig],
    partials: Partials,
    work: Work,
    row: Int32,
    column: cutlass.Constexpr[int],
    values: list,
):
    """Writes a piece of this CTA's sums to its slot."""
    slot = workspace_slot(config, partials, work, work.worker)
    for p in cutlass.range_constexpr(config.products):
        for j in cutlass.range_constexpr(0, config.piece, FLOATS):
            target = _quad(slot + quad_offset(config, config.tile_n, p, column + j, row))
            for i in cutlass.range_constexpr(FLOATS):
                target[i] = values[p][j + i]


@cute.jit
def add_workspace(
    config: cutlass.Constexpr[GemmConfig],
    partials: Partials,
    work: Work,
    row: Int32,
    column: cutlass.Constexpr[int],
    others: Int32,
    values: list,
):
    """Adds a piece of the sums of the next ``others`` clusters."""
    for other in cutlass.range(1, others + 1, unroll=1):
        slot = workspace_slot(config, partials, work, work.worker + other)
        for p in cutlass.range_constexpr(config.products):
            for j in cutlass.range_constexpr(0, config.piece, FLOATS):
                source = _quad(slot + quad_offset(config, config.tile_n, p, column + j, row))
                for i in cutlass.range_constexpr(FLOATS):
                    values[p][j + i] = values[p][j + i] + source[i]


def _quad(address: Any) -> cute.Tensor:
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(FLOATS))
