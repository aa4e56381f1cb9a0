"""Says which requests the quantization kernels accept, and chooses the variant and the number of CTAs for each."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import OperandError, explain
from ..formats import Format
from ..kernels.quantize.arguments import Chunks, Walk
from ..kernels.quantize.config import ITEM_BYTES, ROW_STEP, WARP, WARP_ROWS, QuantizeConfig
from ..quantization.rules import Rule
from ..scale_layout import ATOM_COLS, ATOM_ROWS
from ..target import Architecture

# number of blocks from which ``optimal`` looks errors up in a table; filling it then costs little
_TABLE_BLOCKS = 1 << 19
# number of blocks from which 4/6 by sums of errors has one CTA a multiprocessor (2 % on an H200)
_ONE_CTA_BLOCKS = 1 << 21
# warps of a CTA that has a multiprocessor to itself; with the error table, as many as spill no registers
_MANY_WARPS, _TABLE_WARPS = 16, 20
_MAX_GRID, _INT32_MAX = 65535, 2**31 - 1
_FORMATS = {("e2m1", "e4m3", 16), ("e2m1", "ue8m0", 32), ("e4m3", "ue8m0", 32), ("e5m2", "ue8m0", 32)}
_CHOICES = {"e4m3": ("", "mse", "mae", "abs_max", "optimal"), "ue8m0": ("",)}
# CTAs for each one that a multiprocessor holds at a time; for 4/6 by sums; and for searches, whose work tiles take
# different times, which more CTAs even out
_WAVES, _WAVES_OF_SUMS, _WAVES_OF_SEARCHES = 2, 2, 8
# warps of a CTA of the amax kernel, and its CTAs on a multiprocessor
_AMAX_WARPS, _AMAX_CTAS = 8, 8
# CTAs of a cluster that may find the largest magnitude: every GPU with clusters runs these, and they divide the grid
_CLUSTERS = (1, 2, 4, 8)
# microseconds of a second launch, with the one that clears its result (measured on an H200); and of each part of
# AmaxWork (assumed; benchmarks/quantize_launches.py fits them)
_SECOND_LAUNCH_US = 3.7
_ROUND_US, _CLUSTER_US, _MEGABYTE_US = 0.3, 0.5, 0.2


@dataclass(frozen=True)
class QuantizeProblem:
    """The facts that decide the choice: ``batch`` matrices (rows, k), and how they are quantized.

    dtype: the dtype of x. alignment: the power of two, at most 32, that divides the address of every row of x in
    memory. scale_layout: "blocked" or "rowmajor". global_scale: "none", "given", or "computed" by the kernels.
    rotation: the number of elements that are rotated together, 0 for none. tile: whether scales are those of square
    tiles. transposed: whether K is the strided dimension of x, which is read as it lies.
    """

    format: Format
    rule: Rule
    rows: int
    k: int
    batch: int = 1
    dtype: str = "bfloat16"
    alignment: int = 32
    scale_layout: str = "blocked"
    global_scale: str = "given"
    stochastic: bool = False
    rotation: int = 0
    tile: bool = False
    transposed: bool = False

    @property
    def columns(self) -> int:
        """The number of blocks of a row."""
        return self.format.scale_columns(self.k)


@dataclass(frozen=True)
class AmaxPlan:
    """A way to find the largest magnitude in a launch of its own: a kernel's variant, and its CTAs for each matrix."""

    config: QuantizeConfig
    ctas: int
    chunks: Chunks


@dataclass(frozen=True)
class QuantizePlan:
    """A way to run a problem: a variant of the kernel, CTAs for each matrix, and the pass before it, if any.

    chunks: given if the kernel itself finds the largest magnitude.
    """

    config: QuantizeConfig
    ctas: int
    walk: Walk
    amax: AmaxPlan | None = None
    chunks: Chunks | None = None


