"""Which kernel runs a grouped GEMM: the tile shape, and whether A and B change places, by the GEMM's model.

All groups share one plan. A candidate's work is distributed as the scheduler will do it; the busiest cluster's k-tiles
and the bytes of all groups then go into ``gemm_model.predict`` as if they were one GEMM's.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import OperandError, explain
from ..kernels.gemm.config import CTA_ROWS, SM120_TILE_N, SPLITS, TILE_N, GemmConfig, GemmSignature
from ..kernels.gemm.grouped_config import MAX_GROUPS, PARAMETER_GROUPS, GroupedConfig, can_implement_grouped, table_size
from ..runtime.bounded import remembered
from ..target import Architecture
from . import clocked, gemm_model, sm120_model
from .gemm_model import traffic
from .gemm_problem import INT32_MAX, Plan, can_distribute, plan_tiling
from .rates import concurrent_clusters


@dataclass(frozen=True)
class GroupedProblem(GemmSignature):
    """What the choice depends on, with the signature of all groups.

    sizes: (m, n, k) of each group that has rows; in the contiguous form, where offsets distribute rows to ``stack``
    groups, of one problem of all rows.
    """

    sizes: tuple[tuple[int, int, int], ...]
    stack: int = 0

    @property
    def maps(self) -> str:
        if self.stack:
            return "shared"
        return "parameters" if len(self.sizes) <= PARAMETER_GROUPS else "workspace"

    def config(self, arch: Architecture, swap: bool, maps: str = "", **tiling: Any) -> GroupedConfig:
        """The configuration with this tiling, for maps of this kind ("": the default for so many groups)."""
        maps = maps or self.maps
        groups = self.stack or len(self.sizes)
        return GroupedConfig(
            arch=arch,
            maps=maps,
            **table_size(maps, groups),
            ragged=("b" if swap else "a") if maps == "shared" else "",
            **self.signature(swap),
            **tiling,
        )

    @property
    def expected(self) -> tuple[tuple[int, int, int], ...]:
        return expected_sizes(self.sizes, self.stack)


def expected_sizes(sizes: tuple[tuple[int, int, int], ...], stack: int) -> tuple[tuple[int, int, int], ...]:
    """Sizes (m, n, k) to plan for: even shares of the rows where offsets distribute them to ``stack`` groups."""
    if not stack:
        return sizes
    ((m, n, k),) = sizes
    groups = min(stack, m)
    each, rest = divmod(m, groups)
    return tuple((each + (i < rest), n, k) for i in range(groups))


def random_sizes(rows: int, groups: int) -> tuple[int, ...]:
    """Rows of the groups that have some, the largest first, where each of ``rows`` rows takes any of ``groups``:
    quantiles of the binomial distribution."""
    if groups == 1:
        return (rows,)
    mean = rows / groups
    counts = np.arange(1, min(rows, math.ceil(mean + 10 * mean**0.5 + 20)) + 1)
    # logarithms of the chances of 0, 1, … rows, each from the one before
    ratios = np.log((rows + 1 - counts) / counts / (groups - 1))
    chances = np.exp(rows * np.log1p(-1 / groups) + np.concatenate([[0.0], np.cumsum(ratios)]))
    found = np.searchsorted(np.cumsum(chances), (np.arange(groups)[::-1] + 0.5) / groups)
    return tuple(int(x) for x in found if x)


def uneven_sizes(rows: int, groups: int, spread: float) -> tuple[int, ...]:
    """Rows of the groups that have some, the largest first: quantiles of a lognormal distribution. spread: the standard
    deviation of the logarithms."""
    normal = statistics.NormalDist()
    shares = np.exp([spread * normal.inv_cdf(1 - (i + 0.5) / groups) for i in range(groups)])
    ends = np.rint(np.cumsum(shares) / shares.sum() * rows).astype(int)
    return tuple(int(x) for x in sorted(np.diff(ends, prepend=0), reverse=True) if x)


def too_many_groups(groups: int) -> str:
    """Why one launch cannot run so many groups, or an empty string."""
    if groups <= MAX_GROUPS:
        return ""
    return explain("groups that have rows", got=groups, expected=f"at most {MAX_GROUPS} in one launch")


def can_run_grouped(problem: GroupedProblem) -> str:
    """Why no configuration can run ``problem``, or an empty string."""
    if reason := too_many_groups(problem.stack or len(problem.sizes)):
        return reason
    tiles = sum(-(-m // CTA_ROWS) * -(-n // TILE_N[0]) for m, n, _ in problem.sizes) + problem.stack
    if tiles > INT32_MAX:
        return explain("tiles of all groups", got=tiles, expected=f"at most {INT32_MAX}")
    return ""


def work_tiles(config: GemmConfig, m: int, n: int) -> int:
    """Work tiles, each of a cluster, that cover (m, n) of the kernel."""
    cm, cn = config.cluster
    return -(-m // (CTA_ROWS * cm)) * -(-n // (config.tile_n * cn))


def workers_of(problem: GroupedProblem, config: GemmConfig, swap: bool, sm_count: int) -> int:
    """Clusters to launch: those that run at once, or as many as there can be tiles."""
    sizes = [(n, m) if swap else (m, n) for m, n, _ in problem.sizes]
    tiles = sum(work_tiles(config, m, n) for m, n in sizes)
    if problem.stack:
        # a group begun in each tile of rows: one more of its other side's tiles for each
        tiles += (problem.stack - 1) * work_tiles(config, *((sizes[0][0], 1) if swap else (1, sizes[0][1])))
    return max(1, min(tiles, concurrent_clusters(config.cluster_size, sm_count)))


@functools.lru_cache(maxsize=1024)
def choose_grouped(problem: GroupedProblem, arch: Architecture, sm_count: int) -> Plan:
    """The plan that the clock decided for these very groups (``clocked``), or that of the shortest modelled time.

    Raises:
        OperandError: the problem is beyond the kernel's limits.
    """
    reason = can_run_grouped(problem)
    if reason:
        raise OperandError(reason)
    found = None if problem.stack else clocked.lookup(problem, problem.sizes, arch, sm_count, grouped=True)
    if found is not None:
        config = problem.config(arch, found.swap, **found.tiling)
        return Plan(config, found.swap, workers_of(problem, config, found.swap, sm_count))
    plans = candidates(problem, arch, sm_count)
    if not plans:
        # an architecture or a format that no tiling can run says so itself
        why = can_implement_grouped(problem.config(arch, False, tile_n=TILE_N[0]))
        none = explain("plans for these groups", got=f"none on {sm_count} multiprocessors", expected="one")
        raise OperandError(why or none)
    return plans[0]


def candidates(problem: GroupedProblem, arch: Architecture, sm_count: int) -> list[Plan]:
    """Every plan that a kernel can run, the model's fastest first."""
    plans = [plan for plan in _candidates(problem, arch, sm_count) if not can_implement_grouped(plan.config)]
    return sorted(plans, key=lambda plan: (round(modelled_us(plan, problem, sm_count), 2), plan.config.cluster_size))


