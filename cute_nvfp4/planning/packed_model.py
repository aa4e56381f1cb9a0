"""Modelled times of the GEMMs of packed weights: on sm_90a from measurements on an H200; on sm_100a and sm_120a from
published figures (the streaming kernel as on an H200).

The constants are in ``packed_model.json``, for x in FP8 in ``packed_model_fp8.json``, and for operands in rows in
``packed_model_rows.json``. ``benchmarks/fit_packed_model.py`` writes these files: for each constant its value, the
value that a fit to the recorded plans gives, and whether the value comes from that record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..kernels.gemm.packed.stream_config import StreamConfig
from ..kernels.gemm.sm90.config import STAGE_TILES, WgmmaConfig
from ..weight_layout import DTYPES, PACKINGS, TILE_K, TILE_ROWS, tiles
from . import sm100_packed_model, sm120_model
from .packed_problem import PackedPlan, PackedProblem, helped_steps, tile_count

RECORD = Path(__file__).with_name("packed_model.json")
RECORD_FP8 = Path(__file__).with_name("packed_model_fp8.json")
RECORD_ROWS = Path(__file__).with_name("packed_model_rows.json")
TILE_CODES = TILE_ROWS * TILE_K


@dataclass(frozen=True)
class Constants:
    """The constants of the model. Times are in µs.

    The comment of a table says first what its keys count. "Many rows" are more than eight rows of x.
    """

    bytes_us: float  # bytes of a weight that memory delivers in a µs
    stream_start_us: float  # launch, first bytes and last store of the streaming kernel
    start_us: float  # launch, first bytes and last store of the WGMMA kernel
    eight_bits: float  # relative time of elements of eight bits, to those of four
    # the streaming kernel
    work_tile_us: dict[int, float]  # slabs of a work tile: a CTA's time for 64 of K and up to eight rows of x
    work_tile_many: dict[int, float]  # slabs of a work tile: relative time for many rows
    warps: dict[str, float]  # slabs, warps_m, stage_tiles: a step's time relative to other tiles of so many slabs
    warps_many: dict[str, float]  # slabs, warps_m, stage_tiles: the same for many rows
    decoded_x_us: float  # to decode 64 of K of eight rows of NVFP4 x, by each of warps_m
    cta_us: float  # each CTA of the launch
    warp_us: float  # each of warps_k, whose sums are added
    eight_warps: float  # relative time of eight warps_k, for many rows
    cut_us: float  # to add the sums of a work tile that is cut
    cut_part_us: float  # each part of such a work tile
    cut_many_us: float  # to add its sums, for many rows, besides cut_us
    fours_us: float  # a warp reads a quad of sums for each lane from one part, where one warp adds and others multiply
    # the WGMMA kernel
    waiting: float  # part of the time that memory does not hide, for elements of eight bits
    stage_us: dict[int, float]  # rows of x in a tile: 128 rows of the weight and 128 of K
    tile_us: dict[int, float]  # rows of x in a tile: to begin and to store a tile
    fix_up_us: dict[int, float]  # rows of x in a tile: to add the sums of a tile that stream-K cuts in two
    beyond_us: float  # a stage, for each row of a tile beyond the end of x
    part_us: float  # each further part of a tile that stream-K cuts, for 64 rows of x in the tile
    multicast: float  # relative time of a stage whose x is loaded for two CTAs
    multicast_us: float  # to start clusters
    l2_bytes: float  # bytes of operands up to which equal shares find them in L2
    beyond_l2: float  # relative time of their stages beyond that, added for each byte
    short_stage: float  # relative time of stages of one packed tile
    wide_short_stage: float  # the same in tiles of 256 rows of x, shared along K
    turns: dict[int, float]  # rows of x in a tile: relative time of a stage where warpgroups take turns
    turns_whole_k: float  # the same where a CTA has 64 rows of the weight and all of K
    whole_k_us: float  # the gain of a CTA that has all of K
    overlap_us: float  # the gain of a tile of 128 columns whose sums travel during products
    help_us: float  # to add a helper's sums
    write_us: float  # for a helper to write its sums
    exchange_us: float  # to add the sums of two CTAs of a cluster
    # operands in rows
    decoded_us: float = 0.0  # the launch that decodes x first
    decoded_bytes_us: float = math.inf  # bytes of decoded x that it writes in a µs
    # rows of x in a tile: relative time of a stage in which loading warps decode x
    decoding: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Constants:
        """The constants from ``values``. The name of an entry of a table is the table's name, a space, and the key."""
        fields: dict[str, float | dict] = {}
        for name, value in values.items():
            table, _, key = name.partition(" ")
            if key:
                fields.setdefault(table, {})[int(key) if key.isdecimal() else key] = value
            else:
                fields[name] = value
        return cls(**fields)


def recorded(path: Path = RECORD) -> dict[str, float]:
    """The values of the constants, by name, in ``packed_model.json`` or in another file of its form."""
    return {name: entry["value"] for name, entry in json.loads(path.read_text())["constants"].items()}


CONSTANTS, CONSTANTS_FP8, CONSTANTS_ROWS = (Constants.of(recorded(x)) for x in (RECORD, RECORD_FP8, RECORD_ROWS))
COSTS = {"sm100": sm100_packed_model.packed_costs, "sm120": sm120_model.packed_costs}
"""By generation, the costs of tiles on GPUs on which nothing was measured."""