def can_implement(problem: QuantizeProblem) -> str:
    """Why the kernels cannot run ``problem``, or an empty string."""
    format, rule, k = problem.format, problem.rule, problem.k
    if (format.element, format.scale, format.block) not in _FORMATS:
        return explain("format for the fused kernels", got=format.name, expected="nvfp4, mxfp4 or mxfp8")
    if rule.choice not in _CHOICES[format.scale]:
        expected = "one that does not search, or optimal for nvfp4"
        return explain("rule for the fused kernels", got=repr(rule.name), expected=expected)
    if problem.tile and rule.choice == "optimal":
        return explain("block_2d for the fused kernels", got="rule 'optimal'", expected="a rule that does not search")
    if problem.rotation and format.block % problem.rotation:
        expected = f"{format.block} or smaller"
        return explain("size of a rotation for the fused kernels", got=problem.rotation, expected=expected)
    if k % format.block:
        return explain(f"K of {format.name}", got=k, expected=f"a multiple of {format.block}")
    if problem.batch > _MAX_GRID:
        return explain("matrices for the fused kernels", got=problem.batch, expected=f"at most {_MAX_GRID}")
    scales = -(-problem.rows // ATOM_ROWS) * ATOM_ROWS * -(-k // 64) * 4
    if max(scales, k * 4) > _INT32_MAX:
        expected = f"at most {_INT32_MAX} scales"
        return explain("x for the fused kernels", got=f"{problem.rows} x {k}", expected=expected)
    return ""


def choose(problem: QuantizeProblem, arch: Architecture, sm_count: int, cluster: int | None = None) -> QuantizePlan:
    """The plan for ``problem`` on ``sm_count`` multiprocessors of ``arch``.

    cluster: the size, a power of two up to 8, of the clusters that compute the global scale; 0: a launch of its own
        computes it; None: whichever takes less time.

    Raises:
        OperandError: the kernels cannot run the problem.
    """
    reason = can_implement(problem)
    if reason:
        raise OperandError(reason)
    if problem.global_scale != "computed":
        return _plan(problem, arch, sm_count)
    if cluster is None:
        cluster = _best_cluster(problem, arch, sm_count)
    return _plan(problem, arch, sm_count, cluster)


def _plan(problem: QuantizeProblem, arch: Architecture, sm_count: int, cluster: int = 0) -> QuantizePlan:
    config = _config(problem, arch, cluster)
    places = sm_count // problem.batch
    ctas, walk = grid(problem, config, places)
    if config.global_scale == "amax":
        return QuantizePlan(config, ctas, walk, amax=_amax(problem, config, places))
    chunks = _chunks(problem, config, config.cluster * config.warps) if config.global_scale == "computed" else None
    return QuantizePlan(config, ctas, walk, chunks=chunks)


@functools.lru_cache(maxsize=1024)
def _best_cluster(problem: QuantizeProblem, arch: Architecture, sm_count: int) -> int:
    """The fastest size of the clusters that compute the global scale; 0 if a launch of its own takes less time."""
    times = {}
    for size in _CLUSTERS:
        work = amax_work(problem, _plan(problem, arch, sm_count, size))
        times[size] = work.rounds * _ROUND_US + work.barriers * _CLUSTER_US + work.megabytes * _MEGABYTE_US
    best = min(times, key=times.__getitem__)
    return best if times[best] < _SECOND_LAUNCH_US else 0


class AmaxWork(NamedTuple):
    """The extra work of a kernel in which each cluster finds the largest magnitude on its own.

    rounds: the chunks that a warp reads, one after the other. barriers: 1 for clusters of several CTAs, which wait for
    one another. megabytes: what all clusters together read, from L2.
    """

    rounds: int
    barriers: int
    megabytes: float


def amax_work(problem: QuantizeProblem, plan: QuantizePlan) -> AmaxWork:
    """The extra work of ``plan``, which must have ``chunks``."""
    config = plan.config
    rounds = problem.batch * -(-plan.chunks.count // (config.cluster * config.warps))
    x_bytes = problem.batch * problem.rows * problem.k * ITEM_BYTES[problem.dtype]
    clusters = plan.ctas // config.cluster * problem.batch
    return AmaxWork(rounds, int(config.cluster > 1), clusters * x_bytes / 1e6)


@functools.lru_cache(maxsize=1024)
def _config(problem: QuantizeProblem, arch: Architecture, cluster: int) -> QuantizeConfig:
    """The variant of the kernel. cluster: as in :func:`choose`."""
    format, rule = problem.format, problem.rule
    reads_rows = not (problem.tile or problem.transposed)
    # a transposed read takes words, unless it finds the largest magnitude of elements as they lie
    by_words = problem.transposed and not (cluster and not problem.rotation)
    config = QuantizeConfig(
        arch=arch,
        element=format.element,
        scale=format.scale,
        block=format.block,
        top=format.max_value if rule.max_code is None else rule.max_code,
        min_scale=rule.min_scale,
        exponent=rule.exponent,
        choice=rule.choice,
        full_scale=rule.full_scale,
        dtype=problem.dtype,
        hadamard=problem.rotation,
        tile=problem.tile,
        transposed=problem.transposed,
        global_scale="amax" if problem.global_scale == "computed" and not cluster else problem.global_scale,
        cluster=max(cluster, 1),
        stochastic=problem.stochastic,
        layout=problem.scale_layout,
        scale_word=problem.columns % ATOM_COLS == 0,
        ragged=reads_rows and (problem.rows % ATOM_ROWS != 0 or problem.columns % WARP != 0),
        bulk=problem.alignment >= 16 and reads_rows,
        vector_bytes=4 if by_words else min(arch.vector_bytes, _row_vector(problem)),
    )
    if _wants_error_table(problem, config):
        return dataclasses.replace(config, error_table=True, warps=_TABLE_WARPS, min_blocks=1)
    if _wants_one_cta(problem, config):
        return dataclasses.replace(config, warps=_MANY_WARPS, min_blocks=1)
    return dataclasses.replace(config, min_blocks=_resident_rows(config) if reads_rows else _resident_others(config))


def _wants_error_table(problem: QuantizeProblem, config: QuantizeConfig) -> bool:
    """Whether ``optimal`` looks errors up: with so many blocks, filling the table costs little."""
    apart = config.hadamard or config.transposed or config.stochastic or config.global_scale == "computed"
    return config.tries_all_scales and not apart and _large_on_hopper(problem, config, _TABLE_BLOCKS)


def _wants_one_cta(problem: QuantizeProblem, config: QuantizeConfig) -> bool:
    """Whether 4/6 has one CTA a multiprocessor, with many warps."""
    takes = config.defers_undecided and config.choice in ("mse", "mae") and config.global_scale == "given"
    return takes and _large_on_hopper(problem, config, _ONE_CTA_BLOCKS)


def _large_on_hopper(problem: QuantizeProblem, config: QuantizeConfig, blocks: int) -> bool:
    """Whether the problem is one that large plans were measured for: bfloat16 in bulk copies, at least ``blocks``."""
    measured = config.dtype == "bfloat16" and config.bulk and not config.arch.has_fp4_convert
    return measured and problem.batch * problem.rows * problem.columns >= blocks


def _resident_rows(config: QuantizeConfig) -> int:
    """The CTAs of the kernel of rows on a multiprocessor, which shared memory and registers limit."""
    shared = config.warps * (WARP_ROWS * WARP * config.block_bytes + 8 * WARP_ROWS) + 2048
    # the system takes a kilobyte of each CTA's shared memory
    most = (config.arch.shared_bytes + 1024) // (shared + 1024) if config.bulk else 16
    if config.tries_all_scales:
        # with four, registers would spill
        wanted = 3 if config.ragged or config.stochastic or config.item_bytes == 4 else 4
    elif config.stochastic:
        wanted = 3
    elif config.has_fast_path:
        # for 4/6, registers are worth more than warps; the first loads of a computed global scale need 60 registers
        wanted = 4 if config.choice else 6 if config.global_scale == "computed" else 10
    else:
        wanted = 6
    return min(wanted, most)


def _resident_others(config: QuantizeConfig) -> int:
    """The CTAs of the kernels of tiles and of transposed reads on a multiprocessor, which registers limit."""
    if config.stochastic:
        return 2
    if config.transposed:
        return 4 if config.block == 16 else 3
    return 4 if config.has_fast_path and not config.choice else 3


def grid(problem: QuantizeProblem, config: QuantizeConfig, places: int) -> tuple[int, Walk]:
    """The number of CTAs for a matrix, at most as many as have work, and how they walk it on ``places`` SMs."""
    atoms, columns = -(-problem.rows // ATOM_ROWS), problem.columns
    waves, walkers = _WAVES, 1
    if config.transposed:
        # a CTA takes the rows of an atom for as many blocks as it has room for
        inner, count = atoms, atoms * -(-columns // config.blocks_along_k)
        busy = count
    elif config.tile:
        # a warp takes a work tile
        inner = -(-columns // (WARP // WARP_ROWS))
        count = inner * atoms * (ROW_STEP // config.block)
        busy = -(-count // config.warps)
    else:
        inner = -(-columns // WARP)
        if config.error_table or config.runs_of_warps:
            walkers = config.warps
        count = inner * atoms * (ROW_STEP if walkers > 1 else ROW_STEP // config.warps)
        busy = -(-count // walkers)
        if config.min_blocks == 1:
            waves = 1
        elif config.tries_all_scales:
            waves = _WAVES_OF_SEARCHES
        elif config.defers_undecided and config.choice != "abs_max":
            waves = _WAVES_OF_SUMS
    # whole clusters: row groups are a multiple of them; some CTAs of tiles may have no work
    ctas = -(-max(1, min(busy, waves * config.min_blocks * places)) // config.cluster) * config.cluster
    if config.transposed or config.tile:
        return ctas, Walk(inner, count, 0, 0, 0, 0)
    return ctas, Walk(inner, count, *divmod(ctas, inner), *divmod(count, ctas * walkers))


def _amax(problem: QuantizeProblem, config: QuantizeConfig, places: int) -> AmaxPlan:
    """The pass before ``config``'s kernel that finds the largest magnitude of x, rotated if so configured."""
    # a rotation of a transposed read needs all rows of a block at once; without one, rows in memory will do
    by_blocks = config.transposed and config.hadamard > 0
    found = QuantizeConfig(
        arch=config.arch,
        dtype=config.dtype,
        hadamard=config.hadamard,
        transposed=by_blocks,
        vector_bytes=4 if by_blocks else min(_row_vector(problem), 16),
        warps=_AMAX_WARPS,
    )
    count = _chunks(problem, found, 1).count
    ctas = max(1, min(-(-count // _AMAX_WARPS), _AMAX_CTAS * places))
    return AmaxPlan(found, ctas, _chunks(problem, found, ctas * _AMAX_WARPS))


def _row_vector(problem: QuantizeProblem) -> int:
    """The widest load, in bytes, that divides the rows in memory."""
    row_bytes = _memory_rows(problem)[1]
    return min(problem.alignment, row_bytes & -row_bytes)


def _memory_rows(problem: QuantizeProblem) -> tuple[int, int]:
    """The number of rows of a matrix as it lies in memory, and their bytes."""
    rows, length = (problem.k, problem.rows) if problem.transposed else (problem.rows, problem.k)
    return rows, length * ITEM_BYTES[problem.dtype]


def _chunks(problem: QuantizeProblem, config: QuantizeConfig, warps: int) -> Chunks:
    """The chunks of a matrix, which ``warps`` warps walk together."""
    rows, row_bytes = _memory_rows(problem)
    if config.transposed and config.hadamard:
        rows //= problem.format.block
    in_row = -(-row_bytes // config.chunk_bytes)
    return Chunks(row_bytes, in_row, rows * in_row, warps // in_row, warps % in_row)
