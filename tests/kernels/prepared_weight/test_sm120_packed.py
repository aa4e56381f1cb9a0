"""Prepared weights times 16-bit activations on sm_120a, any number of rows: the kernel on mma.sync against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import test_packed_gated_gemm as gated
import test_packed_gemm as dense
import test_packed_groups as groups
import torch
from support.mutants import FIRST, LAST, at, drop, instead, offset, outcome
from support.packed_problems import run
from test_sm100_packed import drawn

from cute_nvfp4 import BlockScaledTensor, gemm, grouped_gemm, prepare_weight, quantize, simulating, to_blocked
from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import MXFP8, MXFP8_E5M2
from cute_nvfp4.kernels.gemm.sm90.config import WgmmaConfig
from cute_nvfp4.ops.prepared_weight.gemm import WGMMA
from cute_nvfp4.planning.packed import PackedPlan, PackedProblem, candidates, choose, predict
from cute_nvfp4.planning.packed_groups import PackedGroups, choose_groups
from cute_nvfp4.runtime.inspection import inspect_cubin
from cute_nvfp4.sim import adversarial
from cute_nvfp4.target import ARCHITECTURES

pytestmark = pytest.mark.sweep(8)
ARCH = "sm_120a"
HALF, BF16 = torch.float16, torch.bfloat16
Case = dense.Case


def plan(workers: int, **tiling: Any) -> PackedPlan:
    return PackedPlan(WgmmaConfig(arch=ARCHITECTURES[ARCH], **tiling), workers)


CASES = (
    # chosen: rows beyond the streaming kernel's, few rows with bias, x that is decoded first
    Case(33, 130, 272, out=BF16),
    Case(200, 264, 144, HALF, HALF, bias=BF16),
    Case(3, 200, 128, bias=torch.float32, out=BF16),
    Case(1, 72, 640, HALF, bias=HALF),
    Case(20, 100, 160, HALF, quantized=True),
    # tiles cut between CTAs, a tile of many CTAs, whole tiles
    Case(24, 600, 256, workers=3, tiling={"tile_n": 8}),
    Case(5, 200, 640, workers=5, tiling={"tile_n": 16}),
    Case(70, 130, 384, HALF, HALF, 2, {"tile_n": 64, "scheduler": "static"}),
    Case(140, 300, 384, workers=4, tiling={"tile_n": 128, "stage_tiles": 1}, out=BF16),
    Case(140, 300, 256, workers=2, tiling={"tile_n": 128, "scheduler": "static", "raster": "n"}),
    Case(60, 200, 256, workers=3, tiling={"tile_n": 32, "stage_tiles": 1, "stages": 3}, out=HALF),
)
CUT = CASES[8]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact(case: Case) -> None:
    problem = dense.Problem(case)
    assert problem.right(run(problem, ARCH))


@pytest.mark.parametrize("seed", range(40))
def test_random_problems(seed: int) -> None:
    """Of any size and formats, by the plans that are chosen."""
    problem = dense.Problem(replace(drawn(seed), workers=None, tiling={}))
    assert problem.right(run(problem, ARCH))


GATED = (
    gated.Case(33, 136, 272, out=BF16),
    gated.Case(40, 203, 144, "relu", out=HALF),
    gated.Case(70, 72, 384, "gelu_tanh", HALF, HALF, plan(2, tile_n=64), name="n64"),
    gated.Case(140, 72, 256, out=BF16, plan=plan(2, tile_n=128, stage_tiles=1), name="n128"),
)


@pytest.mark.parametrize("case", GATED, ids=str)
def test_gated(case: gated.Case) -> None:
    problem = gated.Problem(case)
    assert problem.right(run(problem, ARCH))


GROUPS = (
    groups.Case((1, 0, 3), 130, 256, out=BF16),
    groups.Case((5, 0, 20), 100, 160, HALF, HALF, 2, {"tile_n": 16}, quantized=True, before=1),
    groups.Case((33, 7, 70), 136, 256, workers=3, tiling={"tile_n": 64}, out=BF16),
    groups.Case((130, 0, 20, 90), 130, 384, workers=2, tiling={"tile_n": 128}),
)


@pytest.mark.parametrize("case", GROUPS, ids=str)
def test_groups(case: groups.Case) -> None:
    problem = groups.Problem(case)
    assert problem.right(run(problem, ARCH))


@pytest.mark.parametrize("sizes, quantized, out", groups.LISTS, ids=["parameters", "nvfp4", "workspace"])
def test_lists(sizes: list, quantized: bool, out: torch.dtype) -> None:
    pairs, outs, expected = groups.groups(sizes, quantized, out)
    with simulating(ARCH):
        grouped_gemm(pairs, alpha=0.75, out=outs)
    assert all(groups.within(got, *right) for got, right in zip(outs, expected))


def test_mxfp8() -> None:
    """Products, gated ones and groups; stages are short where two of two packed tiles would fit."""
    problems = (
        dense.Problem(Case(33, 130, 288, format=MXFP8, out=BF16)),
        dense.Problem(Case(3, 200, 160, HALF, bias=HALF, format=MXFP8_E5M2)),
        gated.Problem(gated.Case(20, 72, 160, format=MXFP8)),
        groups.Problem(groups.Case((90, 0, 20), 130, 160, out=BF16, format=MXFP8)),
    )
    assert all(problem.right(run(problem, ARCH)) for problem in problems)


@pytest.mark.parametrize("packing", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("arch, count", [(ARCH, 188), ("sm_90a", 132)])
def test_rings_are_deep(arch: str, count: int, packing: str) -> None:
    """Of every plan that planning thinks of; on sm_120a eight bits an element take as much longer as memory says."""
    found = {}
    for m in (17, 64, 200, 512):
        problem = PackedProblem(m=m, n=8192, k=8192, packing=packing)
        plans = candidates(problem, ARCHITECTURES[arch], count)
        assert min(plan.config.ring_stages for plan in plans) > 2
        found[m] = predict(plans[0], problem, count)
    dealt = PackedGroups(sizes=((200, 4096, 4096),) * 4, packing=packing)
    assert choose_groups(dealt, ARCHITECTURES[arch], count).config.ring_stages > 2
    if arch == ARCH:
        plain = PackedProblem(m=17, n=8192, k=8192)
        least = predict(choose(plain, ARCHITECTURES[arch], count), plain, count)
        assert (found[17] / least > 1.6) == (packing == "mxfp8")


@pytest.mark.parametrize("m", [24, 130])
def test_bits_of_sm_90a(m: int) -> None:
    """On data whose every sum has few bits, by the plans that are chosen."""
    generator = torch.Generator().manual_seed(m)
    x = torch.randint(-4, 5, (m, 528), generator=generator).bfloat16()
    data = torch.randint(0, 256, (136, 264), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0x38, 0x48, (136, 33), dtype=torch.uint8, generator=generator) & 0xF8  # 1 or 2
    weight = prepare_weight(BlockScaledTensor(data, to_blocked(scale)))
    found = []
    for arch in ("sm_90a", ARCH):
        with simulating(arch) as runs:
            found.append(gemm(x, weight, out_dtype=torch.float32))
        assert runs[-1].kernel.arch == arch
    assert torch.equal(*found)
    assert torch.equal(found[0].double(), x.double() @ weight.dequantize(torch.float64).T)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", adversarial(3), ids=str)
def test_any_schedule_gives_the_same_bits(schedule: Any) -> None:
    problem = dense.Problem(CUT)
    out = run(problem, ARCH, schedule=schedule)
    assert problem.right(out) and torch.equal(out, run(problem, ARCH))


MUTANTS = {
    "a full stage not waited for": (at("mbarrier.try_wait", instead("setp.eq.b32 {0}, 0, 0;"), LAST), "Race"),
    "a stage not given back": (at("mbarrier.arrive.shared", drop(), LAST), "Deadlock"),
    "other rows of x": (at("ldmatrix", offset(1024), FIRST), "wrong"),
    "sums not announced": (at("st.release.gpu", drop(), FIRST), "Deadlock"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name: str) -> None:
    change, noticed = MUTANTS[name]
    problem = dense.Problem(CUT)
    assert outcome(change, lambda: problem.right(problem.run()), ARCH) == noticed


@pytest.mark.parametrize("tile_n", [16, 64, 128])
def test_no_bank_conflicts(tile_n: int) -> None:
    """Of what the main loop reads."""
    problem = dense.Problem(Case(tile_n, 256, 512, workers=2, tiling={"tile_n": tile_n, "scheduler": "static"}))
    with simulating(ARCH, counters=True, checks=False) as runs:
        problem.run()
    loads = [x for x in runs[-1].result.memory if x.space == "shared" and x.kind == "load"]
    assert any(x.instruction.startswith("ldmatrix") for x in loads)
    assert [x for x in loads if x.conflicts] == []


def test_sass() -> None:
    """Tensor cores, no spills; for every step of 16 along K a warp multiplies 16 rows with 128 of x."""
    kernel = WGMMA.compile(plan(1, tile_n=128, stage_tiles=1).config)
    report = inspect_cubin(kernel.cubin, kernel.ptx).kernel
    assert report.spill_loads == report.spill_stores == report.stack_bytes == 0
    opcodes = report.opcodes
    multiplies = sum(count for name, count in opcodes.items() if name.startswith("HMMA.16816.F32.BF16"))
    assert multiplies == 128 and sum(count for name, count in opcodes.items() if name.startswith("LDSM")) == 64


@pytest.mark.parametrize("m, widths", [(17, (16, 32)), (64, (32, 64)), (2048, (128,))])
@pytest.mark.parametrize("sm_count", [170, 188, 48])
def test_planning(m: int, widths: tuple[int, ...], sm_count: int) -> None:
    chosen = choose(PackedProblem(m=m, n=8192, k=8192), ARCHITECTURES[ARCH], sm_count)
    assert not chosen.streams and chosen.config.tile_n in widths and chosen.workers <= sm_count


@pytest.mark.parametrize(
    "tiling", [{"tile_n": 256}, {"cluster_rows": 2}, {"split_k": 2, "scheduler": "static"}], ids=str
)
def test_plans_of_wgmma_are_refused(tiling: dict[str, Any]) -> None:
    x, weight = torch.zeros(32, 256).bfloat16(), prepare_weight(quantize(torch.zeros(64, 256)))
    with simulating(ARCH), pytest.raises(OperandError, match="a plan for sm_120a: got"):
        gemm(x, weight, config=plan(1, **tiling))
