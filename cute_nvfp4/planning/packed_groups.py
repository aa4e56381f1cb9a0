"""The choice of the kernel and the tile of a grouped GEMM of packed weights (sm_90a, sm_100a, sm_120a): the shortest
modelled time, for work tiles that are distributed as in the kernel."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from ..errors import OperandError, OperandTypeError, explain
from ..kernels.gemm.grouped_config import PARAMETER_GROUPS, WINDOW, table_size
from ..kernels.gemm.packed.grouped_stream_config import GroupedStreamConfig
from ..kernels.gemm.packed.grouped_stream_config import can_implement_groups as can_stream_groups
from ..kernels.gemm.packed.stream_config import MMA_COLUMNS, StreamConfig
from ..kernels.gemm.routed_config import RoutedConfig
from ..kernels.gemm.sm90.grouped_config import GROUP_TILE_N, GroupedWgmmaConfig, can_implement_groups
from ..runtime.bounded import remembered
from ..target import Architecture
from ..weight_layout import DTYPES, PACKINGS, SLAB_ROWS
from .group_costs import GROUP_COSTS, GroupCosts
from .grouped import random_sizes, too_many_groups, uneven_sizes
from .packed import MMA_SYNC_TILE_N, deep
from .packed_model import COSTS
from .packed_problem import TILING, PackedPlan, packed_tiles

Sizes: TypeAlias = tuple[tuple[int, int, int], ...]
"""(m, n, k) of each group."""
SPREADS = 0.25, 0.5, 0.75
"""Standard deviations of the logarithms of sizes, for sizes that are not known yet."""
STREAMED = {"slabs": 8, "warps_m": 4, "warps_k": 2, "stage_tiles": 2, "stages": 8, "ctas_per_sm": 2}
"""The tiling of the streaming kernel. Of two CTAs on an SM, one streams while the other adds up and stores."""
HALVED = {"slabs": 4, "warps_m": 2, "warps_k": 4, "stage_tiles": 2, "stages": 16, "ctas_per_sm": 2}
"""The tiling of the streaming kernel where, with ``STREAMED``, some CTAs would have one work tile and others none: half
as large tiles are more even (one token of Qwen3-30B-A3B: 18.8 µs, and 20.2 by whole ones with one CTA an SM; H200,
2026-11-28)."""
EIGHT_COLUMNS, FEW_ROWS = 4.5, 8.5
"""The most rows of a used expert, on average, up to which its products stream by eight columns, and by 16. With eight
rows both kernels take as long; with 16, tiles take 0.82 of the time (H200, 2026-11-28)."""
FEW_ROWS_FP8 = 1.1
"""``FEW_ROWS`` of experts packed for FP8. Up to it rows stream in 16 bits; more rows are quantized, since decoding
these weights to 16 bits takes 1.6 times the instructions (one token of Qwen3-30B-A3B: 23.2 µs, and 26.4 by tiles;
sixteen tokens 102 and 87; H200, 2026-11-28)."""
STREAM_TILING = "columns", "cut_bytes"
"""The fields that a plan of the streaming kernel decides for groups, besides those of ``TILING``."""
GROUPED_TILING = "tile_n", "narrower", "warpgroups", "ctas_per_sm", "stage_tiles", "stages"
"""The fields that a plan of the kernel by tiles decides."""
WIDTHS = (
    *((8,), (16,), (32,), (48,), (64,), (80,), (64, 72, 80, 96), (32, 64, 96, 128), (80, 96, 112, 128)),
    *((112, 120, 128, 144), (96, 128, 192, 256)),
)
"""Widths of tiles that are candidates on sm_90a. They are close together because sizes of groups are, and rows of a
tile beyond its group are wasted."""
EXPERT_WIDTHS = (24,), (40,), (56,)
"""More candidates for rows of experts: where experts have 16 or 32 rows on average, few have more than 24 or 40. The
model interpolates their times between those of 16, 32, 48 and 64."""
MOST_STEPS = 1 << 32
"""The bound of the steps of a launch of the streaming kernel times those of a work tile, by which it divides."""


@dataclass(frozen=True, kw_only=True)
class PackedGroups:
    """Products of groups.

    sizes: (m, n, k) of each group; where offsets distribute rows to ``stack`` groups, one size with all rows. n is the
        columns of the output. vector: whether rows of outputs start at multiples of 16 bytes.
    factors: device scalars that multiply alpha. gate, packing, promoted: as in ``WgmmaConfig``.
    ids: the dtype of the expert ids of few slots, which only the streaming kernel sorts itself; "": rows are sorted.
    floats: the dtype of rows that are quantized to FP8 unless they stream. decoded: whether another launch decodes x.
    """

    sizes: Sizes
    stack: int = 0
    dtype: str = "bfloat16"
    out: str = "bfloat16"
    vector: bool = True
    factors: int = 0
    gate: str = ""
    packing: str = "nvfp4"
    routed: RoutedConfig | None = None
    promoted: bool = False
    decoded: bool = False
    ids: str = ""
    floats: str = ""

    def streaming(self, arch: Architecture, **tiling: Any) -> GroupedStreamConfig:
        """The configuration of the streaming kernel with this tiling."""
        return GroupedStreamConfig(
            arch=arch,
            maps=self.ids or "rows",
            capacity=table_size("rows", self.stack)["capacity"],
            dtype=self.floats or self.dtype,
            packing=self.packing,
            of_fp8=bool(self.floats),
            out=self.out,
            vector=self.vector and self.sizes[0][1] % 4 == 0,
            factors=self.factors,
            gate=self.gate,
            routed=self.routed or RoutedConfig(),
            **tiling,
        )

    @property
    def expected(self) -> tuple[Sizes, ...]:
        """Sets of sizes to plan for. Where offsets distribute rows to a stack, only the GPU knows the sizes. The plan
        assumes those of rows that take a group at random and, unless a router sends them, less even ones as well."""
        if not self.stack:
            return (self.sizes,)
        ((m, n, k),) = self.sizes
        sets = [random_sizes(m, self.stack)]
        if self.routed is None and self.stack > 1:
            sets += (uneven_sizes(m, self.stack, spread) for spread in SPREADS)
        return tuple(tuple((rows, n, k) for rows in found) for found in sets)

    def config(self, arch: Architecture, **tiling: Any) -> GroupedWgmmaConfig:
        """The configuration of the kernel by tiles with this tiling."""
        groups = self.stack or len(self.sizes)
        maps = "rows" if self.stack else "parameters" if groups <= PARAMETER_GROUPS else "workspace"
        return GroupedWgmmaConfig(
            arch=arch,
            maps=maps,
            **table_size(maps, groups),
            dtype=self.dtype,
            packing=self.packing,
            out=self.out,
            vector=self.vector and self.out != "float32",
            factors=self.factors,
            gate=self.gate,
            routed=self.routed or RoutedConfig(),
            promoted=self.promoted,
            batched=bool(self.stack) and PACKINGS[self.packing][DTYPES[self.dtype]].in_rows,
            # the launch before this one decodes x of a list
            programmatic="x" if self.decoded and not self.stack and arch.generation == "sm90" else "",
            **tiling,
        )


@remembered
def choose_groups(
    problem: PackedGroups, arch: Architecture, sm_count: int, given: PackedPlan | None = None
) -> PackedPlan:
    """The plan for ``problem`` on ``sm_count`` SMs, or ``given``, with the fields that the problem decides.

    Raises:
        OperandError, OperandTypeError: no kernel can run it.
    """
    if reason := too_many_groups(problem.stack or len(problem.sizes)):
        raise OperandError(reason)
    if given is None:
        plan = choose_stream(problem, arch, sm_count) or choose_tiles(problem, arch, sm_count)
    elif isinstance(given, PackedPlan) and isinstance(given.config, GroupedWgmmaConfig):
        c = given.config
        tiling = {name: getattr(c, name) for name in GROUPED_TILING}
        plan = replace(given, config=problem.config(arch, **tiling))
    elif isinstance(given, PackedPlan) and isinstance(given.config, GroupedStreamConfig):
        tiling = {name: getattr(given.config, name) for name in (*TILING[StreamConfig], *STREAM_TILING)}
        plan = replace(given, config=problem.streaming(arch, **tiling))
    else:
        expected = "a PackedPlan of planning.packed of a GroupedWgmmaConfig or a GroupedStreamConfig"
        raise OperandTypeError.of("config", got=type(given).__name__, expected=expected)
    reason = can_stream(problem, plan.config) if plan.streams else can_implement_groups(plan.config)
    if problem.ids and not plan.streams:
        reason = reason or explain("plan of slots that the kernel sorts", got="tiles", expected="the streaming kernel")
    if plan.workers < 1:
        reason = explain("workers", got=plan.workers, expected="at least 1")
    if reason:
        raise OperandError(reason)
    return plan


def choose_stream(p: PackedGroups, arch: Architecture, sm_count: int) -> PackedPlan | None:
    """The plan of the streaming kernel for products of experts that have few rows each; else None.

    The second product may start while the first one runs, because it needs only the rows of that one.
    """
    # groups other than experts may be a list, which has no stack
    if p.routed is None or arch.generation != "sm90":
        return None
    rows = rows_of_used(p.sizes[0][0], p.stack)
    if rows > (FEW_ROWS_FP8 if p.floats else FEW_ROWS):
        return None
    # a first product that sorts slots itself needs no earlier launch of this package
    early = "x" if not p.routed.gathered else "" if p.ids else "all"
    columns = 8 if rows <= EIGHT_COLUMNS else 16
    config = p.streaming(arch, columns=columns, programmatic=early, **STREAMED)
    tiles, ctas = p.sizes[0][0] / rows * -(-p.sizes[0][1] // config.out_rows), config.ctas_per_sm * sm_count
    if tiles <= ctas / 2:
        config = p.streaming(arch, columns=columns, programmatic=early, **HALVED)
    return None if can_stream(p, config) else PackedPlan(config, sm_count * config.ctas_per_sm)


def sorts_slots(slots: int, groups: int) -> bool:
    """Whether products of ``slots`` slots stream on sm_90a, and sort the slots themselves."""
    return slots <= WINDOW and rows_of_used(slots, groups) <= FEW_ROWS


def stays_in_16_bits(slots: int, groups: int, n: int, k: int) -> bool:
    """Whether rows of ``slots`` slots stay in 16 bits, on sm_90a, for a product with experts packed for FP8: with few
    rows an expert, only the speed of reading weights matters. n: rows of an expert's packed weight."""
    return rows_of_used(slots, groups) <= FEW_ROWS_FP8 and not _too_many_steps(slots, groups, n, k, STREAMED)


