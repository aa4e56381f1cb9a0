"""The limits of ``WgmmaConfig``: the reason why no kernel implements a configuration."""

from __future__ import annotations

from ....errors import explain
from ....weight_layout import DTYPES, PACKINGS
from ..config import GATE_NAMES, OUT_BYTES
from ..sm100.packed_plan import refused_by_tensor_memory
from .config import STAGE_TILES, WgmmaConfig

PROMOTED_COLUMNS = {2: 128, 3: 64, 4: 32}
"""By warpgroups, the widest tile whose sums the registers hold twice."""


def can_implement(c: WgmmaConfig) -> str:
    """The reason why no kernel implements ``c``, or an empty string."""
    return _architecture(c) or _rows(c) or _tile(c) or _sums(c) or c.schedule.limit(c) or _output(c) or _stages(c)


def _architecture(c: WgmmaConfig) -> str:
    if DTYPES[c.dtype] not in PACKINGS[c.packing]:
        expected = " or ".join(str(dtype)[6:] for dtype in PACKINGS[c.packing])
        return explain(f"dtype of weights packed as {c.packing}", got=c.dtype, expected=expected)
    if c.fp8 and c.arch.generation != "sm90":
        return explain(f"dtype of packed weights on {c.arch.name}", got=c.dtype, expected="bfloat16 or float16")
    if c.in_tensor_memory:
        return refused_by_tensor_memory(c)
    if c.arch.generation == "sm120" and (c.warpgroups != 2 or c.tile_n > 128 or not c.schedule.has_single_ctas):
        got = f"{c.warpgroups} warpgroups, tiles of {c.tile_n} columns, {c.schedule}"
        expected = "2 warpgroups, at most 128 columns, WholeTiles or EqualShares without clusters"
        return explain(f"a plan for {c.arch.name}", got=got, expected=expected)
    return ""


def _rows(c: WgmmaConfig) -> str:
    """The limits of weights in rows (``gemm.packed.rows``): stages of 128 elements of K, and tiles of 128 whole
    rows."""
    whole = c.stage_tiles == 2 and not c.half_tiles
    if c.decodes_x and not (
        c.packing == "nvfp4_rows" and c.tile_n in (64, 128) and c.cluster_rows == c.ctas_per_sm == 1
    ):
        got = f"{c.packing}, tiles of {c.tile_n}, cluster_rows {c.cluster_rows}, ctas_per_sm {c.ctas_per_sm}"
        return explain("loading warps that decode x", got=got, expected="nvfp4_rows, tiles of 64 or 128, 1, 1")
    if c.batched and not c.weights.in_rows:
        return explain("packing of a batch", got=c.packing, expected="nvfp4_rows or mxfp4_rows")
    if not c.weights.in_rows or (whole and c.arch.generation == "sm90" and c.programmatic != "weights"):
        return ""
    got = f"{c.row_groups} warpgroups along rows, stages of {c.stage_tiles} tiles on {c.arch.name}"
    return explain("weights that lie in rows", got=got, expected="2 or 4, 2 tiles, on sm_90a, not started by weights")


def _tile(c: WgmmaConfig) -> str:
    """The limits of registers, which depend on the columns of a tile."""
    if c.tile_n not in c.tiles_n:
        return explain("tile_n", got=c.tile_n, expected=f"one of {', '.join(map(str, c.tiles_n))}")
    if c.warpgroups not in (2, 3, 4):
        return explain("warpgroups", got=c.warpgroups, expected="2, 3 or 4")
    if c.tile_n > 128 and c.warpgroups > 2 and not c.in_tensor_memory:
        return explain(f"warpgroups of tiles of {c.tile_n} columns", got=c.warpgroups, expected="2: registers end")
    most = c.columns_of_two
    if c.ctas_per_sm not in (1, 2) or (c.ctas_per_sm == 2 and (c.warpgroups != 2 or c.tile_n > most)):
        got = f"{c.ctas_per_sm} with {c.warpgroups} warpgroups and tiles of {c.tile_n} columns"
        return explain("ctas_per_sm", got=got, expected=f"1, or 2 with 2 warpgroups and at most {most} columns")
    return ""


def _sums(c: WgmmaConfig) -> str:
    """The limits of promoted sums: fp32 sums take as many registers as those of the tensor cores."""
    if not c.promoted:
        return ""
    if not c.fp8:
        return explain("promoted sums", got=f"products of {c.dtype}", expected="float8_e4m3fn")
    most = 32 if c.ctas_per_sm == 2 else PROMOTED_COLUMNS[c.warpgroups]
    if c.tile_n > most or c.overlap:
        got = f"tiles of {c.tile_n} columns, overlap {c.overlap}"
        return explain(
            "promoted sums", got=got, expected=f"at most {most} columns for {c.warpgroups} warpgroups, overlap 0"
        )
    return ""


def _output(c: WgmmaConfig) -> str:
    if c.gate not in ("", *GATE_NAMES):
        return explain("gate", got=repr(c.gate), expected=f"one of {', '.join(GATE_NAMES)}")
    if c.programmatic not in c.ways_to_start:
        return explain("programmatic", got=repr(c.programmatic), expected=f"one of {c.ways_to_start}")
    if c.gate and c.bias:
        return explain("bias of a gated GEMM", got=c.bias, expected="none")
    if c.vector and OUT_BYTES[c.out] != 2:
        return explain("output stored in vectors", got=c.out, expected="float16 or bfloat16")
    return ""


def _stages(c: WgmmaConfig) -> str:
    if c.stage_tiles not in (1, STAGE_TILES):
        return explain("stage_tiles", got=c.stage_tiles, expected=f"1 or {STAGE_TILES}")
    least = c.k_groups * (STAGE_TILES + 1 - c.stage_tiles) + 1
    if c.ring_stages < least:
        return explain("stages", got=c.ring_stages, expected=f"at least {least}: one is read ahead")
    if c.ring_stages % c.k_groups:
        return explain("stages", got=c.ring_stages, expected=f"a multiple of k_groups, {c.k_groups}")
    if c.ring_stages > c.most_stages:
        return explain("stages", got=c.ring_stages, expected=f"at most {c.most_stages}: shared memory holds no more")
    return ""
