"""Products with prepared weights: every structure of WGMMA and streaming kernels, alone, gated and of groups; and
problems at random."""

from __future__ import annotations

import itertools
import math
import zlib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from support import hopper_products

from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import NVFP4
from cute_nvfp4.kernels.gemm.config import GATE_NAMES
from cute_nvfp4.kernels.gemm.packed.stream_config import StreamConfig
from cute_nvfp4.kernels.gemm.packed.stream_config import can_implement as can_stream
from cute_nvfp4.kernels.gemm.sm90.config import STAGE_TILES, TILE_N, WgmmaConfig
from cute_nvfp4.kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig, can_implement_groups
from cute_nvfp4.kernels.gemm.sm90.limits import can_implement as can_wgmma
from cute_nvfp4.planning.packed import PackedPlan
from cute_nvfp4.planning.packed_problem import default_tiling, tiling_of
from cute_nvfp4.target import ARCHITECTURES
from cute_nvfp4.weight_layout import TILE_K
from tests.kernels.prepared_weight import test_packed_gated_gemm as gated
from tests.kernels.prepared_weight import test_packed_gemm as packed
from tests.kernels.prepared_weight import test_packed_groups as grouped
from tests.long.depends import PACKED
from tests.long.family import Family, Once

ARCHS, STREAM_ARCHS = ("sm_90a",), ("sm_90a", "sm_120a")
_DTYPES = ("float16", "bfloat16", "float32")
STEP_K = STAGE_TILES * TILE_K
"""Columns of K that a warpgroup takes at a time."""


