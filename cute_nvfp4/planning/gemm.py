"""Chooses the plan of a GEMM: from the user's table of measured winners, else from the package's table of plans that
the clock decided, else the best candidate of the model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..errors import OperandError, explain
from ..kernels.gemm.config import (
    CTA_ROWS,
    MAX_CLUSTER,
    MIN_EPI_TILE_N,
    QUANTIZED,
    SM120_TILE_N,
    SPLITS,
    TILE_N,
)
from ..kernels.gemm.limits import can_implement
from ..runtime.bounded import remembered
from ..target import Architecture
from . import clocked, gemm_model, gemm_table, sm120_model
from .gemm_model import Prediction
from .gemm_problem import GemmProblem, Plan, can_count, can_distribute, can_run, plan_tiling
from .rates import L2_BYTES, concurrent_clusters

__all__ = ["GemmProblem", "Plan", "can_run", "candidates", "choose", "plan_for", "predict_plan", "ranked"]

_CLUSTERS = ((2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4))
_PAIR_CLUSTERS = ((4, 1), (2, 2), (4, 2), (2, 4))
_MODELS = {"sm100": gemm_model, "sm120": sm120_model}
_TILE_N = {"sm100": TILE_N, "sm120": SM120_TILE_N}
_MIN_SHARE = 4
"""The least k-tiles of a CTA if K is cut in equal shares: fewer are not worth their partial sums."""


def predict_plan(plan: Plan, problem: GemmProblem, sm_count: int, **counted: float) -> Prediction:
    """The modelled time of ``plan``; ``counted`` is passed on to ``predict`` of the architecture's model."""
    m, n = problem.kernel_mn(plan.swap)
    return _MODELS[plan.config.arch.generation].predict(
        plan.config, m, n, problem.k, problem.batch, plan.workers, sm_count, **counted
    )


@functools.lru_cache(maxsize=1024)
def _choose(problem: GemmProblem, arch: Architecture, sm_count: int, device: str, stamp: object) -> Plan:
    # ``stamp`` identifies the state of the table's file, so that a changed table is read again
    refuse(problem, arch)
    found = gemm_table.lookup(problem, arch, sm_count, device)
    if found is not None:
        return found
    sizes = ((problem.m, problem.n, problem.k),)
    if problem.batch == 1 and (clocked_plan := clocked.lookup(problem, sizes, arch, sm_count, grouped=False)):
        return plan_with(problem, arch, sm_count, clocked_plan.swap, clocked_plan.tiling)
    for _, plan in _ranked(problem, arch, sm_count, every=False):
        if not can_implement(plan.config):
            return plan
    raise OperandError.of(
        f"plans for {problem.m} x {problem.n} x {problem.k} on {arch.name}",
        got=f"none on {sm_count} multiprocessors",
        expected="at least one",
    )


def choose(problem: GemmProblem, arch: Architecture, sm_count: int, device: str = "") -> Plan:
    """The plan for ``problem`` on ``sm_count`` multiprocessors of ``arch``.

    An entry of the user's table for this problem, architecture and number of multiprocessors wins (``gemm_table``;
    ``device``, a GPU's name, restricts it to entries made on such a GPU). Next comes the package's table of plans that
    the simulator's clock decided (``clocked``), and then the model's fastest candidate.

    Raises:
        OperandError: the problem is beyond the kernels' limits.
        TableError: the user's table cannot be read.
    """
    return _choose(problem, arch, sm_count, device, gemm_table.stamp())


@remembered
def plan_for(problem: GemmProblem, arch: Architecture, sm_count: int, given: Plan | None = None) -> Plan:
    """``choose``, or the caller's plan with what the problem decides filled in: formats, output, bias.

    Raises:
        OperandError, OperandTypeError: the problem is beyond the kernels' limits, or the plan cannot run it.
    """
    if given is None:
        return choose(problem, arch, sm_count)
    tiling = plan_tiling(given)
    if tiling["store"] == "tma":
        del tiling["store"]  # the problem decides whether TMA can store
    plan = replace(given, config=problem.config(arch, given.swap, **tiling))
    reason = (
        can_run(problem) or can_implement(plan.config) or can_distribute(plan, problem.k) or can_count(plan, problem)
    )
    ctas = plan.workers * plan.config.ctas
    # a cluster waits for later ones, so all must be on the device at the same time
    if not reason and plan.config.scheduler == "stream_k" and ctas > sm_count:
        reason = explain("CTAs of a stream_k launch", got=ctas, expected=f"at most {sm_count} (one an SM)")
    if reason:
        raise OperandError(reason)
    return plan