def _too_many_steps(m: int, groups: int, n: int, k: int, tiling: Mapping[str, int]) -> str:
    """The reason why the streaming kernel cannot take ``m`` rows and weights (n, k), or an empty string: its division
    is exact only below ``MOST_STEPS``. n: rows of the packed weight."""
    steps_of_tile = packed_tiles(n, k)[1] // tiling["stage_tiles"]
    steps = (min(groups, m) + m // MMA_COLUMNS) * -(-n // (SLAB_ROWS * tiling["slabs"])) * steps_of_tile
    if steps * steps_of_tile < MOST_STEPS:
        return ""
    got = f"{steps} steps of {steps_of_tile} a work tile"
    return explain("streaming kernel of groups", got=got, expected=f"a product below {MOST_STEPS}")


def rows_of_used(rows: int, groups: int) -> float:
    """Rows of a used group, on average, where each row takes a group at random."""
    return rows / (groups * (1.0 - (1.0 - 1.0 / groups) ** rows))


def choose_tiles(p: PackedGroups, arch: Architecture, sm_count: int) -> PackedPlan:
    """The fastest plan by tiles; if no kernel can run any, one that is refused."""
    candidates: tuple[tuple[int, ...], ...] = WIDTHS
    if arch.generation != "sm90" or p.promoted:
        candidates = ((8,), (16,), (32,), (64,), (32, 64, 96, 128), (96, 128, 192, 256))
    elif p.routed is not None:
        candidates = (*WIDTHS, *EXPERT_WIDTHS)
    most = max(MMA_SYNC_TILE_N if arch.generation == "sm120" else GROUP_TILE_N)
    plans = [_tile_plan(p, arch, sm_count, widths) for widths in candidates if widths[-1] <= most]
    possible = [plan for plan in plans if not can_implement_groups(plan.config)]
    return min(possible or plans, key=lambda plan: predict(plan, p, sm_count))


def can_stream(p: PackedGroups, c: GroupedStreamConfig) -> str:
    """The reason why the streaming kernel cannot run the problem with ``c``, or an empty string."""
    if not p.stack:
        return explain("groups of the streaming kernel", got="a list", expected="rows of one x, and a stack of weights")
    if p.decoded:
        return explain("x of the streaming kernel of groups", got="block-scaled", expected="numbers of 16 bits")
    if p.dtype == "float8_e4m3fn" and not p.floats:
        expected = "bfloat16 or float16"
        return explain("dtype of a weight of the streaming kernel", got=p.dtype, expected=expected)
    m, n, k = p.sizes[0]
    if p.ids and m > WINDOW:
        return explain("slots that the streaming kernel sorts itself", got=m, expected=f"at most {WINDOW}")
    k_tiles = packed_tiles(n, k)[1]
    if k_tiles % c.stage_tiles:
        return explain("stage_tiles", got=c.stage_tiles, expected=f"a divisor of {k_tiles}: packed tiles along K")
    tiling = {"slabs": c.slabs, "stage_tiles": c.stage_tiles}
    return _too_many_steps(m, p.stack, n * c.products, k, tiling) or can_stream_groups(c)


def _tile_plan(p: PackedGroups, arch: Architecture, sm_count: int, widths: tuple[int, ...]) -> PackedPlan:
    *narrower, tile_n = widths
    # promoted sums take twice the registers
    narrow = arch.generation == "sm90" and not narrower and tile_n <= (32 if p.promoted else 80)
    config = deep(p.config(arch, tile_n=tile_n, narrower=tuple(narrower), ctas_per_sm=2 if narrow else 1))
    tiles = sum(-(-n // config.out_rows) * -(-m // tile_n) for m, n, _ in p.sizes)
    if p.stack:
        # each further group may begin inside a row of tiles, and so add another one
        tiles += (p.stack - 1) * -(-p.sizes[0][1] // config.out_rows)
    return PackedPlan(config, max(1, min(tiles, sm_count * config.ctas_per_sm)))


def tile_us(config: GroupedWgmmaConfig, m: int, k: int, sm_count: int) -> float:
    """Modelled µs of each work tile of a group with ``m`` rows of x."""
    return _width_us(config, _width(config, m), k, sm_count, GROUP_COSTS)


def _width(config: GroupedWgmmaConfig, m: int) -> int:
    """The narrowest width that covers ``m`` rows of x with as few tiles as the widest."""
    rest_n = max(1, -(-m // config.tile_n))
    return min(w for w in config.widths if w * rest_n >= m)


def _width_us(config: GroupedWgmmaConfig, width: int, k: int, sm_count: int, by: GroupCosts) -> float:
    if config.arch.generation in COSTS:
        costs = COSTS[config.arch.generation](config, width, sm_count)
        return -(-k // config.tile_k) * costs.step_us + costs.store_us
    return by.tile_us(config, width, k)


def predict(plan: PackedPlan, p: PackedGroups, sm_count: int, by: GroupCosts = GROUP_COSTS) -> float:
    """Modelled µs of a launch, its start included: the mean over the sizes to plan for. by: costs of sm_90a."""
    width_us = functools.cache(functools.partial(_width_us, plan.config, sm_count=sm_count, by=by))
    return by.start_us + statistics.fmean(_slowest_us(plan, sizes, width_us) for sizes in p.expected)


def _slowest_us(plan: PackedPlan, sizes: Sizes, width_us: Callable[[int, int], float]) -> float:
    """µs of the SM with the most work."""
    c = plan.config
    tiles = [(width_us(_width(c, m), k), -(-n // c.out_rows) * -(-m // c.tile_n)) for m, n, k in sizes]
    tiles.sort(reverse=True)
    costs_us = np.repeat(*zip(*tiles))
    rounds = np.resize(
        np.pad(costs_us, (0, -len(costs_us) % plan.workers)), (-(-len(costs_us) // plan.workers), plan.workers)
    )
    rounds[1::2] = rounds[1::2, ::-1]
    return float(rounds.sum(0).max())
