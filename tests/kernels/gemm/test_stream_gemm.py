"""The streaming GEMM of packed weights: its compiled PTX against the exact product, on full-range data."""

from __future__ import annotations

from dataclasses import replace

import cutlass.cute as cute
import pytest
import torch
from support.mutants import FIRST, LAST, Source, at, constant, drop, instead, number, outcome, traced_with
from support.packed_problems import run
from support.stream_problems import Case, make

from cute_nvfp4 import gemm, prepare_weight, quantize
from cute_nvfp4.errors import OperandError
from cute_nvfp4.kernels.gemm.packed.stream_config import StreamConfig
from cute_nvfp4.ops.prepared_weight.gemm import STREAM
from cute_nvfp4.planning.packed import PackedPlan, PackedProblem, choose
from cute_nvfp4.runtime.session import simulated_gpu
from cute_nvfp4.sim import Race, adversarial
from cute_nvfp4.target import ARCHITECTURES

pytestmark = [pytest.mark.kernels]

HALF = {"slabs": 4, "warps_m": 2, "warps_k": 4, "stages": 8}
CASES = (
    # one unit a CTA; units cut between CTAs; whole ones after them
    Case(1, 128, 256, 2, out="bfloat16", tiling=HALF),
    Case(16, 256, 512, 5, tiling={"stages": 6}),
    Case(3, 640, 128, 2, tiling={"stages": 4}),
    # rows, K and columns that fill no tile; fp16; two tiles a stage; one slab; one CTA for each step
    Case(7, 97, 464, 7, "float16", "float16", HALF),
    Case(9, 130, 512, 4, "float16", tiling={"slabs": 2, "warps_m": 1, "warps_k": 8, "stage_tiles": 2, "stages": 8}),
    Case(16, 41, 512, 9, tiling={"slabs": 1, "warps_m": 1, "warps_k": 4, "stages": 8}),
    Case(32, 384, 256, 4, tiling={"warps_m": 8, "warps_k": 2, "stages": 4}),
    Case(2, 128, 256, 4, tiling={"stages": 2}),
    Case(3, 130, 256, 3, "float16", "float16", tiling={"stages": 4}, padded=True),
    # started while the launch before it runs: whole tiles, and parts of them
    Case(16, 256, 512, 5, tiling={"stages": 6, "programmatic": "weights"}),
    Case(7, 97, 464, 7, "float16", "float16", {**HALF, "programmatic": "weights"}),
    # NVFP4 times NVFP4
    Case(5, 128, 512, 3, "float16", tiling={**HALF, "warps_m": 1, "quantized_x": True}),
    Case(16, 100, 256, 2, "float16", tiling={"stage_tiles": 2, "stages": 4, "quantized_x": True}),
)  # fmt: skip
CUT = Case(5, 256, 320, 3, tiling={**HALF, "stages": 4})


