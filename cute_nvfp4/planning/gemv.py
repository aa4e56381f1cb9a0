"""Chooses the variant of the GEMV kernel for a problem, and its number of CTAs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ..errors import OperandError, explain
from ..kernels.gemv.config import SLICE_SCALE_BYTES, TILE_ROWS, GemvConfig, count_tiles
from ..kernels.gemv.dot import SLICE_K, dot_engine
from ..scale_layout import ATOM_ROWS
from ..target import Architecture

# The most tiles of a CTA: more would need shared memory for their sums, and gain nothing.
MAX_TILES = 16
# The elements of b that are held at once. A longer K is walked in chunks of this size, with a barrier between them.
MAX_CAPACITY = 16384
# The warps of a CTA: first that of a CTA which has an SM of sm_100a to itself, where the clock finds one warp a tile to
# be the fastest (benchmarks/records/gemv.md), then others. A change of tile costs a warp _TILE_COST slices.
_MOST_WARPS, _WARPS = 32, 16
_TILE_COST = 0.3
# CTAs of a cluster that may share tiles along K, and the part of the work that this must save
_CLUSTER, _CLUSTER_GAIN = 2, 0.05
# the part of the clusters that is enough, if all of these have the same number of tiles
_EVEN = 15 / 16
_POWERS = (1, 2, 4, 8, 16, 32)
_MAX_BATCH = 65535
_INT32_MAX = 2**31 - 1
# the fields of a configuration that a plan decides, and those that the operands decide; the rest follows
_TILING = (
    "warps_m",
    "warps_k",
    "tiles",
    "stages",
    "shared_stages",
    "k",
    "capacity",
    "chunked",
    "min_blocks",
    "cluster",
    "dot",
)
_OPERAND_FIELDS = ("a_scale", "b_scale", "scale_word", "a_global", "b_global", "out")


@dataclass(frozen=True)
class GemvProblem:
    """The facts that decide the choice: sizes, and how the operands lie in memory.

    alignment: the power of two that divides the addresses of A's rows. a_scale, b_scale: "blocked" or "rowmajor".
    scale_word: whether row-major scales of A are aligned to four bytes. out: the name of the output's dtype.
    """

    m: int
    k: int
    batch: int
    alignment: int = 32
    a_scale: str = "blocked"
    b_scale: str = "blocked"
    scale_word: bool = True
    a_global: bool = False
    b_global: bool = False
    out: str = "float16"

    def config(self, arch: Architecture, **tiling: Any) -> GemvConfig:
        """The variant of the kernel for this problem with this tiling."""
        ragged = self.m % ATOM_ROWS != 0 or self.k % SLICE_K != 0
        operands = {name: getattr(self, name) for name in _OPERAND_FIELDS}
        width = min(arch.vector_bytes, self.alignment, 32)
        return GemvConfig(arch=arch, vector_bytes=width, ragged=ragged, **operands, **tiling)


@dataclass(frozen=True)
class GemvPlan:
    """A way to run a problem: a variant of the kernel, and the CTAs for each matrix of the batch, in whole clusters."""

    config: GemvConfig
    ctas: int


def can_implement(problem: GemvProblem) -> str:
    """Why no variant of the kernel can run ``problem``, or an empty string."""
    if problem.batch > _MAX_BATCH:
        return explain("batch", got=problem.batch, expected=f"at most {_MAX_BATCH} (the grid's second dimension)")
    scales = -(-problem.m // ATOM_ROWS) * ATOM_ROWS * -(-problem.k // 64) * 4
    if scales > _INT32_MAX:
        return explain("scales of one matrix of A", got=f"{scales} bytes", expected=f"at most {_INT32_MAX}")
    return ""


def _split(tiles: int, slices: int, warps: int) -> int:
    """The number of warps that share a tile along K so that the busiest of a CTA's ``warps`` has the least to do.

    Work is counted in slices, and each tile adds ``_TILE_COST``. Measured on an H200, one warp along K (128 bytes of a
    row at a time) is slower than two or more, which hardly differ.
    """
    most = min(slices, warps, MAX_CAPACITY // SLICE_K)
    candidates = [1 << i for i in range(1 if most > 1 else 0, most.bit_length())]
    return min(candidates, key=lambda wk: -(-tiles * wk // warps) * (-(-slices // wk) + _TILE_COST))


def _cluster(tiles: int, slices: int, ctas: int) -> int:
    """The number of CTAs in a cluster: several if the busiest CTA then has clearly less to do."""

    def work(size: int) -> int:
        return -(-tiles // (ctas // size)) * -(-slices // size)

    fits = ctas >= _CLUSTER and slices >= 2 * _CLUSTER and -(-tiles // (ctas // _CLUSTER)) <= MAX_TILES
    return _CLUSTER if fits and work(_CLUSTER) < (1 - _CLUSTER_GAIN) * work(1) else 1


@functools.lru_cache(maxsize=1024)
def choose(problem: GemvProblem, arch: Architecture, sm_count: int) -> GemvPlan:
    """The plan for ``problem`` on ``sm_count`` multiprocessors of ``arch``.

    It has as many CTAs as fit on the device at once: one a multiprocessor with stages in shared memory; two with stages
    in registers on sm_120a, which has less shared memory. Each has an equal share of the tiles, at most ``MAX_TILES``.
    So no wave of CTAs is half empty, and a multiprocessor decodes b once or twice.

    Raises:
        OperandError: the problem is beyond the kernel's limits.
    """
    reason = can_implement(problem)
    if reason:
        raise OperandError(reason)
    tiles = count_tiles(problem.m)
    registers, many = arch.generation == "sm120", arch.generation == "sm100"
    resident = 2 if registers else 1
    ctas = min(max(1, resident * sm_count // problem.batch, -(-tiles // MAX_TILES)), tiles)
    slices = -(-problem.k // SLICE_K)
    cluster = 1 if registers else _cluster(tiles, slices, ctas)
    clusters = ctas // cluster
    cta_tiles = -(-tiles // clusters)
    # e.g. of 66 pairs for 448 tiles some have six instead of seven and end early, which helps nobody: 64 suffice
    even = -(-tiles // cta_tiles)
    if not registers and even >= _EVEN * clusters:
        clusters = even
    ctas = clusters * cluster
    cta_slices = -(-slices // cluster)
    # the last CTA of a cluster may have fewer
    warps = _MOST_WARPS if many else _WARPS
    warps_k = _split(cta_tiles, slices - (cluster - 1) * cta_slices, warps)
    warps_m = warps // warps_k
    # few sizes of capacity keep the variants few; K itself is compiled in if the layout of rows is plain
    capacity = min(MAX_CAPACITY, SLICE_K << (cta_slices - 1).bit_length())
    # with a ragged problem ptxas spills 8 bytes at 64 registers, but not inside the loop over chunks, even of one chunk
    ragged = problem.m % ATOM_ROWS != 0 or problem.k % SLICE_K != 0
    config = problem.config(
        arch,
        warps_m=min(warps_m, cta_tiles) if many else warps_m,
        warps_k=warps_k,
        tiles=min(MAX_TILES, 1 << (cta_tiles - 1).bit_length()),
        stages=1 if registers else 2 if many else 3,
        shared_stages=not registers,
        capacity=capacity,
        chunked=cta_slices * SLICE_K > capacity or (registers and ragged),
        min_blocks=resident,
        cluster=cluster,
    )
    assert resident * shared_bytes(config) <= arch.shared_bytes
    return GemvPlan(config, ctas)


def fitted(plan: GemvPlan, problem: GemvProblem, arch: Architecture) -> GemvPlan:
    """``plan`` for this problem: its tiling stays, and the operands decide the rest.

    Raises:
        OperandError: the tiling cannot run the problem, or exceeds the architecture.
    """
    config = problem.config(arch, **{name: getattr(plan.config, name) for name in _TILING})
    slices, size = -(-problem.k // SLICE_K), config.cluster
    each = -(-slices // size)  # slices of a CTA; the last CTA has the rest
    last = min(slices - (size - 1) * each, config.capacity_slices)
    tiles, clusters, least = count_tiles(problem.m), plan.ctas // size, 2 if config.shared_stages else 1
    for fits, what, got, expected in (
        (config.k in (0, problem.k), "k", config.k, f"0 or K, {problem.k}"),
        (
            config.chunked or config.capacity >= each * SLICE_K,
            "capacity",
            config.capacity,
            f"K {problem.k}, or chunked",
        ),
        (size in _POWERS[:4] and last >= 1, "cluster", size, f"1, 2, 4 or 8, each with slices of {slices}"),
        (config.warps_k in _POWERS and config.warps_k <= last, "warps_k", config.warps_k, f"1, 2, 4 … {last}"),
        (1 <= config.warps <= 32, "warps", config.warps, "1 to 32"),
        (config.stages >= least, "stages", config.stages, f"at least {least}"),
        (plan.ctas % size == 0 and 1 <= clusters <= tiles, "CTAs", plan.ctas, f"clusters of {size}, 1 to {tiles}"),
        (clusters * config.tiles >= tiles, "tiles", config.tiles, f"at least {-(-tiles // max(clusters, 1))} a CTA"),
        (shared_bytes(config) <= arch.shared_bytes, "shared memory", shared_bytes(config), arch.shared_bytes),
    ):
        if not fits:
            raise OperandError.of(f"{what} of the plan", got=got, expected=expected)
    return GemvPlan(config, plan.ctas)


def shared_bytes(config: GemvConfig) -> int:
    """Bytes of shared memory of a CTA: b and its scales, constants, sums, the cluster's sums, and the warps' rings."""
    engine = dot_engine(config.arch, config.dot)
    b = config.capacity_slices * (engine.slice_bytes + SLICE_SCALE_BYTES)
    # (LANES, ROW_OF_LANE, WARPS_K, TILES) in fp32; the last kilobyte is for the alignment of these arrays
    sums = 32 * 2 * config.warps_k * config.tiles * 4
    remote = TILE_ROWS * config.tiles * (config.cluster - 1) * 4
    ring = config.threads // 32 * config.stages * config.stage_bytes if config.shared_stages else 0
    return b + 4 * max(engine.constant_words, 1) + sums + remote + ring + 1024
