"""Products of NVFP4 operands on sm_90a that nobody packs: the weight's rows are decoded as they lie."""

from __future__ import annotations

import pytest
import torch
from support import backends
from support.mutants import FIRST, LAST, Ptx, at, constant, instead, offset, outcome

from cute_nvfp4 import BlockScaledTensor, gated_gemm, gemm, grouped_gemm, prepare, simulating, to_blocked
from cute_nvfp4.kernels.gemm.packed.rows import column_of
from cute_nvfp4.planning.packed import PackedPlan, PackedProblem, candidates
from cute_nvfp4.sim import adversarial
from cute_nvfp4.target import ARCHITECTURES

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.usefixtures("hopper")]


def operand(rows: int, k: int, seed: int, batched: bool = False) -> BlockScaledTensor:
    """Every code and every scale but NaN, negative ones, zeros and subnormals among them; padding holds anything."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 256, (rows, k // 16), dtype=torch.uint8, generator=generator)
    scale[scale & 0x7F == 0x7F] = 0x38
    blocked = to_blocked(scale)
    own = to_blocked(torch.full_like(scale, 255)) == 255
    anything = torch.randint(0, 256, blocked.shape, dtype=torch.uint8, generator=generator)
    blocked = torch.where(own, blocked, anything).view(blocked.dtype)
    data, blocked = backends.place(data), backends.place(blocked)
    return BlockScaledTensor(data.unsqueeze(0) if batched else data, blocked, backends.place(torch.tensor(0.75)))


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over that of the exact result; NaN if anything was not written."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def plans(gate: str = "") -> list[PackedPlan]:
    """One candidate of each structure: schedulers, CTAs and warpgroups that share tiles, warpgroups of a CTA."""
    problem = PackedProblem(
        m=130, n=300, k=512, dtype="float16", out="float32", packing="nvfp4_rows", factors=2, gate=gate
    )
    found: dict[tuple, PackedPlan] = {}
    for plan in candidates(problem, ARCHITECTURES["sm_90a"], 132):
        c = plan.config
        found.setdefault((c.scheduler, c.split_k, c.k_groups, c.ctas_per_sm, c.cluster_rows), plan)
    return list(found.values())


def test_the_order_of_columns() -> None:
    assert sorted(map(column_of, range(128))) == list(range(128))
    # a lane's columns of each step are of one block, and so are those of the other steps of a tile
    for tile in range(2):
        for lane in range(4):
            places = [64 * tile + 16 * s + 8 * h + 2 * lane + e for s in range(4) for h in range(2) for e in range(2)]
            assert {column_of(place) // 16 for place in places} == {2 * lane + tile}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("plan", plans(), ids=str)
def test_every_structure(plan: PackedPlan) -> None:
    a, b = operand(130, 512, 1), operand(300, 512, 2)
    out = torch.full((130, 300), float("nan"), device=backends.device())
    with simulating("sm_90a"):
        gemm(a, b, alpha=0.5, out=out, config=plan)
    assert off(out, gemm(a, b, alpha=0.5, backend="reference", out_dtype=torch.float32)) < 2.0**-20


def test_gated_of_a_batch_of_one() -> None:
    a, gate, up = (operand(rows, 256, seed, batched=True) for seed, rows in enumerate((20, 136, 136)))
    out = torch.full((1, 20, 136), float("nan"), dtype=torch.float32, device=backends.device())
    options = {"gate": "identity", "alpha": 2.0**-12}
    with simulating("sm_90a") as runs:
        gated_gemm(a, gate, up, out=out, **options)
    assert len(runs) in (0, 2), "a call decodes x and multiplies"
    exact = gated_gemm(a, gate, up, backend="reference", out_dtype=torch.float32, **options)
    assert off(out, exact) < 2.0**-20
    assert off(out, gated_gemm(a, up, up, backend="reference", out_dtype=torch.float32, **options)) > 0.1


@pytest.mark.parametrize("groups", [3, 20])
def test_list(groups: int) -> None:
    """Sizes of their own; more groups than a kernel has parameters for have a table in memory."""
    sizes = [(20, 130, 256), (3, 70, 128), (70, 16, 384)] + [(1, 8, 128)] * (groups - 3)
    problems = [(operand(m, k, i), operand(n, k, 99 + i)) for i, (m, n, k) in enumerate(sizes)]
    outs = [torch.full(size[:2], float("nan"), device=backends.device()) for size in sizes]
    with simulating("sm_90a"):
        grouped_gemm(problems, alpha=0.5, out=outs)
    exact = grouped_gemm(problems, alpha=0.5, backend="reference", out_dtype=torch.float32)
    assert all(off(x, y) < 2.0**-20 for x, y in zip(outs, exact))


def test_nan_among_scales_and_a_bias() -> None:
    """A scale of NaN makes its row of b NaN, and no other; a call can be prepared."""
    a, b = operand(20, 128, 1), operand(40, 128, 2)
    scale = b.rowmajor_scale()[0].view(torch.uint8).clone()
    scale[3, 5], scale[39, 0] = 0x7F, 0xFF
    b = BlockScaledTensor(b.data, to_blocked(scale), b.global_scale)
    bias = torch.arange(40.0, device=backends.device())
    with simulating("sm_90a"):
        found = gemm(a, b, bias=bias, out_dtype=torch.float32)
        again = prepare(gemm, a, b, bias=bias, out_dtype=torch.float32)()
    rows = torch.ones(40, dtype=torch.bool, device=found.device)
    rows[[3, 39]] = False
    exact = gemm(a, b, bias=bias, backend="reference", out_dtype=torch.float32)
    assert found[:, ~rows].isnan().all() and off(found[:, rows], exact[:, rows]) < 2.0**-20
    assert found[:, rows].equal(again[:, rows])


@pytest.mark.sim_only("runs schedules")
@pytest.mark.sweep(5)
@pytest.mark.parametrize("schedule", adversarial(20), ids=str)
def test_any_schedule_gives_the_same_bits(schedule) -> None:
    a, b = operand(40, 256, 1), operand(136, 256, 2)
    with simulating("sm_90a"):
        found = gemm(a, b, out_dtype=torch.float32)
    with simulating("sm_90a", schedule=schedule, checks=True):
        assert torch.equal(gemm(a, b, out_dtype=torch.float32), found)


ARRIVED = instead("mbarrier.arrive.b64 _, {0};")
READY = instead("setp.eq.b32 {0}, 0, 0;")
MUTANTS = (
    ("subnormal scales lost", at("mul.rn.f16x2", instead("mov.b32 {0}, {1};")), "wrong"),
    ("signs of codes dropped", at("lop3.b32", constant(0x80008000, 0), LAST), "wrong"),
    ("copies that nobody waits for", at("cp.async.mbarrier", ARRIVED), "Race"),
    ("a stage not waited for", at("mbarrier.try_wait", READY), "Race"),
    ("a row's other half", at("cp.async.cg", offset(16), FIRST), "wrong"),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.parametrize("name, change, noticed", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_noticed(name: str, change: Ptx, noticed: str) -> None:
    a, b = operand(20, 128, 1), operand(40, 128, 2)
    exact = gemm(a, b, backend="reference", out_dtype=torch.float32)
    assert outcome(change, lambda: off(gemm(a, b, out_dtype=torch.float32), exact) < 2.0**-20, "sm_90a") == noticed