def predict(plan: PackedPlan, p: PackedProblem, sm_count: int, by: Constants | None = None) -> float:
    """Modelled µs of a plan, including its launch and, for operands in rows, the launch that decodes x, but not a
    launch that quantizes x. by: constants; None: those for this kind of problem."""
    c = plan.config
    by = by or constants_of(p)
    if isinstance(c, StreamConfig):
        return by.stream_start_us + _stream_us(c, plan.workers, p, by)
    if c.arch.generation in COSTS:
        costs = COSTS[c.arch.generation](c, c.tile_n, sm_count)
        return costs.tiles_us(c, tile_count(p, c), -(-p.k // c.tile_k), plan.workers)
    us, memory = _wgmma_us(c, plan, p, sm_count, by), _weight_bytes(c, p) / by.bytes_us
    if c.weights.in_rows and not c.decodes_x:
        us += by.decoded_us + 2 * p.batch * p.m * p.k / by.decoded_bytes_us
    # most plans of eight-bit elements are bound by memory: the one that waits least for anything else comes first
    return by.start_us + max(us, memory + (by.waiting * us if c.weights.element_bits == 8 else 0.0))


def constants_of(p: PackedProblem) -> Constants:
    """The constants for this kind of problem."""
    if p.dtype == "float8_e4m3fn":
        return CONSTANTS_FP8
    return CONSTANTS_ROWS if PACKINGS[p.packing][DTYPES[p.dtype]].in_rows else CONSTANTS


def _weight_bytes(c: WgmmaConfig, p: PackedProblem) -> float:
    return p.batch * p.rows * p.k * c.weights.tile_bytes / TILE_CODES


def _stream_us(c: StreamConfig, workers: int, p: PackedProblem, by: Constants) -> float:
    """µs of the CTA with the largest share."""
    work_tiles, steps = -(-p.rows // c.rows), tiles(p.rows, p.k)[1] // c.stage_tiles
    share, cut = -(-work_tiles * steps // workers) * c.stage_tiles, work_tiles % workers
    many = p.m > 8
    tile = by.work_tile_us[c.slabs] * (by.work_tile_many[c.slabs] if many else 1.0)
    tile *= by.eight_warps if many and c.warps_k == 8 else 1.0
    tile *= by.eight_bits if c.weights.element_bits == 8 else 1.0
    step = max(tile, workers * c.tile_bytes / by.bytes_us)
    step *= (by.warps_many if many else by.warps).get(f"{c.slabs},{c.warps_m},{c.stage_tiles}", 1.0)
    if c.quantized_x:
        step += by.decoded_x_us * c.warps_m * c.columns / 8
    us = share * step + by.cta_us * workers + by.warp_us * c.warps_k
    if cut:
        us += by.cut_us + by.cut_part_us * workers / cut + (by.cut_many_us if many else 0.0)
        if work_tiles > workers:
            us += by.fours_us * math.ceil(p.m * c.rows / (4 * 32)) * workers / cut
    return us


def _wgmma_us(c: WgmmaConfig, plan: PackedPlan, p: PackedProblem, sm_count: int, by: Constants) -> float:
    """µs of the SM with the most work tiles."""
    workers = plan.workers
    count, steps = tile_count(p, c), -(-p.k // (STAGE_TILES * TILE_K))
    along_x, tile_us = -(-p.m // c.tile_n), by.tile_us[c.tile_n]
    stage = (by.stage_us[c.tile_n] + by.beyond_us * (along_x * c.tile_n - p.m) / along_x) * c.row_groups / 2
    if c.decodes_x:
        stage *= by.decoding[c.tile_n]
    if c.scheduler == "stream_k":
        stage *= 1 + by.beyond_l2 * max(0.0, _weight_bytes(c, p) + p.batch * p.m * p.k * 2 - by.l2_bytes)
        share = count * steps / workers
        cut = by.fix_up_us[c.tile_n] + by.part_us * c.tile_n / 64 * max(0.0, workers / count - 1)
        return math.ceil(share) * stage * max(1.0, workers / sm_count) + tile_us * max(1.0, share / steps) + cut
    stage *= by.multicast if c.cluster_rows > 1 else 1.0
    if c.k_groups > 1:
        stage *= by.turns[c.tile_n] if c.split_k > 1 else by.turns_whole_k
    if c.stage_tiles == 1:
        stage *= by.wide_short_stage if c.tile_n == 256 else by.short_stage
    if c.scheduler == "helped":
        helped = helped_steps(p, plan)
        helps = -(-count // ((workers - count) * c.split_k)) * (helped * stage + by.write_us)
        return max(-(-(steps - helped) // c.split_k) * stage, helps) + tile_us + by.exchange_us + by.help_us
    ctas = -(-count * c.split_k // sm_count)
    rest = (by.exchange_us if c.split_k > 1 else 0.0) + (by.multicast_us if c.cluster_rows > 1 else 0.0)
    rest -= by.overlap_us * c.overlap * c.tile_n / 128 + (by.whole_k_us if c.k_groups > c.split_k else 0.0)
    return ctas * -(-steps // c.split_k) * stage + -(-ctas // c.ctas_per_sm) * tile_us + rest
