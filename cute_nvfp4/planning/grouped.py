"""Chooses the plan of a grouped GEMM by the GEMM's model: the tile shape, and whether A and B are swapped.

All groups share one plan. A candidate's work is distributed as the scheduler does it; ``gemm_model.predict`` then gets
the k-tiles of the busiest cluster and the bytes of all groups, as if they were one GEMM's.
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
    """The facts that decide the choice, with the signature of all groups.

    sizes: (m, n, k) of each group that has rows. stack: 0, or the number of groups of the contiguous form, where
    offsets distribute the rows; ``sizes`` is then one problem of all rows.
    """

    sizes: tuple[tuple[int, int, int], ...]
    stack: int = 0

    @property
    def maps(self) -> str:
        if self.stack:
            return "shared"
        return "parameters" if len(self.sizes) <= PARAMETER_GROUPS else "workspace"

    def config(self, arch: Architecture, swap: bool, maps: str = "", **tiling: Any) -> GroupedConfig:
        """The configuration with this tiling. maps: the kind of maps; "": the default for so many groups."""
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
    """Sizes (m, n, k) to plan for: if offsets distribute the rows to ``stack`` groups, equal shares."""
    if not stack:
        return sizes
    ((m, n, k),) = sizes
    groups = min(stack, m)
    each, rest = divmod(m, groups)
    return tuple((each + (i < rest), n, k) for i in range(groups))


def random_sizes(rows: int, groups: int) -> tuple[int, ...]:
    """Row counts of the groups that have rows, largest first, if each of ``rows`` rows picks one of ``groups``.

    They are quantiles of the binomial distribution.
    """
    if groups == 1:
        return (rows,)
    mean = rows / groups
    counts = np.arange(1, min(rows, math.ceil(mean + 10 * mean**0.5 + 20)) + 1)
    # logarithms of the probabilities of 0, 1, … rows, each from the one before
    ratios = np.log((rows + 1 - counts) / counts / (groups - 1))
    chances = np.exp(rows * np.log1p(-1 / groups) + np.concatenate([[0.0], np.cumsum(ratios)]))
    found = np.searchsorted(np.cumsum(chances), (np.arange(groups)[::-1] + 0.5) / groups)
    return tuple(int(x) for x in found if x)


def uneven_sizes(rows: int, groups: int, spread: float) -> tuple[int, ...]:
    """Row counts of the groups that have rows, largest first: quantiles of a lognormal distribution.

    spread: the standard deviation of the logarithms.
    """
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
    """The number of work tiles, each of a cluster, that cover the kernel's (m, n)."""
    cm, cn = config.cluster
    return -(-m // (CTA_ROWS * cm)) * -(-n // (config.tile_n * cn))


def workers_of(problem: GroupedProblem, config: GemmConfig, swap: bool, sm_count: int) -> int:
    """The number of clusters to launch: those that run at once, or as many as there can be tiles."""
    sizes = [(n, m) if swap else (m, n) for m, n, _ in problem.sizes]
    tiles = sum(work_tiles(config, m, n) for m, n in sizes)
    if problem.stack:
        # each further group may begin inside a row of tiles, and so add another one
        tiles += (problem.stack - 1) * work_tiles(config, *((sizes[0][0], 1) if swap else (1, sizes[0][1])))
    return max(1, min(tiles, concurrent_clusters(config.cluster_size, sm_count)))


@functools.lru_cache(maxsize=1024)
def choose_grouped(problem: GroupedProblem, arch: Architecture, sm_count: int) -> Plan:
    """The plan that the clock decided for exactly these groups (``clocked``), or that of the shortest modelled time.

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
        # if no tiling runs the architecture or the format, the reason says so
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
    """``choose_grouped``, or the caller's plan with what the problems decide filled in.

    Raises:
        OperandError, OperandTypeError: the problems are beyond the kernel's limits, or the plan cannot run them.
    """
    if given is None:
        return choose_grouped(problem, arch, sm_count)
    tiling = plan_tiling(given) | {"store": "direct"}
    # maps in a workspace are possible for few groups, too
    maps = "workspace" if given.config.maps == "workspace" and not problem.stack else ""
    plan = replace(given, config=problem.config(arch, given.swap, maps, **tiling))
    smallest_k = min(k for _, _, k in problem.sizes)
    reason = can_run_grouped(problem) or can_implement_grouped(plan.config) or can_distribute(plan, smallest_k)
    if reason:
        raise OperandError(reason)
    return plan


def _candidates(problem: GroupedProblem, arch: Architecture, sm_count: int) -> Iterator[Plan]:
    least_k = min(k for _, _, k in problem.expected)
    several = arch.generation != "sm120"  # whether CTAs can share operands or K
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
    """The time of one GEMM by ``gemm_model``, with the k-tiles, work tiles and bytes of the busiest cluster here."""
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
