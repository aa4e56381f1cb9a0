"""The limits of a GEMM configuration: which one it exceeds, and by how much."""

from __future__ import annotations

from ...errors import explain
from ...formats import FORMATS
from .config import (
    GATE_NAMES,
    INTERLEAVED_ROWS,
    MAX_CLUSTER,
    MIN_EPI_TILE_N,
    OUT_BYTES,
    QUANTIZED,
    SM120_TILE_N,
    SPLITS,
    TILE_N,
    GemmConfig,
    kind_of,
)
from .shared_plan import SharedPlan
from .sm100.memory_plan import Tcgen05SharedPlan, TensorPlan
from .sm120.memory_plan import MmaSyncSharedPlan


def can_implement(config: GemmConfig) -> str:
    """Why no kernel can be made of ``config``: the limit, and by how much it is exceeded; "" if one can."""
    for check in (_values, _SHARES.get(config.arch.generation, _cluster), _output):
        reason = check(config)
        if reason:
            return reason
    tensor = "" if config.arch.generation == "sm120" else TensorPlan(config).reason
    return tensor or shared_plan(config).reason


def shared_plan(config: GemmConfig) -> SharedPlan:
    """The plan of a CTA's shared memory on the architecture of ``config``."""
    return (MmaSyncSharedPlan if config.arch.generation == "sm120" else Tcgen05SharedPlan)(config)


def refused_formats(a: str, b: str, names: str = "a and b") -> str:
    """Why no kind of MMA multiplies formats ``a`` and ``b``; "" if one does."""
    if kind_of(a, b) is not None:
        return ""
    partners = [fmt for fmt in FORMATS if kind_of(a, fmt)]
    expected = f"{a} and {' or '.join(partners)}, which one kind of MMA multiplies"
    return explain(f"formats of {names}", got=f"{a} and {b}", expected=expected)


def _one_of(name: str, got: object, expected: tuple[object, ...]) -> str:
    return "" if got in expected else explain(name, got=got, expected=f"one of {', '.join(map(str, expected))}")


def _values(c: GemmConfig) -> str:
    if c.arch.generation not in _TILE_N:
        expected = "sm_100a or sm_103a (tcgen05), sm_120a or sm_121a (mma.sync)"
        hint = "On sm_90a it takes weights that prepare_weight has repacked." if c.arch.name == "sm_90a" else ""
        return explain("architecture of a block-scaled GEMM", got=c.arch.name, expected=expected, hint=hint)
    for name, fmt in (("a_format", c.a_format), ("b_format", c.b_format)):
        reason = _one_of(name, fmt, tuple(FORMATS))
        if reason:
            return reason
    if reason := refused_formats(c.a_format, c.b_format):
        return reason
    if c.interleaved and c.shared == "a" and INTERLEAVED_ROWS % c.tile_n and c.tile_n % INTERLEAVED_ROWS:
        return explain("tile_n", got=c.tile_n, expected=f"64, or whole blocks of {INTERLEAVED_ROWS} interleaved rows")
    return (
        _one_of("tile_n", c.tile_n, _TILE_N[c.arch.generation])
        or _one_of("split_k", c.split_k, SPLITS)
        or _one_of("scheduler", c.scheduler, ("static", "stream_k"))
        or _one_of("raster", c.raster, ("m", "n"))
        or _one_of("products", c.products, (1, 2))
        or _one_of("gate", c.gate, GATE_NAMES if c.products == 2 else ("",))
        or _one_of("shared", c.shared, ("a", "b") if c.products == 2 else ("a",))
        or _one_of("interleaved", c.interleaved, (False, True) if c.products == 2 else (False,))
        or _one_of("factors", c.factors, (0, 1, 2, 3, 4))
    )


def _cluster(c: GemmConfig) -> str:
    m, n = c.cluster
    reason = _one_of("CTAs of a cluster along M", m, (1, 2, 4)) or _one_of("CTAs of a cluster along N", n, (1, 2, 4))
    if reason:
        return reason
    if c.pair and m % 2:
        return explain("CTAs of a cluster along M", got=m, expected="an even number, for pairs of CTAs")
    if c.cluster_size > MAX_CLUSTER:
        return explain(
            "CTAs of a cluster",
            got=f"{m} x {n} x {c.split_k} (split_k) = {c.cluster_size}",
            expected=f"at most {MAX_CLUSTER}",
        )
    if c.slice_n < MIN_EPI_TILE_N:
        return explain("columns of a tile for each CTA along K", got=c.slice_n, expected=f"at least {MIN_EPI_TILE_N}")
    if c.split_k > 1 and (m, n) != (c.ctas, 1):
        return explain(
            "cluster with split_k",
            got=f"{m} x {n}",
            expected=f"{c.ctas} x 1: CTAs along K load different slices of K and can share none",
        )
    if c.scheduler == "stream_k" and (c.split_k > 1 or (m, n) != (c.ctas, 1)):
        return explain(
            "cluster with stream_k",
            got=f"{m} x {n} x {c.split_k}",
            expected=f"{c.ctas} x 1 x 1: each MMA walks K at its own place",
        )
    return ""


def _single(c: GemmConfig) -> str:
    """Why sm_120a cannot run ``c``: it has no multicast and no MMA of two CTAs, which the tcgen05 kernels use."""
    for name, got, expected in (
        ("pair", c.pair, False),
        ("cluster", c.cluster, (1, 1)),
        ("split_k", c.split_k, 1),
        ("acc_stages", c.acc_stages, 0),
        ("store", c.store, "direct"),
    ):
        if got != expected:
            note = f"{expected}: CTAs of {c.arch.name} share nothing, and threads store (others: sm_100a, sm_103a)"
            return explain(name, got=got, expected=note)
    return ""


_TILE_N = {"sm100": TILE_N, "sm120": SM120_TILE_N}
_SHARES = {"sm120": _single}


def _output(c: GemmConfig) -> str:
    reason = (
        _one_of("out", c.out, tuple(OUT_BYTES))
        or _one_of("out_major", c.out_major, ("n", "m"))
        or _one_of("store", c.store, ("tma", "direct"))
        or _one_of("bias", c.bias, ("", "n", "m"))
        or _one_of("bias_dtype", c.bias_dtype, tuple(x for x in OUT_BYTES if x != QUANTIZED))
    )
    if reason:
        return reason
    if c.out == QUANTIZED:
        return _quantized(c)
    if c.store == "tma" and c.out_major == "m":
        return explain(
            "store of an output that is contiguous along M",
            got="tma",
            expected="direct: the 32 lanes of a warp hold 32 neighbours, so that plain stores fill whole sectors",
        )
    if c.store == "tma" and not c.vector:
        return explain("store of rows not aligned to 16 bytes", got="tma", expected="direct")
    if c.store == "tma" and c.epi_tile_n * c.out_bytes < 16:
        return explain("bytes of a row of a TMA store", got=c.epi_tile_n * c.out_bytes, expected="at least 16")
    return ""


def _quantized(c: GemmConfig) -> str:
    if c.out_major == "m":
        return explain("contiguous dimension of a quantized output", got="m", expected="n: a thread has whole blocks")
    if c.store != "direct":
        return explain("store of a quantized output", got=c.store, expected="direct")
    block = FORMATS[QUANTIZED].block
    if c.epi_tile_n % block:
        return explain("columns that a thread quantizes", got=c.epi_tile_n, expected=f"a multiple of {block}")
    return ""