@dataclass(frozen=True)
class Wgmma:
    """A tiling of ``WgmmaConfig``."""

    tile_n: int = 128
    warpgroups: int = 2
    ctas_per_sm: int = 1
    cluster_rows: int = 1
    split_k: int = 1
    stage_tiles: int = 2
    stages: int = 0
    scheduler: str = "stream_k"
    raster: str = "m"
    k_groups: int = 1

    def plan(self, workers: int) -> PackedPlan:
        return PackedPlan(WgmmaConfig(**self.fields), workers)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the configuration. OperandError: no schedule has these words."""
        return tiling_of(WgmmaConfig, default_tiling(WgmmaConfig) | asdict(self))


@dataclass(frozen=True)
class Stream:
    """A tiling of ``StreamConfig``."""

    slabs: int = 8
    warps_m: int = 4
    warps_k: int = 2
    stage_tiles: int = 1
    stages: int = 0

    def plan(self, workers: int) -> PackedPlan:
        return PackedPlan(StreamConfig(**asdict(self)), workers)


@dataclass(frozen=True)
class _Product:
    """out (m, n) of x (m, k) and a weight, or of two and a gate; ``quantized``: x is NVFP4. What the problems of the
    tests ask of a case."""

    m: int
    n: int
    k: int
    type: str = "bfloat16"
    result: str = "float32"
    workers: int = 1
    gate: str = ""
    quantized: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.type)

    @property
    def out(self) -> torch.dtype:
        return getattr(torch, self.result)

    bias = None
    format = NVFP4

    @property
    def plan(self) -> PackedPlan:
        return self.tiling.plan(self.workers)


@dataclass(frozen=True)
class WgmmaCase(_Product):
    tiling: Wgmma = field(default_factory=Wgmma)


@dataclass(frozen=True)
class StreamCase(_Product):
    tiling: Stream = field(default_factory=Stream)


@dataclass(frozen=True)
class GroupsCase:
    """Rows of groups times a stack of weights (``tests.kernels.prepared_weight.test_packed_groups``)."""

    sizes: tuple[int, ...]
    n: int
    k: int
    type: str = "bfloat16"
    result: str = "float32"
    workers: int = 1
    quantized: bool = False
    before: int = 0
    tile_n: int = 128
    warpgroups: int = 2
    ctas_per_sm: int = 1
    stages: int = 0

    dtype, out, format = _Product.dtype, _Product.out, NVFP4

    @property
    def plan(self) -> PackedPlan:
        tiling = {name: getattr(self, name) for name in _GROUP_TILING}
        return PackedPlan(GroupedWgmmaConfig(**tiling), self.workers)


_GROUP_TILING = ("tile_n", "warpgroups", "ctas_per_sm", "stages")


def _generator(*words: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(words).encode()))


def _any(g: np.random.Generator, values: Any) -> Any:
    return values[int(g.integers(len(values)))]


def _ragged(g: np.random.Generator, tile: int, most: int) -> int:
    """One to ``most`` tiles, the last whole or not."""
    return int(g.integers(most)) * tile + int(_any(g, (1, 3, tile // 2 + 1, tile - 1, tile)))


# --- every structure


def _wgmmas(arch: str, part: str) -> list[WgmmaCase]:
    axes = (
        TILE_N, (2, 3, 4), (1, 2), (1, 2, 4), (1, 2, 4), (1, 2), (0, 2, 3, 4, 6), ("stream_k", "static", "helped"),
        ("m", "n"), (1, 2), (False, True),
    )  # fmt: skip
    found = []
    for *values, two in itertools.product(*axes):
        tiling = Wgmma(*values)
        # the fewest stages that there may be, and the next: with k_groups they are even
        if tiling.stages > 3 and tiling.k_groups == 1:
            continue
        try:
            config = WgmmaConfig(**tiling.fields, gate="silu" if two else "", out="bfloat16")
        except OperandError:
            continue  # no schedule has these words
        if not can_wgmma(config):
            found.append(_wgmma(tiling, config))
    return found


def _wgmma(tiling: Wgmma, config: WgmmaConfig) -> WgmmaCase:
    g = _generator(tiling, config.gate)
    rows = config.out_rows * config.cluster_rows
    # of one element the tests' problems take no deviation
    m, n = _ragged(g, config.tile_n, 2), max(2, _ragged(g, rows, 2))
    helped = config.scheduler == "helped"
    # a step for each part of K, and one for helpers
    k = config.tile_k * (config.split_k - 1 + helped) + 16 * int(g.integers(1, 25))
    workers = int(g.integers(1, 5))
    if config.k_parts > 1 or helped:
        tiles = math.ceil(n / config.out_rows) * math.ceil(m / config.tile_n)
        workers = tiles + workers if helped else tiles
    quantized = g.integers(6) == 0
    k = -(-k // 32) * 32 if quantized else k
    if config.k_groups > 1 and math.ceil(k / STEP_K) % config.k_groups:
        k += STEP_K
    dtype = "float16" if quantized else _any(g, _DTYPES[:2])
    gate = _any(g, GATE_NAMES) if config.gate else ""
    return WgmmaCase(m, n, k, dtype, _any(g, _DTYPES), workers, gate, bool(quantized), tiling)


def _streams(arch: str, part: str) -> list[StreamCase]:
    axes = ((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (0, 8), (8, 16), (False, True), (False, True))
    found = []
    for *values, columns, quantized, two in itertools.product(*axes):
        tiling = Stream(*values)
        options = {"columns": columns, "quantized_x": quantized, "gate": "silu" if two else "", "dtype": "float16"}
        config = StreamConfig(**asdict(tiling), **options, arch=ARCHITECTURES[arch])
        if not can_stream(config):
            found.append(_stream(tiling, config))
    return found


def _stream(tiling: Stream, config: StreamConfig) -> StreamCase:
    g = _generator(tiling, config.columns, config.quantized_x, config.gate)
    m = int(g.integers(1, 9) if config.columns == 8 else g.integers(9, 17))
    n = max(2, _ragged(g, config.out_rows, 3))
    # the last stage is whole, or ends within its last two tiles
    whole = max(2, config.stage_tiles) * TILE_K
    k = whole * int(g.integers(1, 1 + 6 * 2 * TILE_K // whole))
    k -= 0 if config.quantized_x else 16 * int(g.integers(2 * TILE_K // 16))
    dtype = "float16" if config.quantized_x else _any(g, _DTYPES[:2])
    gate = _any(g, GATE_NAMES) if config.gate else ""
    return StreamCase(m, n, k, dtype, _any(g, _DTYPES), int(g.integers(1, 5)), gate, config.quantized_x, tiling)


def _groups(arch: str, part: str) -> list[GroupsCase]:
    found = []
    for tile_n, warpgroups, ctas, stages in itertools.product(TILE_N, (2, 4), (1, 2), (0, 2, 3)):
        config = GroupedWgmmaConfig(tile_n=tile_n, warpgroups=warpgroups, ctas_per_sm=ctas, stages=stages)
        if can_implement_groups(config):
            continue
        for quantized in (False, True):
            g = _generator(config, quantized)
            sizes = tuple(int(g.integers(0, max(4, 5 * tile_n // 4))) for _ in range(int(g.integers(2, 6))))
            n, k = _ragged(g, config.tile_m, 2), 32 * int(g.integers(1, 13))
            types = "float16" if quantized else _any(g, _DTYPES[:2]), _any(g, _DTYPES)
            tiling = (tile_n, warpgroups, ctas, stages)
            found.append(GroupsCase(sizes, n, k, *types, int(g.integers(1, 5)), quantized, int(g.integers(3)), *tiling))
    return found


def _product(case: WgmmaCase | StreamCase) -> Once:
    problem = (gated if case.gate else packed).Problem(case)
    return lambda: _right(problem)


def _grouped(case: GroupsCase) -> Once:
    problem = grouped.Problem(case)
    return lambda: _right(problem)


def _right(problem: Any) -> None:
    assert problem.right(problem.run()), "wrong"


def _structure(case: WgmmaCase | StreamCase) -> str:
    few = (case.quantized, case.m > 8) if isinstance(case, StreamCase) else ()
    return repr((case.tiling, bool(case.gate), *few))


def _groups_structure(case: GroupsCase) -> str:
    return repr((*(getattr(case, name) for name in _GROUP_TILING), case.quantized))


# --- at random


@dataclass(frozen=True)
class ProductCase:
    """A problem of ``hopper_products`` by its seed."""

    seed: int

    @cached_property
    def drawn(self) -> hopper_products.Case:
        return hopper_products.random_case(self.seed)


def _random(generator: np.random.Generator, arch: str) -> ProductCase:
    return ProductCase(int(generator.integers(1 << 30)))


def _product_at_random(case: ProductCase) -> Once:
    problem = hopper_products.Problem(case.drawn, "cpu")

    def once() -> None:
        bad = problem.wrong(problem.run())
        places = bad.nonzero()[:5].tolist()
        assert not places, f"{case.drawn}: {int(bad.sum())} of {bad.numel()} wrong, first at {places}"

    return once


FAMILIES = (
    Family(
        "packed-structure", WgmmaCase, _product, every=_wgmmas, identity=_structure, weight=2, schedules=20,
        archs=ARCHS, rooms=PACKED,
    ),
    Family(
        "stream-structure", StreamCase, _product, every=_streams, identity=_structure, weight=2, schedules=20,
        archs=STREAM_ARCHS, rooms=PACKED,
    ),
    Family(
        "packed-groups-structure", GroupsCase, _grouped, every=_groups, identity=_groups_structure, schedules=20,
        archs=ARCHS, rooms=PACKED,
    ),
    Family("packed", ProductCase, _product_at_random, _random, weight=3, goal=1000, archs=ARCHS, rooms=PACKED),
)  # fmt: skip
