"""Products of NVFP4 operands on sm_90a that nobody packs: the weight's rows are decoded as they lie."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import cutlass.cute as cute
import pytest
import torch
from support import backends
from support.mutants import FIRST, LAST, Ptx, Source, at, constant, drop, instead, offset, outcome, traced_with
from support.plain_operands import off, operand

from cute_nvfp4 import BlockScaledTensor, gated_gemm, gemm, grouped_gemm, prepare, quantize, simulating, to_blocked
from cute_nvfp4.errors import OperandError
from cute_nvfp4.kernels.gemm.packed.rows import column_of
from cute_nvfp4.kernels.gemm.sm90.config import WgmmaConfig
from cute_nvfp4.kernels.gemm.sm90.limits import can_implement
from cute_nvfp4.kernels.gemm.sm90.schedules import EqualShares, WholeTiles
from cute_nvfp4.ops import list_fast_path
from cute_nvfp4.planning.packed import PackedPlan, PackedProblem, candidates
from cute_nvfp4.runtime.session import simulated_gpu
from cute_nvfp4.sim import Race, adversarial
from cute_nvfp4.target import ARCHITECTURES

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.usefixtures("hopper")]


def plans() -> list[PackedPlan]:
    """One candidate of each structure: schedulers, CTAs and warpgroups that share tiles, warpgroups of a CTA, and who
    decodes x."""
    kind = {"dtype": "float16", "out": "float32", "packing": "nvfp4_rows", "factors": 2, "quantized": True}
    problem = PackedProblem(m=130, n=300, k=512, **kind)
    found: dict[tuple, PackedPlan] = {}
    for plan in candidates(problem, ARCHITECTURES["sm_90a"], 132):
        c = plan.config
        found.setdefault((c.schedule, c.ctas_per_sm, c.decodes_x), plan)
    return list(found.values())


TILED = {"dtype": "float16", "packing": "nvfp4_rows", "out": "float32", "vector": False}
BEFORE = PackedPlan(WgmmaConfig(tile_n=64, schedule=WholeTiles(), **TILED), 2)
MEANWHILE = PackedPlan(WgmmaConfig(tile_n=64, schedule=WholeTiles(), decodes_x=True, **TILED), 2)
"""Plans that decode x by a launch before, and by the warps that load."""


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


@pytest.mark.parametrize(
    "fields",
    [{"tile_n": 96}, {"schedule": EqualShares(cluster_rows=2)}, {"ctas_per_sm": 2}, {"packing": "nvfp4"}],
    ids=str,
)
def test_where_loading_warps_cannot_decode_x(fields: dict) -> None:
    config = replace(MEANWHILE.config, **fields)
    assert "loading warps that decode x: got" in can_implement(config)
    assert not can_implement(MEANWHILE.config)


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


@pytest.mark.parametrize("plan", [BEFORE, MEANWHILE], ids=["before", "meanwhile"])
def test_a_batch_is_one_product(plan: PackedPlan) -> None:
    """Matrices of a batch anywhere, a bias of each; the call decodes x and multiplies, or does both in a launch."""
    parts = [operand(70, 256, seed) for seed in range(3)], [operand(140, 256, 9 + seed) for seed in range(3)]
    a, b = (stacked(some, extra) for some, extra in zip(parts, (2, 0)))
    bias = torch.randn(3, 150, generator=torch.Generator().manual_seed(1))[:, :140]
    bias = backends.place(bias)
    out = torch.full((3, 80, 140), float("nan"), device=backends.device())
    with simulating("sm_90a") as runs:
        gemm(a, b, alpha=2.0**-12, bias=bias, out=out[:, :70], config=plan)
    assert len(runs) in (0, 1 if plan.config.decodes_x else 2)
    exact = gemm(a, b, alpha=2.0**-12, bias=bias, backend="reference", out_dtype=torch.float32)
    assert off(out[:, :70], exact) < 2.0**-20 and out[:, 70:].isnan().all()
    # another matrix of any of the three would be another result
    assert all(off(exact[i], exact[j]) > 0.1 for i in range(3) for j in range(i))


def stacked(parts: list[BlockScaledTensor], extra: int) -> BlockScaledTensor:
    """A batch of operands, with ``extra`` rows of anything between the matrices of data."""
    rows, columns = parts[0].data.shape
    data = torch.full((len(parts), rows + extra, columns), 0x77, dtype=torch.uint8, device=backends.device())
    data[:, :rows] = torch.stack([part.data for part in parts])
    # in the order of memory: (rest_m, rest_k, 32, 4, 4) of each
    scale = torch.cat([part.blocked_scale().permute(5, 2, 4, 0, 1, 3).flatten() for part in parts])
    return BlockScaledTensor(data[:, :rows], scale, parts[0].global_scale)


def test_gated_of_a_batch() -> None:
    parts = [[operand(rows, 128, 3 * seed + i) for i in range(2)] for seed, rows in enumerate((20, 72, 72))]
    a, gate, up = (stacked(some, 0) for some in parts)
    options = {"gate": "identity", "alpha": 2.0**-12}
    with simulating("sm_90a"):
        found = gated_gemm(a, gate, up, out_dtype=torch.float32, **options)
    assert off(found, gated_gemm(a, gate, up, backend="reference", out_dtype=torch.float32, **options)) < 2.0**-20


@pytest.mark.parametrize("batch", [(), (2,)])
def test_gated_of_one_weight_that_is_both(batch: tuple[int, ...]) -> None:
    """All rows of the one before those of the other: neither is copied, nor packed."""
    generator = torch.Generator().manual_seed(4)
    a, both = (
        quantize(backends.place(torch.randn(*batch, m, 128, generator=generator)), backend="reference")
        for m in (20, 512)
    )
    options = {"gate": "identity", "out_dtype": torch.float32}
    with simulating("sm_90a") as runs:
        found = gated_gemm(a, both, **options)
    assert len(runs) in (0, 2) and off(found, gated_gemm(a, both, backend="reference", **options)) < 2.0**-20


@pytest.mark.parametrize("groups", [3, 20])
def test_list(groups: int) -> None:
    """Sizes of their own; more groups than a kernel has parameters for have a table in memory."""
    sizes = [(20, 130, 256), (3, 70, 128), (70, 16, 384)] + [(1, 8, 128)] * (groups - 3)
    problems = [(operand(m, k, i), operand(n, k, 99 + i)) for i, (m, n, k) in enumerate(sizes)]
    outs = [torch.full(size[:2], float("nan"), device=backends.device()) for size in sizes]
    with simulating("sm_90a") as runs:
        grouped_gemm(problems, alpha=0.5, out=outs)
    # the product starts while x is decoded, or while its tensor maps are written
    assert all(run.launch.programmatic for run in runs[-1:])
    exact = grouped_gemm(problems, alpha=0.5, backend="reference", out_dtype=torch.float32)
    assert all(off(x, y) < 2.0**-20 for x, y in zip(outs, exact))


def test_a_list_like_one_before_takes_the_fast_path() -> None:
    """Other operands of the same kind are decoded and multiplied; an output over an input is refused there, too."""
    sizes, first, second = ((20, 40), (3, 24)), [], []
    for seed, problems in ((0, first), (9, second)):
        pairs = [(operand(m, 128, seed + m), operand(n, 128, seed + n)) for m, n in sizes]
        problems += [tuple(replace(x, global_scale=None) for x in pair) for pair in pairs]
    outs = [torch.full(size, float("nan"), device=backends.device()) for size in sizes]
    memory = second[0][1].data.view(torch.float32).flatten()[:72].view(3, 24)
    with simulating("sm_90a"):
        grouped_gemm(first, out=[torch.empty_like(out) for out in outs])
        assert list_fast_path.repeated(second, "", outs, None, "auto") is not None
        assert list_fast_path.repeated(second, "", [outs[0], memory], None, "auto") is None
        with pytest.raises(OperandError, match="memory of data of b"):
            grouped_gemm(second, out=[outs[0], memory])
    exact = grouped_gemm(second, backend="reference", out_dtype=torch.float32)
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


@functools.cache
def by_the_default_schedule(plan: PackedPlan) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """A product, and its result."""
    a, b = operand(40, 256, 1), operand(136, 256, 2)
    with simulating("sm_90a"):
        return lambda: gemm(a, b, out_dtype=torch.float32, config=plan), gemm(
            a, b, out_dtype=torch.float32, config=plan
        )


@pytest.mark.sim_only("runs schedules")
@pytest.mark.sweep(5, draws=("schedule",))
@pytest.mark.parametrize("schedule", adversarial(20), ids=str)
@pytest.mark.parametrize("plan", [BEFORE, MEANWHILE], ids=["before", "meanwhile"])
def test_any_schedule_gives_the_same_bits(schedule, plan: PackedPlan) -> None:
    product, found = by_the_default_schedule(plan)
    with simulating("sm_90a", schedule=schedule, checks=True):
        assert torch.equal(product(), found)


ARRIVED = instead("mbarrier.arrive.b64 _, {0};")
READY = instead("setp.eq.b32 {0}, 0, 0;")
MUTANTS = (
    ("subnormal scales lost", at("mul.rn.f16x2", instead("mov.b32 {0}, {1};")), "wrong"),
    ("signs of codes dropped", at("lop3.b32", constant(0x80008000, 0), LAST), "wrong"),
    ("copies that nobody waits for", at("cp.async.mbarrier", ARRIVED), "Race"),
    ("a stage not waited for", at("mbarrier.try_wait", READY), "Race"),
    ("a row's other half", at("cp.async.cg", offset(16), FIRST), "OutOfBounds"),
)
MUTANTS_OF_X = (
    ("x that wgmma may not see", at("fence.proxy.async", drop()), "MissingProxyFence"),
    ("x that nobody waits for", at("mbarrier.arrive.shared::cta.b64", drop(), FIRST), "Deadlock"),
    ("a pair of x elsewhere", at("st.shared.b32", offset(4), FIRST), "Race"),
    ("codes of the row after", at("ld.global.v4", offset(16), FIRST), "wrong"),
    ("scales of other blocks", at("ld.global.b32", offset(4), FIRST), "wrong"),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.parametrize("name, change, noticed", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_noticed(name: str, change: Ptx, noticed: str) -> None:
    assert of_mutant(change, BEFORE) == noticed


@pytest.mark.sim_only("changes PTX")
@pytest.mark.parametrize("name, change, noticed", MUTANTS_OF_X, ids=[m[0] for m in MUTANTS_OF_X])
def test_mutants_of_x_are_noticed(name: str, change: Ptx, noticed: str) -> None:
    assert of_mutant(change, MEANWHILE) == noticed


def of_mutant(change: Ptx, plan: PackedPlan) -> str:
    """What notices a changed kernel of the plan."""
    a, b = operand(70, 256, 1), operand(140, 256, 2)
    exact, options = gemm(a, b, backend="reference", out_dtype=torch.float32), {"out_dtype": torch.float32}
    return outcome(change, lambda: off(gemm(a, b, config=plan, **options), exact) < 2.0**-20, "sm_90a")


@pytest.mark.sim_only("changes the source")
def test_a_list_waits_for_its_x() -> None:
    """It starts while the launch before it decodes x; if it did not wait, it would read what may not be there."""
    parts = [operand(20, 128, 1), operand(40, 128, 2)]
    wanted = grouped_gemm([tuple(parts)], backend="reference", out_dtype=torch.float32)

    def found() -> torch.Tensor:
        with simulated_gpu("sm_90a", checks=True):
            there = [replace(x, data=x.data.cuda(), scale=x.scale.cuda(), global_scale=None) for x in parts]
            return grouped_gemm([tuple(there)], alpha=0.75**2, out_dtype=torch.float32)[0].cpu()

    assert off(found(), wanted[0]) < 2.0**-20
    with (
        traced_with(Source(cute.arch, "griddepcontrol_wait", lambda: None)),
        pytest.raises(Race, match="may still run"),
    ):
        found()
