"""Which kernel runs a GEMM: the user's table of measured winners first, then the best candidate of the model."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ..errors import OperandError, explain
from ..rates import L2_BYTES, concurrent_clusters
from ..target import Architecture
from . import gemm_table
from .core.config import CTA_ROWS, MAX_CLUSTER, MIN_PIECE, SPLITS, TILE_N, can_implement
from .gemm_model import Prediction, has_room, predict
from .gemm_problem import GemmProblem, Plan, can_run

__all__ = ["GemmProblem", "Plan", "can_run", "candidates", "choose", "predict_plan", "ranked"]

_CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4))
_PAIR_CLUSTERS = ((2, 1), (4, 1), (2, 2), (4, 2), (2, 4))
_MIN_SHARE = 4
"""Steps along K that a CTA must have at least where equal shares are dealt: less is not worth its partial sums."""


def predict_plan(plan: Plan, problem: GemmProblem, sm_count: int, **counted: float) -> Prediction:
    """The modelled time of ``plan``; ``counted`` is passed on to ``gemm_model.predict``."""
    m, n = problem.kernel_mn(plan.swap)
    return predict(plan.config, m, n, problem.k, problem.batch, plan.workers, sm_count, **counted)


@functools.lru_cache(maxsize=1024)
def _choose(problem: GemmProblem, arch: Architecture, sm_count: int, device: str, stamp: object) -> Plan:
    # ``stamp`` names the state of the table's file, so that a changed table is read again
    found = gemm_table.lookup(problem, arch, sm_count, device)
    if found is not None:
        return found
    for _, plan in _ranked(problem, arch, sm_count):
        if not can_implement(plan.config):
            return plan
    raise OperandError(_no_plan(problem, arch, sm_count))


def choose(problem: GemmProblem, arch: Architecture, sm_count: int, device: str = "") -> Plan:
    """The plan for ``problem`` on ``sm_count`` multiprocessors of ``arch``.

    An entry of the user's table for this problem, architecture and number of multiprocessors wins (``gemm_table``;
    ``device``, a GPU's name, restricts it to entries made on such a GPU). Otherwise the model's fastest candidate.

    Raises:
        OperandError: the problem is beyond the kernels' limits.
        TableError: the user's table cannot be read.
    """
    refuse(problem, arch)
    return _choose(problem, arch, sm_count, device, gemm_table.stamp())


def refuse(problem: GemmProblem, arch: Architecture) -> None:
    """Raises for a problem that no kernel runs, whatever its configuration."""
    reason = can_run(problem)
    if reason:
        raise OperandError(reason)
    # architecture, formats and dtypes do not depend on the tiling
    reason = can_implement(problem.config(arch, False, tile_n=64))
    if reason:
        raise OperandError(reason)


def candidates(problem: GemmProblem, arch: Architecture, sm_count: int) -> list[Plan]:
    """Every sensible plan, the model's fastest first; ``core.config.can_implement`` accepts the configuration of each.

    Left out are plans that can only lose: tiles wider than the problem, clusters larger than its tiles, splits of K
    into more parts than there are steps or than fit on the device, 2-SM MMA for 128 rows.
    """
    refuse(problem, arch)
    return [plan for _, plan in ranked(problem, arch, sm_count)]


def ranked(problem: GemmProblem, arch: Architecture, sm_count: int) -> list[tuple[Prediction, Plan]]:
    """``candidates`` with their modelled times."""
    return [(p, plan) for p, plan in _ranked(problem, arch, sm_count) if not can_implement(plan.config)]


def _ranked(problem: GemmProblem, arch: Architecture, sm_count: int) -> list[tuple[Prediction, Plan]]:
    timed = [
        (predict_plan(plan, problem, sm_count), plan)
        for plan in _plans(problem, arch, sm_count)
        if has_room(plan.config)
    ]
    return sorted(timed, key=_order)


def _order(timed: tuple[Prediction, Plan]) -> tuple:
    """Fastest first; of equals (to 10 ns) the one that asks less of memory, then of the device, then of the host."""
    p, plan = timed
    return round(p.us, 2), round(p.l2_us + p.latency_us, 1), plan.config.cluster_size, plan.swap


def _plans(problem: GemmProblem, arch: Architecture, sm_count: int) -> Iterator[Plan]:
    # two matrices B share one A, so A and B cannot change places
    for swap in (False, True) if problem.products == 1 else (False,):
        m, n = problem.kernel_mn(swap)
        for pair in (False, True) if m > CTA_ROWS else (False,):
            for tile_n in TILE_N:
                # a tile that is wider than need be: the next narrower covers all columns
                if tile_n > TILE_N[0] and tile_n - 64 >= n:
                    continue
                yield from _tilings(problem, arch, sm_count, swap, pair, tile_n)


def _tilings(
    problem: GemmProblem, arch: Architecture, sm_count: int, swap: bool, pair: bool, tile_n: int
) -> Iterator[Plan]:
    """Plans with one shape of tile: clusters that share loads, splits of K in a cluster, equal shares of K."""
    m, n = problem.kernel_mn(swap)
    ctas = 2 if pair else 1
    base = problem.config(arch, swap, tile_n=tile_n, pair=pair, cluster=(ctas, 1))
    k_steps = -(-problem.k // base.tile_k)
    rows, columns = -(-m // CTA_ROWS), -(-n // tile_n)
    tiles = -(-rows // ctas) * columns * problem.batch
    fit = concurrent_clusters(ctas, sm_count)
    if fit == 0:
        return

    def plan(units: int, size: int, **tiling: object) -> Plan:
        config = problem.config(arch, swap, tile_n=tile_n, pair=pair, **tiling)
        return Plan(config, swap, min(concurrent_clusters(size, sm_count), units))

    rasters = ("m", "n") if (m + n) * problem.k / 2 > L2_BYTES else ("m",)
    shared = _PAIR_CLUSTERS if pair else _CLUSTERS
    for cluster_m, cluster_n in shared:
        least = (cluster_m, cluster_n) == (ctas, 1)
        # multicast spares L2, which only a device full of tiles can exhaust
        if cluster_m > max(rows, ctas) or cluster_n > columns or (not least and tiles < fit):
            continue
        size = cluster_m * cluster_n
        if concurrent_clusters(size, sm_count):
            units = -(-rows // cluster_m) * -(-columns // cluster_n) * problem.batch
            for raster in rasters:
                yield plan(units, size, cluster=(cluster_m, cluster_n), raster=raster)
    for split in SPLITS[1:]:
        size = ctas * split
        if split > k_steps or size > MAX_CLUSTER or tile_n // split < MIN_PIECE:
            continue
        if tiles <= concurrent_clusters(size, sm_count):
            yield plan(tiles, size, cluster=(ctas, 1), split_k=split)
    if tiles % fit and k_steps >= 2 * _MIN_SHARE:
        workers = min(fit, tiles * k_steps // _MIN_SHARE)
        yield plan(workers, ctas, cluster=(ctas, 1), scheduler="stream_k")


def _no_plan(problem: GemmProblem, arch: Architecture, sm_count: int) -> str:
    return explain(
        f"plans for {problem.m} x {problem.n} x {problem.k} on {arch.name}",
        got=f"none on {sm_count} multiprocessors",
        expected="at least one",
    )
