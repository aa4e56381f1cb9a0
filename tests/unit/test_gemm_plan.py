"""Where a GEMM kernel's data lies: the plan's arithmetic against other arithmetic, and against compiled kernels."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain

import pytest
from support.gemm_observed import observing
from support.gemm_problems import Case, check, make
from support.gemm_structures import config_of, structures

from cute_nvfp4.errors import OperandError
from cute_nvfp4.kernels.gemm.config import OUT_BYTES, GemmConfig
from cute_nvfp4.kernels.gemm.limits import can_implement
from cute_nvfp4.kernels.gemm.shared_plan import StagePlan
from cute_nvfp4.kernels.gemm.sm100.memory_plan import Tcgen05SharedPlan, TensorPlan
from cute_nvfp4.ops.gemm import compile_gemm
from cute_nvfp4.target import ARCHITECTURES

SM_100A = ARCHITECTURES["sm_100a"]
SHARED_LIMIT, TENSOR_LIMIT = 227 * 1024, 512
COMPILED = (
    Case(), Case(tile_n=256, store="direct"), Case(tile_n=192, dtype="float16", alpha=1e-5),
    Case(pair=True, cluster_m=2, tile_n=256), Case(k=1312, split_k=4, tile_n=64), Case(stages=3, acc_stages=1),
    Case(a_format="mxfp8", b_format="mxfp8"), Case(a_format="mxfp4", b_format="mxfp4", cluster_n=2),
)  # fmt: skip


def stage(config: GemmConfig, room: bool = False) -> int:
    """Bytes that arrive for a CTA's stage: bits of data, a byte for each block of K of each row; scales come by 128
    rows. room: with that of elements of four bits which lie among others of eight."""
    k = config.tile_k
    bits = [8 // x.elements_per_byte for x in config.formats]
    bits = [max(bits)] * 2 if room else bits
    rows_b, scale_rows_b = config.tile_n // (2 if config.pair else 1), (config.tile_n + 127) // 128 * 128
    data = (128 * bits[0] + rows_b * bits[1]) * k // 8
    return data + (128 + scale_rows_b) * k // config.formats[0].block


def staged_output(config: GemmConfig) -> int:
    """Two buffers of 128 rows of 32 columns, or as many as a CTA stores."""
    if config.store == "direct":
        return 0
    columns = config.tile_n // config.split_k
    return 2 * 128 * (32 if columns % 32 == 0 else 16 if columns % 16 == 0 else 8) * int(OUT_BYTES[config.out])


def received(config: GemmConfig) -> int:
    """fp32 sums of this CTA's columns from each other CTA along K."""
    return (config.split_k - 1) * 128 * (config.tile_n // config.split_k) * 4


def mbarriers(config: GemmConfig, stages: int) -> int:
    return 2 * (stages + TensorPlan(config).acc_stages + (config.split_k > 1))


def every() -> list[GemmConfig]:
    return [config_of(case) for case in structures()]


def test_bytes_of_a_stage() -> None:
    for config in every():
        plan = StagePlan(config)
        assert plan.loaded == stage(config)
        assert plan.bytes == -(-stage(config, room=True) // 1024) * 1024
        # parts follow one another, data at multiples of the swizzle's 1024 bytes, scales of an atom's 512
        end = 0
        for (name, size), offset in zip(plan.parts, chain(*plan.offsets), strict=True):
            assert offset == end and end % (512 if name.startswith("SF") else 1024) == 0
            end += size
        assert end == stage(config, room=True)


def test_shared_memory_holds_as_many_stages_as_fit() -> None:
    assert SM_100A.shared_bytes == SHARED_LIMIT
    for config in every():
        plan = Tcgen05SharedPlan(config)
        rest = staged_output(config) + received(config)
        stages = plan.stages
        # barriers and alignment
        assert rest + 8 * mbarriers(config, stages) < plan.fixed <= rest + 2048
        assert plan.bytes == stages * plan.stage.bytes + plan.fixed <= SHARED_LIMIT
        if config.stages:
            assert stages == config.stages
        else:
            assert 2 <= stages <= 16 and (stages == 16 or plan.bytes + plan.stage.bytes > SHARED_LIMIT)
        assert f"= {plan.bytes} bytes" in plan.arithmetic


def test_tensor_memory() -> None:
    for config in every():
        plan = TensorPlan(config)
        # a column holds four scales of each of 128 rows
        scales_a = config.tile_k // config.formats[0].block
        scales_b = scales_a * ((config.tile_n + 127) // 128)
        assert (plan.sfa, plan.sfb) == (scales_a, scales_b)
        used = plan.acc_stages * config.tile_n + scales_a + scales_b
        assert plan.used == used <= plan.allocated <= TENSOR_LIMIT
        assert plan.allocated in (32, 64, 128, 256, 512) and (plan.allocated == 32 or plan.allocated < 2 * used)
        assert plan.acc_stages == (config.acc_stages or (2 if 2 * config.tile_n + scales_a + scales_b <= 512 else 1))
        assert f"= {used} columns" in plan.arithmetic
        # accumulators, scales of A, scales of B: one after the other
        starts = [plan.acc_stages * plan.acc, plan.acc_stages * plan.acc + plan.sfa]
        assert [plan.sfa_column(0), plan.sfb_column(0)] == starts


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_what_is_launched_is_what_was_planned(case: Case) -> None:
    """Bytes of shared memory of the launch, columns that the kernel allocates, threads, and the cluster."""
    problem = make(case)
    with observing() as seen:
        check(problem, problem.run())
    (launch,) = seen.launches
    config = config_of(case)
    plan = Tcgen05SharedPlan(config)
    needed = plan.stages * plan.stage.bytes + staged_output(config) + received(config)
    # barriers, and where tensor memory starts
    needed += 8 * mbarriers(config, plan.stages) + 4
    assert needed <= launch.dynamic_smem <= plan.bytes <= SHARED_LIMIT
    assert launch.dynamic_smem - needed < 128
    assert launch.block == (192, 1, 1) and launch.cluster == (*config.cluster, config.split_k)
    assert launch.grid == (*config.cluster, config.split_k * case.workers)
    assert len(seen.barriers.offset_of) == mbarriers(config, plan.stages)


@pytest.mark.parametrize("tile_n,pair,columns", [(64, False, 256), (128, False, 512), (256, True, 512)])
def test_tensor_memory_that_the_kernel_allocates(tile_n: int, pair: bool, columns: int) -> None:
    config = GemmConfig(tile_n=tile_n, pair=pair, cluster=(2, 1) if pair else (1, 1))
    assert TensorPlan(config).allocated == columns
    ptx = compile_gemm(config).ptx
    (register,) = re.findall(r"tcgen05\.alloc\S*\s+\[[^\]]*\], (%r\d+|\d+);", ptx)
    value = register if register.isdigit() else re.search(rf"mov\.b32\s+{register}, (\d+);", ptx).group(1)
    assert int(value) == columns


# --- what is refused


def config(**changes: object) -> GemmConfig:
    return GemmConfig(**changes)  # type: ignore[arg-type]


REFUSED = (
    ({"arch": ARCHITECTURES["sm_90a"]}, r"architecture of a block-scaled GEMM: got sm_90a, expected sm_100a or"),
    ({"a_format": "fp6"}, r"a_format: got fp6, expected one of nvfp4, mxfp4, mxfp8, mxfp8_e5m2"),
    ({"b_format": "int4"}, r"b_format: got int4, expected one of"),
    ({"a_format": "nvfp4", "b_format": "mxfp4"}, r"got nvfp4 and mxfp4, expected nvfp4 and nvfp4, which one kind"),
    ({"a_format": "mxfp8", "b_format": "nvfp4"}, r"formats of a and b: got mxfp8 and nvfp4"),
    ({"tile_n": 96}, r"tile_n: got 96, expected one of 64, 128, 192, 256"),
    ({"tile_n": 512}, r"tile_n: got 512, expected one of"),
    ({"split_k": 3}, r"split_k: got 3, expected one of 1, 2, 4, 8"),
    ({"split_k": 16}, r"split_k: got 16, expected one of"),
    ({"scheduler": "dynamic"}, r"scheduler: got dynamic, expected one of static, stream_k"),
    ({"raster": "k"}, r"raster: got k, expected one of m, n"),
    ({"products": 3}, r"products: got 3, expected one of 1, 2"),
    ({"factors": 5}, r"factors: got 5, expected one of"),
    ({"cluster": (3, 1)}, r"CTAs of a cluster along M: got 3, expected one of 1, 2, 4"),
    ({"cluster": (1, 8)}, r"CTAs of a cluster along N: got 8, expected one of 1, 2, 4"),
    ({"cluster": (1, 0)}, r"CTAs of a cluster along N: got 0"),
    ({"pair": True}, r"CTAs of a cluster along M: got 1, expected an even number, for pairs of CTAs"),
    ({"cluster": (4, 4)}, r"CTAs of a cluster: got 4 x 4 x 1 \(split_k\) = 16, expected at most 8"),
    ({"cluster": (2, 1), "pair": True, "split_k": 8}, r"got 2 x 1 x 8 \(split_k\) = 16, expected at most 8"),
    ({"cluster": (2, 1), "split_k": 2}, r"cluster with split_k: got 2 x 1, expected 1 x 1: CTAs along K"),
    ({"cluster": (1, 2), "scheduler": "stream_k"}, r"cluster with stream_k: got 1 x 2 x 1, expected 1 x 1 x 1"),
    ({"split_k": 2, "scheduler": "stream_k"}, r"cluster with stream_k: got 1 x 1 x 2, expected 1 x 1 x 1"),
    ({"cluster": (4, 1), "pair": True, "scheduler": "stream_k"}, r"got 4 x 1 x 1, expected 2 x 1 x 1"),
    ({"out": "float64"}, r"out: got float64, expected one of float16, bfloat16, float32"),
    ({"out_major": "l"}, r"out_major: got l, expected one of n, m"),
    ({"store": "bulk"}, r"store: got bulk, expected one of tma, direct"),
    ({"bias": "k"}, r"bias: got k, expected one of"),
    ({"bias_dtype": "int8"}, r"bias_dtype: got int8, expected one of"),
    ({"out_major": "m"}, r"store of an output that is contiguous along M: got tma, expected direct"),
    ({"vector": False}, r"store of rows not aligned to 16 bytes: got tma, expected direct"),
    ({"stages": 17}, r"stages: got 17, expected 0 \(as many as fit\) to 16"),
    ({"stages": -1}, r"stages: got -1, expected 0"),
    ({"acc_stages": 3}, r"acc_stages: got 3, expected 0 \(as many as fit\), 1 or 2"),
)  # fmt: skip


@pytest.mark.parametrize("changes,message", REFUSED, ids=[str(c) for c, _ in REFUSED])
def test_refused_with_the_reason(changes: dict, message: str) -> None:
    reason = can_implement(config(**changes))
    assert re.search(message, reason), reason
    with pytest.raises(OperandError, match=message):
        compile_gemm(config(**changes))


def test_too_many_stages_says_by_how_much() -> None:
    """Stages of 36,864 bytes, 16 KB of fp16 output."""
    refused = config(stages=6)
    total = 6 * 36864 + Tcgen05SharedPlan(refused).fixed
    reason = can_implement(refused)
    assert f"{total} bytes" in reason and f"at most {SHARED_LIMIT}: {total - SHARED_LIMIT} too many" in reason
    assert not can_implement(config(stages=5))


def test_too_many_accumulators_says_by_how_much() -> None:
    """Two of 256 columns are all there is; scales take 48 more."""
    reason = can_implement(config(tile_n=256, acc_stages=2))
    assert "2 accumulators of 1 x 256" in reason and "= 560 columns" in reason and ": 48 too many" in reason
    assert not can_implement(config(tile_n=256, acc_stages=1))


def test_a_table_of_two_stages_at_least() -> None:
    """A stage less than two is no pipeline: such a plan is refused by what two would take."""
    tight = replace(SM_100A, shared_bytes=80 * 1024)
    reason = can_implement(config(arch=tight))
    needed = 2 * 36864 + Tcgen05SharedPlan(config(arch=tight)).fixed
    assert f"2 stages of 36864 + {needed - 2 * 36864} = {needed} bytes" in reason
    assert f"at most {80 * 1024}: {needed - 80 * 1024} too many" in reason


# --- names


def test_structures_have_different_keys() -> None:
    """``repr`` names a kernel in the cache."""
    assert len({repr(c) for c in every()}) == len(every())


def test_structures_have_different_names() -> None:
    """In tables, but for what is counted there or changes no instruction of the mainloop: stages and raster."""
    plain = {replace(c, stages=0, acc_stages=0, raster="m") for c in every()}
    assert len({str(c) for c in plain}) == len(plain)
    outputs = [
        config(out=out, out_major=major, store="direct", bias=bias)
        for out in ("float16", "bfloat16", "float32")
        for major in "nm"
        for bias in ("", "n", "m")
    ]
    assert len({str(c) for c in outputs}) == len(outputs)
