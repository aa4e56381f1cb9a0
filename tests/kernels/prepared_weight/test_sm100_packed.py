"""Prepared weights times 16-bit activations on sm_100a, any number of rows: the streaming kernel, and that on tcgen05
with weights decoded to tensor memory, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import test_packed_gated_gemm as gated
import test_packed_gemm as dense
import test_packed_groups as groups
import torch
from support.mutants import FIRST, LAST, at, drop, instead, offset, outcome
from support.packed_problems import run

from cute_nvfp4 import BlockScaledTensor, gemm, grouped_gemm, prepare_weight, quantize, simulating, to_blocked
from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import MXFP4, MXFP8, MXFP8_E5M2, NVFP4
from cute_nvfp4.kernels.gemm.sm90.config import WgmmaConfig, can_implement
from cute_nvfp4.ops.prepared_weight.gemm import WGMMA
from cute_nvfp4.planning.packed import PackedPlan, PackedProblem, candidates, choose
from cute_nvfp4.runtime.inspection import inspect_cubin
from cute_nvfp4.sim import adversarial
from cute_nvfp4.target import ARCHITECTURES

pytestmark = pytest.mark.sweep(8)
ARCH = "sm_100a"
HALF, BF16 = torch.float16, torch.bfloat16
Case = dense.Case


def plan(workers: int, **tiling: Any) -> PackedPlan:
    return PackedPlan(WgmmaConfig(arch=ARCHITECTURES[ARCH], **tiling), workers)


WHOLE, SHORT = {"scheduler": "static"}, {"stage_tiles": 1}
CASES = (
    # chosen: rows beyond the streaming kernel's, few rows with bias, x that is decoded first
    Case(33, 130, 272, out=BF16),
    Case(200, 264, 144, HALF, HALF, bias=BF16),
    Case(3, 200, 128, bias=torch.float32, out=BF16),
    Case(20, 100, 160, HALF, quantized=True),
    # streamed
    Case(1, 200, 256),
    Case(13, 200, 640, HALF, HALF, format=MXFP4),
    Case(9, 130, 128, HALF, quantized=True),
    # one warpgroup or two; every place of the ring decoded, or as many as tensor memory holds; whole tiles, cut ones
    Case(5, 200, 640, workers=5, tiling={"tile_n": 16}),
    Case(20, 300, 1664, workers=1, tiling={"tile_n": 32, **WHOLE, "stages": 4}),
    Case(70, 130, 384, HALF, HALF, 2, {"tile_n": 64, **WHOLE}, format=MXFP4),
    Case(140, 300, 896, workers=4, tiling={"tile_n": 128, "warpgroups": 4, **SHORT}, out=BF16),
    Case(200, 500, 1664, workers=1, tiling={"tile_n": 128, "warpgroups": 4, **WHOLE}, out=BF16),
    Case(300, 500, 896, workers=3, tiling={"tile_n": 192, "warpgroups": 4, **SHORT}, out=HALF, format=MXFP8),
    Case(300, 300, 640, HALF, workers=2, tiling={"tile_n": 256, **SHORT, **WHOLE}, format=MXFP8_E5M2),
)
CUT = CASES[7]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact(case: Case) -> None:
    problem = dense.Problem(case)
    assert problem.right(run(problem, ARCH))


def drawn(seed: int) -> Case:
    """A problem of any size and formats, by the plan that is chosen or by any other."""
    g = np.random.default_rng([seed, 17])
    m, n, k = int(g.integers(1, 300)), int(g.integers(1, 500)), 32 * int(g.integers(1, 40))
    dtype, out = (HALF, BF16)[g.integers(2)], (HALF, BF16, torch.float32)[g.integers(3)]
    bias = (None, HALF, torch.float32)[g.integers(3)]
    format = (NVFP4, NVFP4, MXFP4)[g.integers(3)]
    if g.integers(3) == 0:
        return Case(m, n, k, dtype, out, bias=bias, format=format)
    while True:
        tiling = {
            "tile_n": int(g.choice((16, 32, 48, 64, 96, 128, 160, 192, 256))), "warpgroups": int(g.choice((2, 4))),
            "stage_tiles": int(g.choice((1, 2))), "scheduler": str(g.choice(("static", "stream_k"))),
            "stages": int(g.choice((0, 0, 2, 3, 4))),
        }  # fmt: skip
        if not can_implement(WgmmaConfig(arch=ARCHITECTURES[ARCH], **tiling)):
            return Case(m, n, k, dtype, out, int(g.integers(1, 8)), tiling, bias=bias, format=format)


@pytest.mark.parametrize("seed", range(40))
def test_random_problems(seed: int) -> None:
    problem = dense.Problem(drawn(seed))
    assert problem.right(run(problem, ARCH))


GATED = (
    gated.Case(33, 136, 272, out=BF16),
    gated.Case(9, 70, 288, "relu", out=HALF),
    gated.Case(70, 72, 384, "gelu_tanh", HALF, HALF, plan(2, tile_n=64), name="n64"),
    gated.Case(140, 136, 256, out=BF16, plan=plan(2, tile_n=128, warpgroups=4, stage_tiles=1), name="n128"),
)


@pytest.mark.parametrize("case", GATED, ids=str)
def test_gated(case: gated.Case) -> None:
    problem = gated.Problem(case)
    assert problem.right(run(problem, ARCH))


GROUPS = (
    groups.Case((1, 0, 3), 130, 256, out=BF16),
    groups.Case((5, 0, 20), 100, 160, HALF, HALF, 2, {"tile_n": 16}, quantized=True, before=1),
    groups.Case((33, 7, 70), 136, 256, workers=3, tiling={"tile_n": 64, "warpgroups": 4}, out=BF16),
    groups.Case((130, 0, 20, 90), 130, 384, workers=2, tiling={"tile_n": 128}),
    groups.Case((300, 0, 20, 190), 130, 384, workers=2, tiling={"tile_n": 256, "stage_tiles": 1}),
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


@pytest.mark.parametrize("m", [9, 24, 130])
def test_bits_of_sm_90a(m: int) -> None:
    """On data whose every sum has few bits, by the plans that are chosen."""
    generator = torch.Generator().manual_seed(m)
    x = torch.randint(-4, 5, (m, 528), generator=generator).bfloat16()
    data = torch.randint(0, 256, (136, 264), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0x38, 0x48, (136, 33), dtype=torch.uint8, generator=generator) & 0xF8  # 1 or 2
    weight = prepare_weight(BlockScaledTensor(data, to_blocked(scale)))
    found = []
    for arch in ("sm_90a", ARCH, "sm_103a"):
        with simulating(arch) as runs:
            found.append(gemm(x, weight, out_dtype=torch.float32))
        assert runs[-1].kernel.arch == arch
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert torch.equal(found[0].double(), x.double() @ weight.dequantize(torch.float64).T)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", adversarial(6), ids=str)
@pytest.mark.parametrize("case", [CUT, CASES[8], CASES[13]], ids=str)
def test_any_schedule_is_right(case: Case, schedule: Any) -> None:
    """No hazard; bits may differ, for the simulator joins MMAs that are under way together."""
    problem = dense.Problem(case)
    assert problem.right(run(problem, ARCH, schedule=schedule))


MUTANTS = {
    "a full stage not waited for": (at("mbarrier.try_wait", instead("setp.eq.b32 {0}, 0, 0;"), LAST), "Race"),
    "a stage not given back": (at("tcgen05.commit", drop(), FIRST), "Deadlock"),
    "decoded weights not waited for": (at("tcgen05.wait::st", drop(), FIRST), "Race"),
    "products left out": (at("tcgen05.mma", drop(), FIRST), "UninitializedRead"),
    "another half of the lanes": (at("tcgen05.ld", offset(16 << 16), FIRST), "wrong"),
    "sums not announced": (at("st.release.gpu", drop(), FIRST), "Deadlock"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name: str) -> None:
    change, noticed = MUTANTS[name]
    problem = dense.Problem(CUT)
    assert outcome(change, lambda: problem.right(problem.run()), ARCH) == noticed


def test_sass() -> None:
    """Nothing is spilled; a warp stores both of its slabs of a packed tile to tensor memory at a time."""
    kernel = WGMMA.compile(plan(1, tile_n=256, stage_tiles=1, scheduler="static").config)
    report = inspect_cubin(kernel.cubin, kernel.ptx).kernel
    assert report.spill_loads == report.spill_stores == report.stack_bytes == 0
    opcodes = report.opcodes
    assert sum(count for name, count in opcodes.items() if name.startswith("UTCHMMA")) == 2 * 4
    assert sum(count for name, count in opcodes.items() if name.startswith("STTM")) == 2 * 2


@pytest.mark.parametrize("m", [17, 64, 200, 2048])
def test_planning(m: int) -> None:
    """No tile is wider than need be, and rings are deep enough to decode ahead."""
    problem = PackedProblem(m=m, n=8192, k=8192)
    for chosen in candidates(problem, ARCHITECTURES[ARCH], 148):
        c = chosen.config
        assert not chosen.streams and chosen.workers <= 148 and c.ring_stages % c.decoded_stages == 0
        assert c.decoded_stages >= 2 and c.tile_n - 64 < m
    assert choose(PackedProblem(m=16, n=8192, k=8192), ARCHITECTURES[ARCH], 148).streams


@pytest.mark.parametrize(
    "tiling, message",
    [
        ({"tile_n": 8}, "tile_n of sm_100a: got 8, expected a multiple of 16"),
        ({"warpgroups": 3}, "a plan for sm_100a: got 3 warpgroups"),
        ({"split_k": 2, "scheduler": "static"}, "a plan for sm_100a: got 2 warpgroups, clusters of 2"),
        ({"tile_n": 256, "warpgroups": 4}, "columns of tensor memory beside sums: got 0 for stages of 64"),
    ],
    ids=str,
)
def test_plans_that_cannot_be(tiling: dict[str, Any], message: str) -> None:
    x, weight = torch.zeros(32, 256).bfloat16(), prepare_weight(quantize(torch.zeros(64, 256)))
    with simulating(ARCH), pytest.raises(OperandError, match=message):
        gemm(x, weight, config=plan(1, **tiling))
