"""Every GEMM kernel structure that compiles, and problems for them that wrap every ring and leave tails.

A structure decides which instructions run and in which order: tile, pairs, cluster, split of K, scheduler, raster,
stages, formats. The other choices that a kernel is compiled for (output, bias, swap, …) are drawn so that all pairs of
two choices occur.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from cute_nvfp4.kernels.gemm.config import SM120_TILE_N, SPLITS, TILE_N, GemmConfig, kind_of
from cute_nvfp4.kernels.gemm.limits import can_implement
from cute_nvfp4.target import ARCHITECTURES
from support.gemm_problems import DTYPES, FORMAT_PAIRS, OUTPUTS, Case, k_multiple

CLUSTERS = tuple(itertools.product((1, 2, 4), (1, 2, 4)))
RINGS = ((0, 0), (2, 1), (3, 2))
"""(stages, accumulators): as many as fit; the fewest; a few."""
_OUTSIDE = {
    "dtype": tuple(DTYPES), "out": OUTPUTS, "swap": (False, True), "store": ("tma", "direct"),
    "alpha": (None, 2.0**-13, -3.0e-5), "alpha_tensor": (False, True),
    "a_global": (None, 0.5), "b_global": (None, -1.5),
    "bias": ("", "n", "batch"), "bias_dtype": tuple(DTYPES), "batch": (0, 1, 2), "pitch": (0, 48),
    "repeat_a": (False, True), "repeat_b": (False, True), "exact": (False, True),
}  # fmt: skip
_STRUCTURE = (
    "tile_n", "pair", "cluster_m", "cluster_n", "split_k", "scheduler", "raster", "stages", "acc_stages", "a_format",
)  # fmt: skip


def config_of(case: Case, arch: str = "sm_100a") -> GemmConfig:
    """The case's structure as a configuration."""
    signature = {"a_format": case.a_format, "b_format": case.b_format, "out": case.dtype}
    return replace(case.tiling(), arch=ARCHITECTURES[arch], **signature)


@functools.cache
def structures(arch: str = "sm_100a") -> tuple[Case, ...]:
    """Every structure of an architecture that ``can_implement`` accepts; cached, because finding them takes seconds."""
    return tuple(_structures(arch))


def _structures(arch: str) -> Iterator[Case]:
    alone = ARCHITECTURES[arch].generation == "sm120"
    options = {"store": "direct"} if alone else {}
    widths, rings = (SM120_TILE_N, ((0, 0), (2, 0))) if alone else (TILE_N, RINGS)
    tilings = itertools.product(widths, (False, True), CLUSTERS, SPLITS, ("static", "stream_k"))
    for tile_n, pair, (cm, cn), split, scheduler in tilings:
        for raster, (stages, acc), (a, b) in itertools.product(("m", "n"), rings, FORMAT_PAIRS):
            case = Case(
                tile_n=tile_n, pair=pair, cluster_m=cm, cluster_n=cn, split_k=split, scheduler=scheduler,
                raster=raster, stages=stages, acc_stages=acc, a_format=a, b_format=b, **options,
            )  # fmt: skip
            if not can_implement(config_of(case, arch)):
                yield case


def fitting(case: Case, generator: np.random.Generator) -> Case:
    """``case`` with sizes for its structure: one to three tiles of its cluster, mostly ragged; enough steps of K for a
    split; often fewer clusters than tiles, so that rings wrap."""
    tile_m = 128 * max(case.cluster_m, 2 if case.pair else 1)
    tile_n = case.tile_n * case.cluster_n
    tile_k, unit = kind_of(case.a_format, case.b_format).tile_k, k_multiple(case.a_format, case.b_format)

    def size(tile: int, tiles: int) -> int:
        ragged = [1, 3, tile // 2, tile // 2 + 1, tile - 1, tile]
        return (tiles - 1) * tile + int(generator.choice(ragged))

    tiles = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1)] if case.batch < 2 else [(1, 1), (1, 1), (1, 2), (2, 1)]
    rest_m, rest_n = tiles[generator.integers(len(tiles))]
    rows, columns = size(tile_m, rest_m), size(tile_n, rest_n)
    steps = case.split_k + int(generator.integers(0, 3)) if case.split_k > 1 else int(generator.integers(1, 5))
    # the last step is whole or ragged
    k = steps * tile_k - unit * int(generator.integers(0, tile_k // unit))
    m, n = (columns, rows) if case.swap else (rows, columns)
    a, b = (case.b_format, case.a_format) if case.swap else (case.a_format, case.b_format)
    workers = int(generator.choice([1, 2, 3, 5] if case.scheduler == "stream_k" else [1, 1, 2]))
    return replace(case, m=m, n=n, k=k, a_format=a, b_format=b, workers=workers, seed=int(generator.integers(1 << 30)))


def valid(case: Case) -> Case:
    """``case`` without options that its formats and sizes do not allow."""
    changes: dict[str, object] = {}
    if "nvfp4" not in (case.a_format, case.b_format):
        changes |= {"a_global": None, "b_global": None}
    elif case.exact:
        # factors that are powers of two add no bits
        changes |= {"a_global": case.a_global and 0.5, "b_global": case.b_global and -2.0}
    if case.exact and case.alpha is not None:
        changes["alpha"] = 2.0**-13
    elif case.dtype == "float16" and case.alpha is None:
        changes["alpha"] = 2.0**-13
    if case.bias == "batch" and case.batch == 0:
        changes["bias"] = "n"
    return replace(case, **changes)


class Pairs:
    """Draws the choices outside the structure, the rarest combinations of two choices first."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = np.random.default_rng(seed)
        self.seen: set[tuple] = set()

    def _new(self, case: Case) -> set[tuple]:
        names = (*_OUTSIDE, *_STRUCTURE)
        values = [(name, getattr(case, name)) for name in names]
        return set(itertools.combinations(values, 2)) - self.seen

    def complete(self, structure: Case, tries: int = 12, **fixed: object) -> Case:
        """``structure`` with all other choices drawn, except ``fixed`` ones, and with sizes that fit it."""
        drawn = []
        for _ in range(tries):
            outside = {name: choices[self.generator.integers(len(choices))] for name, choices in _OUTSIDE.items()}
            drawn.append(valid(replace(structure, **outside | fixed)))
        new = [self._new(case) for case in drawn]
        best = max(range(tries), key=lambda i: len(new[i]))
        self.seen |= new[best]
        return fitting(drawn[best], self.generator)


def random_case(
    generator: np.random.Generator, every: Sequence[Case], max_mn: int = 700, max_k: int = 4096, **fixed: object
) -> Case:
    """A problem of any size with any structure of ``every``, or with a plan that planning chooses for it."""

    def size(limit: int) -> int:
        return int(min(limit, 1 + generator.integers(0, 2 ** generator.integers(1, limit.bit_length() + 1))))

    structure = every[generator.integers(len(every))]
    case = Pairs(int(generator.integers(1 << 30))).complete(structure, tries=1, **fixed)
    unit, tile_k = k_multiple(case.a_format, case.b_format), kind_of(case.a_format, case.b_format).tile_k
    k = unit * size(max_k // unit)
    chosen = generator.random() < 0.25
    if not chosen:
        k = max(k, unit + (case.split_k - 1) * tile_k)
    workers = 0 if chosen else int(generator.integers(1, 9))
    return replace(case, m=size(max_mn), n=size(max_mn), k=k, workers=workers)
