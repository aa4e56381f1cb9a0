"""The pipelines of the kernels of packed weights: the arrivals that complete each phase of their barriers."""

from __future__ import annotations

from ..pipeline_graph import Arrivals, Edge, checked
from ..sm90.config import GATHER_THREADS, WARPGROUP, WgmmaConfig
from .grouped_stream_config import GroupedStreamConfig
from .stream_config import WARP, StreamConfig

LOADING_WARPS = ("the warp that loads weights, which announces their bytes", 1), ("the warp that loads x, likewise", 1)


def wgmma_pipelines(config: WgmmaConfig) -> tuple[Edge, ...]:
    """The edges of the kernel of ``config``.

    operands: loading warps → MMA warpgroups. The warpgroups whose turn it is read a stage (without ``k_groups``, all),
    and each lane signals that it has read its weights. With multicast x goes to every CTA of a cluster, so that a lane
    of each of their warps arrives as well. Tiles of a grouped GEMM that are narrower than ``tile_n`` bring fewer bytes
    of x, as do stages of the middle (``overlap``). Threads, not bulk copies, copy gathered rows of x and weights in
    rows, and threads store x that they decode.

    partials (split_k): epilogue → epilogue of the other CTAs that share a tile along K, by st.async, with a buffer for
    each epilogue tile. A CTA has one work tile, so each buffer is filled once.
    """
    empty = [("lanes of the warpgroups whose turn it is", config.row_groups * WARPGROUP)]
    if config.in_tensor_memory:
        empty = [("commits of the warpgroups' MMAs", config.tile_m // config.group_rows)]
    if config.cluster_rows > 1:
        others = config.cluster_rows - 1
        empty += [(f"their warps in {others} other CTA(s), which read x, too", others * config.row_groups * 4)]
    full = Arrivals(LOADING_WARPS, config.stage_bytes)
    if config.gathered:
        threads = "threads that gather x, whose copies are complete", GATHER_THREADS
        full = Arrivals((LOADING_WARPS[0], threads), config.weight_bytes)
    if config.weights.in_rows:
        threads = "threads that copy rows of weights, whose copies are complete", GATHER_THREADS
        full = Arrivals((threads, LOADING_WARPS[1]), config.x_bytes)
        if config.decodes_x:
            full = Arrivals((threads, ("threads of the loading warpgroup, which decode x", WARPGROUP)))
    edges = [Edge("operands", "load", "mma", config.ring_stages, full, Arrivals(tuple(empty)))]
    if config.split_k > 1:
        announced = (("the thread that announces the bytes", 1),)
        received = Arrivals(announced, config.received_bytes // config.epilogue_tiles)
        edges.append(Edge("partials", "epilogue", "epilogue", config.epilogue_tiles, received, None))
    return checked(edges)


def stream_pipelines(config: StreamConfig) -> tuple[Edge, ...]:
    """The one edge of the streaming kernel: the warps that divide a stage's slabs read it, and each of their lanes
    signals so. The lanes of a warp, not a bulk copy, copy rows of groups."""
    full = Arrivals(LOADING_WARPS, config.stage_bytes)
    if isinstance(config, GroupedStreamConfig):
        lanes = "lanes of the warp that loads x, whose copies are complete", WARP
        full = Arrivals((LOADING_WARPS[0], lanes), config.stage_tiles * config.tile_bytes)
    empty = Arrivals((("lanes of the warps whose turn it is", WARP * config.warps_m),))
    return checked([Edge("operands", "load", "mma", config.ring_stages, full, empty)])
