"""The problem of a GEMM of a packed weight, a plan to run it, and the reasons why a plan cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import OperandTypeError, explain
from ..kernels.gemm.packed.grouped_stream_config import GroupedStreamConfig
from ..kernels.gemm.packed.stream_config import StreamConfig
from ..kernels.gemm.packed.stream_config import can_implement as can_stream
from ..kernels.gemm.sm90.config import MMA_ROWS, STAGE_TILES, WgmmaConfig
from ..kernels.gemm.sm90.limits import can_implement as can_wgmma
from ..kernels.gemm.sm90.schedules import schedule_of
from ..weight_layout import DTYPES, PACKINGS, TILE_K, packed_rows
from ..weight_layout import tiles as packed_tiles

STREAM_ROWS = 16
"""The most rows of x that are streamed: more are faster on WGMMA."""


@dataclass(frozen=True, kw_only=True)
class PackedProblem:
    """out (m, n) = x (m, k) · weight (n, k)ᵀ, or two such products joined by ``gate``.

    quantized: whether x is NVFP4 that a kernel can read directly. vector: whether rows of the output start at multiples
    of 16 bytes. factors: device scalars that multiply the alpha of each product. bias: the dtype of the bias, or "".
    packing: the packing of the weight. promoted: as in ``WgmmaConfig``. batch: matrices of operands in rows.
    """

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    out: str = "bfloat16"
    quantized: bool = False
    vector: bool = True
    factors: int = 0
    bias: str = ""
    gate: str = ""
    packing: str = "nvfp4"
    promoted: bool = False
    batch: int = 1

    @property
    def rows(self) -> int:
        """Rows of the packed weight."""
        return packed_rows(self.n, bool(self.gate))


WRITE_STEPS = 3
"""k-tiles that a helper could multiply in the time in which it writes its sums of a tile."""
TILING = {
    StreamConfig: ("slabs", "warps_m", "warps_k", "stage_tiles", "stages", "ctas_per_sm", "programmatic"),
    WgmmaConfig: ("tile_n", "warpgroups", "ctas_per_sm", "stage_tiles", "stages", "decodes_x", "programmatic"),
}
"""Fields of a configuration that a plan decides, besides the schedule. The problem decides the others."""


def tiling_of(kind: type, words: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration of ``kind`` that a plan decides, from the plan's ``PackedPlan.tiling``."""
    own = {name: words[name] for name in TILING[kind]}
    return own if kind is StreamConfig else own | {"schedule": schedule_of(words)}


class ScratchSize(NamedTuple):
    """The fp32 partial sums, and the flags, that a launch needs in global memory."""

    floats: int
    flags: int