@pytest.mark.parametrize("rows,k", [(51200, 5120), (57344, 8192), (8736, 2704)])
def test_units_after_whole_ones_are_not_cut_into_many_parts(rows: int, k: int) -> None:
    """One warp adds them up: where 132 CTAs shared the last 4 of 400 units, an H200 took 300 µs instead of 60."""
    plan = choose(PackedProblem(m=16, n=rows, k=k), ARCHITECTURES["sm_90a"], 132)
    units = -(-rows // plan.config.rows)
    assert units <= plan.workers or units % plan.workers == 0 or plan.workers / (units % plan.workers) < 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact(case: Case) -> None:
    problem = make(case)
    assert not problem.wrong(run(problem)).any()


@pytest.mark.sim_only("runs schedules")
@pytest.mark.parametrize("schedule", adversarial(4), ids=str)
def test_any_schedule_gives_the_same_bits(schedule) -> None:
    problem = make(CUT)
    out = run(problem, schedule=schedule)
    assert not problem.wrong(out).any()
    assert torch.equal(out, run(problem))


def test_nan_scale_is_its_row() -> None:
    """Row 20 of the second unit, in one column of scales; the rest does not notice."""
    problem = make(CUT)
    clean = run(problem)
    slab, g = divmod(128 + 20 - 128, 16)
    problem.packed[1, 2, 4096 + slab * 64 + g * 8] = 0xFF
    out = run(problem)
    rows = torch.zeros(256, dtype=torch.bool, device=out.device)
    rows[128 + 20] = True
    assert out[:, rows].isnan().all() and torch.equal(out[:, ~rows], clean[:, ~rows])


def test_limits_are_named() -> None:
    for tiling, message in (({"columns": 24}, "columns"), ({"slabs": 2}, "divisor"), ({"warps_k": 8}, "at most 16")):
        with pytest.raises(OperandError, match=message):
            STREAM.build(StreamConfig(**tiling))


@pytest.mark.parametrize(
    "n, k, quantized, expected",
    [
        (8192, 8192, False, (4, 128)),
        (28672, 8192, False, (8, 112)),
        (4096, 14336, True, (2, 128)),
        (1024, 8192, False, (2, 132)),  # cut: too few units of any height
        (4096, 192, True, None),  # no scales of x for the last tile of the packed weight
    ],
)
def test_units_are_whole_where_they_can_be(n, k, quantized, expected) -> None:
    dtype = "float16" if quantized else "bfloat16"
    plan = choose(PackedProblem(m=4, n=n, k=k, dtype=dtype, quantized=quantized), ARCHITECTURES["sm_90a"], 132)
    assert ((plan.config.slabs, plan.workers) if plan.streams else None) == expected


MUTANTS = (
    ("a scale of the other row", at("mul.rn.bf16x2", instead("mul.rn.bf16x2 {0}, {1}, {1};"), FIRST), "wrong"),
    ("a product dropped", at("mma.sync", instead("mov.b32 %r1, %r1;"), LAST), "wrong"),
    ("the mask of the codes", at("", constant(0x81C081C0, 0x81808180)), "wrong"),
    ("the chunk of x not swizzled", at("xor.b32", number(2, 64, 32)), "wrong"),
    ("flags not waited for", at("ld.acquire.gpu", instead("mov.b32 {0}, 1;")), "Race"),
    ("sums read before they are written", at("bar.sync", drop(), slice(3, 4)), "Race"),
    ("stages not waited for", at("mbarrier.try_wait", instead("setp.eq.b32 {0}, 0, 0;"), LAST), "Race"),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.parametrize("name, change, noticed", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_noticed(name, change, noticed) -> None:
    problem = make(CUT)
    found = outcome(change, lambda: not problem.wrong(problem.run()).any(), "sm_90a")
    assert found == noticed


EARLY = PackedPlan(StreamConfig(slabs=4, warps_m=2, warps_k=4, stages=4, programmatic="weights"), 3)


def chained() -> bool:
    """Whether a product of a product is right, where each may begin while the launch before it runs."""
    generator = torch.Generator().manual_seed(9)
    x, *weights = (torch.randn(rows, 320, generator=generator).bfloat16() for rows in (5, 320, 320))
    weights = [prepare_weight(quantize(weight, backend="reference")) for weight in weights]
    want = got = x
    for weight in weights:
        want = gemm(want, weight, backend="reference")
    with simulated_gpu("sm_90a"):
        got = got.cuda()
        there = [replace(x, packed=x.packed.cuda(), global_scale=x.global_scale.cuda()) for x in weights]
        for weight in there:
            got = gemm(got, weight, config=EARLY)
        got = got.cpu()
    return want.isfinite().all().item() and (got.double() - want.double()).norm() < 2.0**-7 * want.double().norm()


@pytest.mark.sim_only("opens a session")
def test_a_product_begins_while_its_rows_are_written() -> None:
    assert chained()


@pytest.mark.sim_only("opens a session")
def test_a_product_that_does_not_wait_for_its_rows_is_noticed() -> None:
    with (
        traced_with(Source(cute.arch, "griddepcontrol_wait", lambda: None)),
        pytest.raises(Race, match="griddepcontrol"),
    ):
        chained()
