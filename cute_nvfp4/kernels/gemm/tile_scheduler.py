"""What each cluster works on: tiles of the output, and the steps along K of each.

A *unit* is what is dealt: with the static scheduler a tile of a cluster, dealt in turn; with stream-K a step of K of a
tile, dealt in equal shares of consecutive units, so that no cluster is idle while another has a whole tile more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from . import grouped_scheduler
from .config import GemmConfig


@dataclass
class Work:
    """The problem in tiles, and this CTA's part in it (all traced Int32).

    rest_m, rest_n: tiles of a cluster that cover the output; batch; steps: of K; workers: clusters; worker: this one;
    x, y: this CTA's tile in the cluster's; v: its place in a pair; part: its place along K (split_k); groups: what
    ``grouped_scheduler`` knows of a grouped GEMM's problems, each of which has its own rest_m, rest_n and steps.
    """

    rest_m: Any
    rest_n: Any
    batch: Any
    steps: Any
    workers: Any
    worker: Any
    x: Any
    y: Any
    v: Any
    part: Any
    groups: Any = None


@cute.jit
def share(total, parts, index):
    """(first, count) of part ``index`` of ``total`` things divided evenly among ``parts``."""
    each, rest = total // parts, total % parts
    first = index * each + cutlass.min(index, rest)
    return first, each + Int32(index < rest)


@cute.jit
def units(config: cutlass.Constexpr[GemmConfig], work: Work):
    """(first, end) of this cluster's units."""
    if cutlass.const_expr(config.maps != ""):
        return work.worker, work.groups.units
    tiles = work.rest_m * work.rest_n * work.batch
    if cutlass.const_expr(config.scheduler == "stream_k"):
        first, count = share(tiles * work.steps, work.workers, work.worker)
        return first, first + count
    return work.worker, tiles


@cute.jit
def tile_of(config: cutlass.Constexpr[GemmConfig], work: Work, unit, end):
    """(tile_m, tile_n, batch or group, first step, steps) of this CTA for a unit.

    Tiles count 128 rows and ``tile_n`` columns; a CTA of a pair has its own tile_m.
    """
    index, rest_m, rest_n, steps = unit, work.rest_m, work.rest_n, work.steps
    if cutlass.const_expr(config.maps != ""):
        group, index, rest_m, rest_n, steps = grouped_scheduler.locate(config, work.groups, unit)
    if cutlass.const_expr(config.scheduler == "stream_k"):
        index = unit // work.steps
        first = unit % work.steps
        count = cutlass.min(work.steps - first, end - unit)
    elif cutlass.const_expr(config.split_k > 1):
        first, count = share(steps, Int32(config.split_k), work.part)
    else:
        first, count = Int32(0), steps
    # one of the two is often 1, and a division costs about twenty instructions: once a tile, not a step
    if cutlass.const_expr(config.raster == "m"):
        m, n = index % rest_m, index // rest_m
        if cutlass.const_expr(config.maps == ""):
            n, batch = n % rest_n, n // rest_n
    else:
        n, m = index % rest_n, index // rest_n
        if cutlass.const_expr(config.maps == ""):
            m, batch = m % rest_m, m // rest_m
    if cutlass.const_expr(config.maps != ""):
        batch = group
    return m * config.cluster[0] + work.x, n * config.cluster[1] + work.y, batch, first, count


@cute.jit
def next_unit(config: cutlass.Constexpr[GemmConfig], work: Work, unit, count):
    """The unit after one of ``count`` steps."""
    if cutlass.const_expr(config.scheduler == "stream_k"):
        return unit + count
    return unit + work.workers