@dataclass(frozen=True)
class PackedPlan:
    """A kernel's configuration, and the workers of its launch: clusters, or CTAs of the streaming kernel."""

    config: StreamConfig | WgmmaConfig
    workers: int

    @property
    def streams(self) -> bool:
        return isinstance(self.config, StreamConfig)

    def early(self) -> PackedPlan:
        """The plan with a kernel that may start while the launch before it still runs."""
        return replace(self, config=replace(self.config, programmatic="weights"))

    @property
    def tiling(self) -> dict[str, int | str]:
        """The fields of its configuration that the plan decides, by name, those of its schedule included."""
        names = next(TILING[kind] for kind in type(self.config).__mro__ if kind in TILING)
        own = {name: getattr(self.config, name) for name in names}
        return own if self.streams else own | self.config.schedule.words

    def __str__(self) -> str:
        defaults = default_tiling(type(self.config))
        told = (f"{name} {value}" for name, value in self.tiling.items() if value != defaults[name])
        mma = {"sm90": "wgmma", "sm100": "tcgen05"}.get(self.config.arch.generation, "mma.sync")
        kernel = "stream" if self.streams else f"{mma} tile_n {self.config.tile_n}"
        return f"{kernel}, {', '.join(x for x in told if not x.startswith('tile_n'))} on {self.workers}"

    def scratch(self, n: int) -> ScratchSize:
        """The scratch of a launch whose output has ``n`` columns: nothing if no work tile is cut."""
        c = self.config
        if isinstance(c, StreamConfig):
            # only the device knows whether work tiles of groups are cut
            cut = isinstance(c, GroupedStreamConfig) or -(-n // c.out_rows) % self.workers > 0
            return ScratchSize(2 * self.workers * c.columns * c.rows, 2 * self.workers) if cut else ScratchSize(0, 0)
        if c.scheduler == "static":
            return ScratchSize(0, 0)
        groups = self.workers * c.cluster_rows * c.warpgroups
        return ScratchSize(groups * MMA_ROWS * c.tile_n, groups * c.split_k)


def default_tiling(kind: type) -> dict[str, Any]:
    """``PackedPlan.tiling`` for the default configuration of ``kind``."""
    return PackedPlan(kind(), 1).tiling


def can_implement(plan: PackedPlan) -> str:
    """The reason why no kernel implements the plan, or an empty string."""
    return can_stream(plan.config) if isinstance(plan.config, StreamConfig) else can_wgmma(plan.config)


def check_plan(given: PackedPlan | None) -> None:
    """Raises OperandTypeError if ``given`` is neither None nor a plan."""
    if given is not None and not isinstance(given, PackedPlan):
        raise OperandTypeError.of("config", got=type(given).__name__, expected="a PackedPlan of planning.packed")


def refused(p: PackedProblem, plan: PackedPlan) -> str:
    """The reason why a caller's plan cannot run the problem, or an empty string."""
    if plan.workers < 1:
        return explain("workers", got=plan.workers, expected="at least 1")
    c = plan.config
    if not plan.streams and (c.k_parts > 1 or c.scheduler == "helped"):
        tiles, steps = tile_count(p, c), -(-p.k // c.tile_k)
        if c.scheduler == "helped":
            if plan.workers <= tiles:
                return explain(
                    "workers of a plan with helpers", got=plan.workers, expected=f"more than {tiles}, a tile each"
                )
            steps -= helped_steps(p, plan)
        elif plan.workers != tiles:
            what = "workers of a plan with split_k or k_groups"
            return explain(what, got=plan.workers, expected=f"{tiles}: a tile each")
        if -(-p.k // (STAGE_TILES * TILE_K)) % c.k_groups:
            return explain("K of a plan with k_groups", got=p.k, expected=f"a multiple of {c.tile_k}")
        if c.overlap and steps // 2 <= c.overlap:
            return explain("overlap", got=c.overlap, expected=f"less than {steps // 2}: half of the k-tiles")
        if steps < c.split_k:
            return explain("split_k", got=c.split_k, expected=f"at most {steps}: steps of {c.tile_k} along K")
    if not plan.streams and c.decodes_x and not p.quantized:
        expected = "NVFP4 whose rows start at multiples of 16 bytes"
        return explain("x of a plan whose loading warps decode it", got="another", expected=expected)
    if plan.streams and not can_take(p):
        got = f"{p.m} rows of x, K {p.k}, {'a' if p.bias else 'no'} bias"
        expected = f"at most {STREAM_ROWS} rows, no bias, K a multiple of {STAGE_TILES * TILE_K} if x is NVFP4"
        return explain("streaming kernel", got=got, expected=expected)
    if plan.streams and (k_tiles := packed_tiles(p.rows, p.k)[1]) % c.stage_tiles:
        return explain("stage_tiles", got=c.stage_tiles, expected=f"a divisor of {k_tiles}: packed tiles along K")
    return ""


def tile_count(p: PackedProblem, c: WgmmaConfig) -> int:
    """The number of work tiles."""
    return p.batch * -(-p.rows // c.tile_m) * -(-p.m // c.tile_n)


def helped_steps(p: PackedProblem, plan: PackedPlan) -> int:
    """k-tiles of each tile that the helpers multiply, so that they end when the other CTAs do."""
    c, tiles = plan.config, tile_count(p, plan.config)
    each = -(-tiles // ((plan.workers - tiles) * c.split_k)) * c.split_k
    return max(1, (-(-p.k // c.tile_k) - WRITE_STEPS * each) // (each + 1))


def can_take(p: PackedProblem) -> bool:
    """Whether the streaming kernel takes the problem. NVFP4 x must have scales for every packed tile of the weight."""
    packing = PACKINGS[p.packing][DTYPES[p.dtype]]
    by_tiles = packing.by_table or packing.in_rows
    return p.m <= STREAM_ROWS and not (p.bias or by_tiles) and not (p.quantized and p.k % (STAGE_TILES * TILE_K))


def decided(p: PackedProblem, streams: bool) -> dict[str, Any]:
    """The fields of a configuration that the problem decides."""
    found: dict[str, Any] = {"dtype": p.dtype, "packing": p.packing, "out": p.out, "factors": p.factors, "gate": p.gate}
    if streams:
        # aligned rows may still end within a vector: a single row, or rows of a slice
        vector = p.vector and p.n % 4 == 0
        return found | {"columns": 8 if p.m <= 8 else 16, "quantized_x": p.quantized, "vector": vector}
    found |= {"vector": p.vector and p.out != "float32", "bias": p.bias, "promoted": p.promoted}
    return found | {"batched": p.batch > 1}
