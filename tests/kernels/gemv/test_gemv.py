"""gemv() on full-range data: the compiled kernel against the exact reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import backends, gemv_problems
from support.gemv_problems import DTYPES, LAYOUTS, TEN_SHAPES, Case, make, random_cases

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.gemv import gemv, plan_for
from cute_nvfp4.planning.gemv import GemvProblem, choose
from cute_nvfp4.reference import gemv_reference
from cute_nvfp4.target import ARCHITECTURES

pytestmark = [pytest.mark.kernels, pytest.mark.sweep]


def check(case: Case) -> None:
    problem = make(case)
    gemv_problems.check(problem, problem.run())


@pytest.mark.parametrize("shape", dict.fromkeys(TEN_SHAPES), ids=str)
def test_ten_shapes(arch: str, shape: tuple[int, int, int]) -> None:
    """fp32 within 2⁻²² of the sum of magnitudes of each row, and within 1e-6 of the largest result."""
    problem = make(Case(*shape, b_rows=128, seed=1111))
    c = problem.run()
    gemv_problems.check(problem, c)
    exact = gemv_reference(problem.a, problem.b, out_dtype=torch.float64)
    assert (c - exact).abs().max() <= 1e-6 * exact.abs().max()


@pytest.mark.parametrize("shape", [(128, 256, 1), (512, 512, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_narrow_outputs(arch: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Rounded once; too large for fp16 is infinite."""
    check(Case(*shape, dtype=dtype, alpha=2.0**-16))
    problem = make(Case(*shape, dtype=dtype))
    c = problem.run()
    gemv_problems.check(problem, c)
    assert c.isinf().any() == (dtype is torch.float16)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 31, 33, 97, 127, 129, 160, 257])
def test_every_kind_of_last_tile(arch: str, m: int) -> None:
    check(Case(m, 512, a_layout="blocked"))


@pytest.mark.parametrize("k", [16, 32, 48, 64, 240, 256, 272, 1008])
def test_every_kind_of_last_slice(arch: str, k: int) -> None:
    check(Case(70, k, a_layout="rowmajor", alignment=8))


@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
def test_scale_layouts(arch: str, a_layout: str, b_layout: str) -> None:
    check(Case(37, 528, 2, a_layout, b_layout, alignment=8, b_rows=3))


@pytest.mark.parametrize("k", [16384, 16400, 33024])
def test_long_k(arch: str, k: int) -> None:
    """b in one chunk of shared memory, one and a bit, two and a bit."""
    check(Case(9, k, 2, alignment=8 if k % 64 else 32))


@pytest.mark.parametrize(
    "case",
    [
        Case(300, 2064, 2, cluster=2, alignment=8, capacity=2048),
        Case(70, 4096, a_layout="rowmajor", cluster=2),
        Case(200, 1536, cluster=2, dtype=torch.bfloat16, alpha=2.0**-14, out="strided"),
        Case(64, 4096, cluster=4, a_global=0.5),
    ],
    ids=str,
)
def test_clusters(arch: str, case: Case) -> None:
    """CTAs share tiles along K, in one chunk of b each or in several; the last has less."""
    check(case)


def test_where_clusters_are_chosen() -> None:
    """Where they even out the tiles: 448 on 132 multiprocessors, but not 256 on 16 for each of 8 matrices.

    Multiprocessors are left out where the others have the same number of tiles then, and are nearly all.
    """

    def chosen(arch: str, *shape: int) -> tuple[int, int]:
        plan = choose(GemvProblem(*shape), ARCHITECTURES[arch], 132)
        return plan.config.cluster, plan.ctas

    assert chosen("sm_90a", 7168, 16384, 1) == (2, 128)
    assert chosen("sm_90a", 4096, 7168, 8) == (1, 16)
    assert chosen("sm_90a", 7168, 2048, 4) == (1, 32)
    assert chosen("sm_90a", 7168, 256, 1) == (1, 132)
    assert chosen("sm_100a", 7168, 16384, 1) == (2, 128)
    assert chosen("sm_120a", 7168, 16384, 1)[0] == 1


def test_a_warp_for_each_tile_on_sm_100a() -> None:
    """Up to 32 warps, of which as many share a tile along K as there is room for."""

    def chosen(*shape: int) -> tuple[int, int]:
        config = choose(GemvProblem(*shape), ARCHITECTURES["sm_100a"], 148).config
        return config.warps_m, config.warps_k

    assert chosen(7168, 16384, 1) == (7, 4)
    assert chosen(4096, 7168, 8) == (15, 2)
    assert chosen(7168, 2048, 4) == (13, 2)
    assert chosen(16, 65536, 1) == (1, 32)
    assert chosen(128, 256, 1) == (1, 1)


def _sweep(count: int, seed: int) -> list:
    return [pytest.param(case, id=f"{i}-{case}") for i, case in enumerate(random_cases(count, seed))]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("case", _sweep(60, 20))
