"""The streaming kernel of groups of few rows: its compiled PTX against the exact products, on full-range data."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from support import backends
from support.moe_problems import Layer
from support.moe_problems import Problem as experts_problem
from support.mutants import FIRST, LAST, at, drop, instead, outcome
from support.packed_group_problems import Case, Problem
from support.packed_problems import gated_product, run

from cute_nvfp4 import grouped_gemm_contiguous, prepare_weight, quantize, simulating
from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import MXFP4
from cute_nvfp4.kernels.gemm.packed.grouped_stream_config import GroupedStreamConfig, can_implement_groups
from cute_nvfp4.kernels.gemm.routed_config import RoutedConfig
from cute_nvfp4.ops.moe.maps import Maps, routing_maps
from cute_nvfp4.ops.moe.product import expert_product
from cute_nvfp4.ops.prepared_weight.rows import STREAM_GROUPS
from cute_nvfp4.planning import packed_groups
from cute_nvfp4.planning.packed import PackedPlan
from cute_nvfp4.planning.packed_groups import PackedGroups, choose_groups
from cute_nvfp4.runtime.session import simulated_gpu
from cute_nvfp4.sim import adversarial
from cute_nvfp4.target import ARCHITECTURES

pytestmark = [pytest.mark.kernels("sm_90a")]

HALF = {"slabs": 4, "warps_m": 2, "warps_k": 4, "stages": 8}
FULL = {"slabs": 8, "warps_m": 8, "warps_k": 2, "stage_tiles": 2, "stages": 4}
NARROW = {"slabs": 2, "warps_m": 1, "warps_k": 4, "stage_tiles": 2, "stages": 8}
CASES = (
    # cut work tiles, an empty group, two passes over one group
    Case((3, 0, 9, 1), 130, 320, workers=5, tiling={**HALF, "columns": 8, "cut_bytes": 0}),
    # whole ones after the cut ones; many groups, most of them empty; rows before the first
    Case((0,) * 30 + (2, 5, 0, 0, 9), 100, 144, torch.float16, workers=2, tiling={**NARROW, "columns": 16}, before=2),
    # a few cut ones that only some CTAs share
    Case((1, 2), 256, 512, out=torch.bfloat16, workers=40, tiling={**FULL, "columns": 8, "cut_bytes": 0}),
    # one more than the CTAs: cutting it would save less than it costs
    Case((40, 17), 72, 256, workers=5, tiling={**HALF, "columns": 32}),
    # no rows at all
    Case((0, 0), 64, 128, workers=2, tiling={**HALF, "columns": 8}),
    Case((5, 20), 41, 160, workers=4, tiling={**FULL, "columns": 16}, format=MXFP4),
)
CUT = CASES[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact(case: Case) -> None:
    """Rows of no group are not written."""
    problem = Problem(case)
    assert problem.right(run(problem))


def test_gated() -> None:
    """Gate and up prepared together, in a mixture of whole and cut work tiles."""
    generator, device, sizes, (n, k) = torch.Generator().manual_seed(7), backends.device(), (3, 0, 10), (72, 288)
    both = [quantize(torch.randn(3, n, k, generator=generator).to(device), backend="reference") for _ in range(2)]
    weight = prepare_weight(*both)
    x = (torch.randn(13, k, generator=generator) / 10).bfloat16().to(device)
    plan = PackedPlan(GroupedStreamConfig(**HALF, columns=8, cut_bytes=0), 5)
    offsets = [*accumulate(sizes, initial=0)]
    with simulating("sm_90a"):
        out = grouped_gemm_contiguous(
            x, weight, offsets=offsets, gate="silu", alpha=0.5, out_dtype=torch.float32, config=plan
        )
    values = [w.dequantize(torch.float64) for w in both]
    for e, (first, last) in enumerate(pairwise(offsets)):
        exact = gated_product(x[first:last].double(), [w[e] for w in values], 0.5, "silu")
        assert exact.right(out[first:last])


ROUTED = {
    # gate and up, gathered; gpt-oss's activation with biases, its weights packed as MXFP4's are, cut
    "silu": (Layer(4, 2, 9, 288, 80), {**HALF, "columns": 8, "programmatic": "all"}, 5),
    "clamped_swiglu": (
        Layer(5, 3, 4, 160, 96, "mxfp4", "clamped_swiglu", biases=True, interleaved=True),
        {**FULL, "columns": 16, "cut_bytes": 0},
        7,
    ),
    # one matrix; ids of experts that are elsewhere; a column of each thread, and four
    "relu2": (
        Layer(9, 2, 3, 112, 176, activation="relu2", routing="same", elsewhere=1, weights=torch.bfloat16),
        {**NARROW, "columns": 32},
        3,
    ),
    # packed for FP8, and decoded to 16 bits
    "FP8": (Layer(4, 2, 9, 288, 80, fp8=True, listed=True), {**HALF, "columns": 8, "programmatic": "all"}, 5),
    "FP8 of MXFP4": (
        Layer(5, 3, 4, 160, 96, "mxfp4", "clamped_swiglu", biases=True, fp8=True, dtype=torch.float16),
        {**FULL, "columns": 16, "cut_bytes": 0},
        7,
    ),
    "FP8, one matrix": (Layer(9, 2, 7, 112, 176, activation="relu2", fp8=True), {**NARROW, "columns": 32}, 3),
}


@pytest.mark.sim_only("asks the simulator for hazards between launches")
@pytest.mark.parametrize("sorted_by", ("kernel", "maps"))
def test_products_back_to_back_write_one_status_in_turn(sorted_by: str) -> None:
    """No launch writes the status while the one before it, which writes the same word, may still run."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).cuda()

    with simulated_gpu("sm_90a") as gpu:
        weights = [prepare_weight(quantize(normal(20, 128, 96), backend="reference")) for _ in range(2)]
        x, out = normal(8, 96).bfloat16(), [normal(16, 128) for _ in range(2)]
        ids, status = torch.randint(0, 20, (8, 2), generator=generator), torch.full((1,), 9, dtype=torch.int32).cuda()
        maps = Maps.of(routing_maps(ids.cuda(), 20), 20)
        order = (None, ids.cuda()) if sorted_by == "kernel" else (maps.offsets, maps.slots)
        plans = [PackedPlan(GroupedStreamConfig(**HALF, columns=8, programmatic=early), 5) for early in ("all", "x")]
        for weight, rows, plan in zip(weights, out, plans):
            expert_product(x, weight, *order, 2, True, out=rows, status=status, config=plan)
        assert [x.launch.programmatic for x in gpu.launches[-2:]] == [True, True] and status.item() == 0