@remembered
def plan_for_groups(problem: GroupedProblem, arch: Architecture, sm_count: int, given: Plan | None = None) -> Plan:
    """``choose_grouped``, or the caller's plan with all that the problems decide filled in.

    Raises:
        OperandError, OperandTypeError: the problems are beyond the kernel's limits, or the plan cannot run them.
    """
    if given is None:
        return choose_grouped(problem, arch, sm_count)
    tiling = plan_tiling(given) | {"store": "direct"}
    # maps in a workspace serve few groups too
    maps = "workspace" if given.config.maps == "workspace" and not problem.stack else ""
    plan = replace(given, config=problem.config(arch, given.swap, maps, **tiling))
    smallest_k = min(k for _, _, k in problem.sizes)
    reason = can_run_grouped(problem) or can_implement_grouped(plan.config) or can_distribute(plan, smallest_k)
    if reason:
        raise OperandError(reason)
    return plan


def _candidates(problem: GroupedProblem, arch: Architecture, sm_count: int) -> Iterator[Plan]:
    least_k = min(k for _, _, k in problem.expected)
    several = arch.generation != "sm120"  # CTAs that share operands or K
    for swap in (False, True):
        for pair in (False, True) if several else (False,):
            ctas = 2 if pair else 1
            columns = max(m if swap else n for m, n, _ in problem.expected)
            for tile_n in TILE_N if several else SM120_TILE_N:
                if tile_n < TILE_N[0] and tile_n < columns:
                    continue  # narrow tiles are for few columns
                for split in SPLITS if several else (1,):
                    tiling = {"tile_n": tile_n, "pair": pair, "cluster": (ctas, 1), "split_k": split}
                    config = problem.config(arch, swap, **tiling)
                    if split > -(-least_k // config.tile_k) or not concurrent_clusters(config.cluster_size, sm_count):
                        continue
                    yield Plan(config, swap, workers_of(problem, config, swap, sm_count))


def modelled_us(plan: Plan, problem: GroupedProblem, sm_count: int) -> float:
    """The time of ``gemm_model`` for one GEMM with the k-tiles, work tiles and bytes of this one's busiest cluster."""
    config = plan.config
    workers = plan.workers
    steps, tiles = np.zeros(workers, np.int64), np.zeros(workers, np.int64)
    num_bytes, first = 0.0, 0
    for m, n, k in problem.expected:
        m, n = (n, m) if plan.swap else (m, n)
        num_bytes += traffic(config, m, n, k, 1, workers * config.cluster_size)
        each, rest = divmod(work_tiles(config, m, n), workers)
        shares = np.full(workers, each)
        shares[(first + np.arange(rest)) % workers] += 1
        steps += shares * -(-k // config.tile_k)
        tiles += shares
        first = (first + rest) % workers
    waves = int(tiles.max())
    rows = CTA_ROWS * config.cluster[0] * workers * waves
    k = -(-int(steps.max()) // waves) * config.tile_k
    model = sm120_model if config.arch.generation == "sm120" else gemm_model
    return model.predict(config, rows, config.tile_n, k, 1, workers, sm_count, dram_bytes=num_bytes).us