def test_random(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the cases for each architecture; on sm_120a stages of A lie in registers."""
    monkeypatch.setenv("CUTE_NVFP4_ARCH", (*backends.KERNEL_ARCHS, "sm_120a")[case.seed % 3])
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", _sweep(500, 21))
def test_random_more(arch: str, case: Case) -> None:
    check(case)


def test_repeats_bit_for_bit(arch: str) -> None:
    problem = make(Case(200, 1600, 2, a_layout="rowmajor"))
    first, second = problem.run(), problem.run()
    assert first.view(torch.int32).equal(second.view(torch.int32))


def test_equal_rows_give_equal_results(arch: str) -> None:
    """Where a row lies in the matrix does not change its sum."""
    problem = make(Case(150, 528, 1, "rowmajor", alignment=8))
    a = problem.a
    same = BlockScaledTensor(a.data[:, :1].repeat(1, 150, 1), a.scale[:, :1].repeat(1, 150, 1))
    c = gemv_problems.gemv(same, problem.b, out_dtype=torch.float32)
    assert (c == c[0, 0]).all() and c[0, 0] != 0


@pytest.mark.parametrize("layout", ["flat", "rowmajor"])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_scale_is_its_row(arch: str, layout: str, code: int) -> None:
    """Also where the block is all zeros: 0 · NaN is NaN. No other row notices."""
    problem = make(Case(140, 272, 1, "rowmajor", layout, alignment=8))
    clean = problem.run()
    rows = {3: 16, 64: 0, 131: 7}
    for row, column in rows.items():
        problem.a.scale[0, row, column] = code
        problem.a.data[0, row, 8 * column : 8 * column + 8] = 0
    c = problem.run()
    expected = torch.zeros(140, dtype=torch.bool, device=c.device)
    expected[list(rows)] = True
    assert c[0].isnan().equal(expected)
    assert c[0][~expected].equal(clean[0][~expected])


def test_a_nan_scale_of_b_is_everything_of_its_batch(arch: str) -> None:
    problem = make(Case(20, 256, 2, "blocked", "rowmajor"))
    problem.b.scale[1, 0, 5] = 0x7F
    assert problem.run().isnan().tolist() == [[False] * 20, [True] * 20]


def test_scales_of_zero(arch: str) -> None:
    """Zeros of either sign, in data and in scales, give zero."""
    problem = make(Case(20, 256, 1, "rowmajor", "rowmajor"))
    problem.a.scale[:] = torch.tensor([0x00, 0x80], dtype=torch.uint8).repeat(8)
    assert (problem.run() == 0).all()


def test_subnormal_scales(arch: str) -> None:
    """Products of the smallest scales: 2⁻¹⁸ times what is in them, exactly."""
    problem = make(Case(20, 256, 1, "rowmajor", "rowmajor"))
    problem.a.scale[:] = 1
    problem.b.scale[:] = 0x81
    c = problem.run()
    exact = gemv_reference(problem.a, problem.b, out_dtype=torch.float64)
    assert c.double().equal(exact) and (c != 0).any()
    assert exact.abs().max() < 256 * 36 * 2.0**-18


def test_nan_and_infinite_factors(arch: str) -> None:
    for factors in ({"alpha": float("nan")}, {"a_global": float("nan")}, {"b_global": float("nan")}):
        assert make(Case(5, 64, **factors)).run().isnan().all()
    c = make(Case(5, 64, alpha=float("inf"))).run()
    signs = make(Case(5, 64)).run().sign()
    assert c.equal(signs * float("inf"))


def test_alpha_zero_is_zero(arch: str) -> None:
    assert (make(Case(5, 64, alpha=0.0)).run() == 0).all()


def test_only_the_output_is_written(arch: str) -> None:
    """What lies between the elements of a strided output stays as it was."""
    problem = make(Case(100, 256, 2, out="strided"))
    room = problem.out._base if problem.out._base is not None else problem.out
    room.fill_(12345.0)
    c = gemv_problems.gemv(problem.a, problem.b, out=problem.out)
    gemv_problems.check(problem, c)
    assert (room[..., 0] == 12345).all() and (room[..., 2] == 12345).all()


def test_torch_dtypes_and_uint8_are_the_same(arch: str) -> None:
    problem = make(Case(40, 320, 2, "blocked", "rowmajor"))
    typed = [
        BlockScaledTensor(x.data.view(torch.float4_e2m1fn_x2), x.scale.view(torch.float8_e4m3fn))
        for x in (problem.a, problem.b)
    ]
    assert gemv_problems.gemv(*typed, out_dtype=torch.float32).equal(problem.run())


def test_a_plan_given_is_run_or_refused() -> None:
    problem = make(Case(256, 1024))
    out = torch.empty(1, 256, device=problem.a.device)
    plan = plan_for(problem.a, problem.b, out)
    other = replace(plan, config=replace(plan.config, warps_m=8, warps_k=2, k=1024))
    gemv_problems.check(problem, gemv(problem.a, problem.b, out=out, config=other))
    for changes, words in (
        ({"warps_k": 8}, "warps_k of the plan"),
        ({"k": 512}, "k of the plan: got 512"),
        ({"capacity": 512}, "capacity of the plan"),
        ({"stages": 0}, "stages of the plan"),
        ({"cluster": 3}, "cluster of the plan"),
        ({"cluster": 8}, "cluster of the plan"),
    ):
        with pytest.raises(OperandError, match=words):
            gemv(problem.a, problem.b, config=replace(plan, config=replace(plan.config, **changes)))
    for other in (plan.config, [plan]):
        with pytest.raises(OperandTypeError, match=r"config: got .*, expected a GemvPlan"):
            gemv(problem.a, problem.b, config=other)