@pytest.mark.parametrize("name", ROUTED)
def test_products_of_experts(name: str, poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are slots: gathered and activated by the first product, weighted by the second; both start early."""
    layer, tiling, ctas = ROUTED[name]
    # the reference rounds rows where they would not stream
    monkeypatch.setattr(packed_groups, "FEW_ROWS_FP8", 8.0)
    problem = experts_problem(layer)
    e, maps = problem.experts, Maps.of(routing_maps(problem.ids, layer.experts, layer.elsewhere), layer.experts)

    def products(plans: list[PackedPlan | None], backend: str) -> tuple[torch.Tensor, ...]:
        first = e.gate_up_factor, e.gate_up_bias, e.activation, None
        options = [{"config": plan, "backend": backend} for plan in plans]
        inner = expert_product(problem.x, e.gate_up, maps.offsets, maps.slots, layer.top, True, *first, **options[0])
        second = e.down_factor, e.down_bias, None, problem.topk_weights
        return inner, expert_product(inner, e.down, maps.offsets, maps.slots, layer.top, False, *second, **options[1])

    early = {"programmatic": "x" if tiling.get("programmatic") else ""}
    plans = [PackedPlan(GroupedStreamConfig(**x), ctas) for x in (tiling, tiling | early)]
    with simulating("sm_90a", checks=True) as runs:
        got = products(plans, backends.backend())
    assert {x.name for x in runs} <= {"stream_groups"}
    last = int(maps.offsets[-1])
    for x, want in zip(got, products([None, None], "reference"), strict=True):
        error = (x[:last].double() - want[:last].double()).norm()
        assert error <= 2.0**-7 * want[:last].double().norm()


@pytest.mark.sim_only("runs schedules")
@pytest.mark.sweep(2)
@pytest.mark.parametrize("schedule", adversarial(4), ids=str)
def test_any_schedule_gives_the_same_bits(schedule) -> None:
    problem = Problem(CUT)
    out = run(problem, schedule=schedule, checks=True)
    assert problem.right(out) and torch.equal(out.nan_to_num(), run(problem).nan_to_num())


MUTANTS = (
    ("flags not waited for", at("ld.acquire.gpu", instead("mov.b32 {0}, 1;")), "Race"),
    ("sums read before they are written", at("bar.sync", drop(), slice(-4, -3)), "Race"),
    ("the table not waited for", at("bar.sync", drop(), FIRST), "Race"),
    ("copies of x not waited for", at("cp.async.mbarrier", instead("mbarrier.arrive.shared::cta.b64 _, {0};")), "Race"),
    ("rows of x not copied", at("cp.async.cg", drop(), LAST), "UninitializedRead"),
    ("stages not waited for", at("mbarrier.try_wait", instead("setp.eq.b32 {0}, 0, 0;"), LAST), "Race"),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name, change, noticed", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_noticed(name, change, noticed) -> None:
    problem = Problem(CUT)
    assert outcome(change, lambda: problem.right(problem.run()), "sm_90a") == noticed


def test_limits_are_named() -> None:
    for tiling, message in (
        ({"quantized_x": True}, "x of a streaming"),
        ({"capacity": 40}, "capacity"),
        ({"slabs": 2}, "divisor"),
    ):
        with pytest.raises(OperandError, match=message):
            STREAM_GROUPS.build(GroupedStreamConfig(**tiling))


def test_plans_that_cannot_stream() -> None:
    """A list of groups, stages that do not divide K, more steps than the kernel can divide."""
    arch, plan = ARCHITECTURES["sm_90a"], PackedPlan(GroupedStreamConfig(stage_tiles=4), 132)
    for problem, message in (
        (PackedGroups(sizes=((1, 64, 64), (1, 64, 64))), "a list"),
        (PackedGroups(sizes=((4, 64, 64),), stack=4), "stage_tiles"),
        (PackedGroups(sizes=((4096, 65536, 65536),), stack=1024), "product below"),
    ):
        with pytest.raises(OperandError, match=message):
            choose_groups(problem, arch, 132, plan)


def test_experts_of_few_rows_stream() -> None:
    """By the average rows of an expert that is used: eight columns, sixteen, and tiles; tiles on sm_120a."""
    routed = RoutedConfig(gathered=True)

    def plan(rows: int, arch: str = "sm_90a", **options: bool) -> PackedPlan:
        given = replace(routed, **options)
        problem = PackedGroups(sizes=((rows, 768, 2048),), stack=128, gate="" if options else "silu", routed=given)
        return choose_groups(problem, ARCHITECTURES[arch], 132)

    few, some = plan(8).config, plan(128 * 7).config
    assert (few.columns, few.programmatic, some.columns) == (8, "all", 16)
    # halves of work tiles where there are fewer than CTAs
    assert (few.slabs, some.slabs) == (4, 8)
    assert not plan(128 * 10).streams and not plan(8, "sm_120a").streams
    assert plan(8, gathered=False).config.programmatic == "x"


def test_bad_offsets_are_told_and_clamped() -> None:
    problem = Problem(CUT)
    problem.offsets[2] = 1
    out = torch.full(problem.exact.shape, 3.0, device=backends.device())
    status = torch.zeros(1, dtype=torch.int32, device=backends.device())
    with simulating("sm_90a"):
        grouped_gemm_contiguous(
            problem.x,
            problem.weight,
            offsets=problem.offsets,
            alpha=problem.alpha,
            out=out,
            status=status,
            config=CUT.plan,
        )
    assert status.item() == 3
    # group 1 is empty either way, and the others have the rows that they had
    assert torch.allclose(out[:13].double(), problem.exact[:13], rtol=1e-4, atol=1e-2) and (out[13:] == 3.0).all()


@pytest.mark.sim_only("reads a configuration")
def test_factors_of_fp8_weights_need_slots() -> None:
    """Without slots the kernel would leave the factors of the weights' rows out."""
    config = GroupedStreamConfig(of_fp8=True)
    assert "weights packed for FP8: got others" in can_implement_groups(config)
    assert not can_implement_groups(replace(config, routed=RoutedConfig(gathered=True)))