def plan_with(problem: GemmProblem, arch: Architecture, sm_count: int, swap: bool, tiling: dict[str, Any]) -> Plan:
    """The plan with a static ``tiling``; it has as many clusters as run at once, or as there are tiles if fewer."""
    config = problem.config(arch, swap, **tiling)
    (m, n), (cm, cn) = problem.kernel_mn(swap), config.cluster
    tiles = -(-m // (CTA_ROWS * cm)) * -(-n // (config.tile_n * cn)) * problem.batch
    return Plan(config, swap, min(tiles, concurrent_clusters(config.cluster_size, sm_count)))


def refuse(problem: GemmProblem, arch: Architecture) -> None:
    """Raises OperandError for a problem that no kernel runs, whatever its configuration."""
    # architecture, formats and dtypes do not depend on the tiling
    reason = can_run(problem) or can_implement(problem.config(arch, False, tile_n=TILE_N[0]))
    if reason:
        raise OperandError(reason)


def candidates(problem: GemmProblem, arch: Architecture, sm_count: int) -> list[Plan]:
    """Every sensible plan, the model's fastest first; ``can_implement`` accepts the configuration of each.

    Plans that can only lose are left out: tiles wider than the problem, clusters larger than its tiles, splits of K
    into more parts than there are k-tiles or than fit on the device, 2-SM MMA for 128 rows.
    """
    return [plan for _, plan in ranked(problem, arch, sm_count)]


def ranked(problem: GemmProblem, arch: Architecture, sm_count: int) -> list[tuple[Prediction, Plan]]:
    """``candidates`` with their modelled times."""
    refuse(problem, arch)
    return [(p, plan) for p, plan in _ranked(problem, arch, sm_count, every=True) if not can_implement(plan.config)]


def _ranked(problem: GemmProblem, arch: Architecture, sm_count: int, every: bool) -> list[tuple[Prediction, Plan]]:
    timed = []
    for swap in (False, True):
        m, n = problem.kernel_mn(swap)
        for pair in (False, True) if m > CTA_ROWS and arch.generation == "sm100" else (False,):
            widths = _widths(problem, arch)
            for tile_n, narrower in zip(widths, (0, *widths)):
                # skip a tile if the next narrower one covers all columns, and one below 64 unless it covers them
                if narrower < n and (tile_n >= TILE_N[0] or n <= tile_n):
                    timed += _Tile(problem, arch, sm_count, swap, pair, tile_n).plans(every)
    return sorted(timed, key=_order)


def _widths(problem: GemmProblem, arch: Architecture) -> tuple[int, ...]:
    """The widths of tiles to try. On sm_120a a thread has a quarter of a tile below 64, and quantizes whole blocks."""
    widths = _TILE_N[arch.generation]
    return tuple(x for x in widths if x >= TILE_N[0]) if problem.out == QUANTIZED else widths


def _order(timed: tuple[Prediction, Plan]) -> tuple:
    """The sort key of a plan: time (to 10 ns), then cluster size, then load on memory, then no swap."""
    p, plan = timed
    return round(p.us, 2), plan.config.cluster_size, round(p.l2_us + p.latency_us, 1), plan.swap


class _Tile:
    """The plans with one shape of tile: plain, with clusters that share loads, with K split in a cluster, with K in
    equal shares."""

    def __init__(
        self, problem: GemmProblem, arch: Architecture, sm_count: int, swap: bool, pair: bool, tile_n: int
    ) -> None:
        self.problem, self.arch, self.sm_count, self.swap = problem, arch, sm_count, swap
        self.tiling = {"tile_n": tile_n, "pair": pair}
        self.tile_n, self.ctas = tile_n, 2 if pair else 1
        m, n = problem.kernel_mn(swap)
        self.rows, self.columns = -(-m // CTA_ROWS), -(-n // tile_n)
        self.tiles = -(-self.rows // self.ctas) * self.columns * problem.batch
        self.k_tiles = -(-problem.k // problem.kind.tile_k)

    def plan(self, work_tiles: int, cluster: tuple[int, int], **tiling: object) -> tuple[Prediction, Plan] | None:
        """The plan on as many clusters as fit, but at most ``work_tiles``; None if it has no room."""
        config = self.problem.config(self.arch, self.swap, cluster=cluster, **self.tiling, **tiling)
        fit = concurrent_clusters(config.cluster_size, self.sm_count)
        if fit == 0 or not _MODELS[config.arch.generation].has_room(config):
            return None
        plan = Plan(config, self.swap, min(fit, work_tiles))
        return predict_plan(plan, self.problem, self.sm_count), plan

    def plans(self, every: bool) -> Iterator[tuple[Prediction, Plan]]:
        """All plans. every: includes clusters that share loads even if L2 does not bound the plain plan."""
        least = (self.ctas, 1)
        fit = concurrent_clusters(self.ctas, self.sm_count)
        p = self.problem
        rasters = ("m", "n") if (p.m + p.n) * p.k / 2 > L2_BYTES else ("m",)
        found = [self.plan(self.tiles, least, raster=raster) for raster in rasters]
        yield from filter(None, found)
        if self.arch.generation == "sm100":
            yield from self._several(least, rasters, fit, every, found)
        if fit and self.tiles % fit and self.k_tiles >= 2 * _MIN_SHARE:
            shares = self.tiles * self.k_tiles // _MIN_SHARE
            yield from filter(None, [self.plan(shares, least, scheduler="stream_k")])

    def _several(
        self, least: tuple[int, int], rasters: tuple[str, ...], fit: int, every: bool, found: list
    ) -> Iterator[tuple[Prediction, Plan]]:
        """Plans with clusters of CTAs that share loads, or a tile along K. found: the plain plans."""
        if self.tiles >= fit and (every or any(x and x[0].l2_us >= x[0].mainloop_us for x in found)):
            yield from filter(None, self._sharing(rasters))
        for split in SPLITS[1:]:
            size = self.ctas * split
            if split <= self.k_tiles and size <= MAX_CLUSTER and self.tile_n // split >= MIN_EPI_TILE_N:
                # only if all tiles run at once: K is split to fill the device, which more tiles do better
                if self.tiles <= concurrent_clusters(size, self.sm_count):
                    yield from filter(None, [self.plan(self.tiles, least, split_k=split)])

    def _sharing(self, rasters: tuple[str, ...]) -> Iterator[tuple[Prediction, Plan] | None]:
        for m, n in _PAIR_CLUSTERS if self.ctas == 2 else _CLUSTERS:
            if m <= max(self.rows, self.ctas) and n <= self.columns:
                work_tiles = -(-self.rows // m) * -(-self.columns // n) * self.problem.batch
                for raster in rasters:
                    yield self.plan(work_tiles, (m, n), raster=raster)
