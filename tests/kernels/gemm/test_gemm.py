"""gemm() on full-range data: the compiled kernel, against float64.

One case for each kind of structure here; all of them, under many schedules, by ``python -m
tests.simulator.gemm_sweep``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import gemm_problems
from support.gemm_problems import Case, make
from support.gemm_structures import Pairs, random_case, structures
from support.scratch_flags import keeping_flags, lowered

from cute_nvfp4 import simulating
from tests.simulator.blackwell.shapes import GEMM_SHAPES

pytestmark = [pytest.mark.kernels("sm_100a", "sm_103a"), pytest.mark.sweep(6)]
# what gemm promises on sm_90a too, which chooses its own plans; CUTE_NVFP4_ARCH=sm_90a runs these there
ON_HOPPER_TOO = pytest.mark.kernels("sm_100a", "sm_103a", "sm_90a")


def run(case: Case) -> torch.Tensor:
    problem = make(case)
    c = problem.run()
    gemm_problems.check(problem, c)
    return c


# --- structures: each with another output, so that both are covered

STRUCTURES = (
    # tiles
    "tile_n=64,m=300,n=203,out=sliced,dtype=bfloat16",
    "tile_n=128,m=130,n=264,bias=n,bias_dtype=float16,alpha=-3e-5,alpha_tensor=True",
    "tile_n=192,m=130,n=500,k=288,dtype=float16,alpha=1e-5,out=strided",
    "tile_n=256,m=129,n=300,workers=1,acc_stages=1,stages=2,raster=n,store=direct",
    # two CTAs an MMA
    "pair=True,cluster_m=2,tile_n=64,m=500,n=100,k=1056,workers=1,out=new,dtype=float16,alpha=1e-5",
    "pair=True,cluster_m=2,tile_n=128,m=257,n=392,batch=2,bias=batch,out=strided",
    "pair=True,cluster_m=2,tile_n=192,m=300,n=385,workers=1,out=columns",
    "pair=True,cluster_m=2,tile_n=256,m=130,n=257,k=96,out=sliced,dtype=float16,alpha=1e-6,a_global=0.5",
    # multicast
    "cluster_m=2,tile_n=64,m=300,n=130,stages=2,acc_stages=1,workers=1,swap=True",
    "cluster_n=2,tile_n=64,m=300,n=260,stages=3,workers=1,out=strided columns,dtype=bfloat16",
    "cluster_m=2,cluster_n=2,tile_n=192,m=257,n=392,k=800,repeat_a=True,batch=2",
    "cluster_m=4,cluster_n=2,tile_n=64,m=600,n=200,raster=n,workers=1,out=columns,swap=True",
    "pair=True,cluster_m=4,cluster_n=2,tile_n=128,m=600,n=300,k=800,bias=n,out=sliced columns",
    "pair=True,cluster_m=2,cluster_n=2,tile_n=256,m=130,n=520,workers=1,dtype=bfloat16",
    # CTAs that share K
    "split_k=2,m=200,n=264,k=1312,workers=1,bias=n,bias_dtype=bfloat16,out=strided",
    "split_k=8,tile_n=64,m=100,n=70,k=2080,dtype=float16,alpha=1e-5,out=sliced",
    "split_k=4,pair=True,cluster_m=2,tile_n=192,m=300,n=200,k=1056,store=direct",
    "scheduler=stream_k,tile_n=64,m=300,n=200,k=2080,workers=7,out=columns,bias=n",
    "scheduler=stream_k,pair=True,cluster_m=2,m=300,n=264,k=1312,batch=2,workers=5,dtype=bfloat16,raster=n",
    # formats
    "a_format=mxfp4,b_format=mxfp4,m=140,n=200,k=1056,out=strided",
    "a_format=mxfp8,b_format=mxfp8_e5m2,m=140,n=264,k=416,dtype=bfloat16,swap=True,batch=0",
    "a_format=mxfp8_e5m2,b_format=mxfp8,pair=True,cluster_m=2,tile_n=192,m=300,n=200,k=352,out=columns",
    "a_format=mxfp8,b_format=mxfp4,m=140,n=264,k=384,dtype=bfloat16,pitch=48,batch=2",
    "a_format=mxfp4,b_format=mxfp8_e5m2,pair=True,cluster_m=2,tile_n=192,m=300,n=200,k=640,out=columns,swap=True",
)


@pytest.mark.parametrize("text", STRUCTURES)
def test_structures(text: str) -> None:
    run(Case.parse(text))


# --- sizes


@ON_HOPPER_TOO
@pytest.mark.parametrize("m", [1, 3, 127, 129, 257])
def test_every_kind_of_last_rows(m: int) -> None:
    run(Case(m, 136, 544))


@ON_HOPPER_TOO
@pytest.mark.parametrize("n", [1, 3, 31, 127, 129])
def test_every_kind_of_last_columns(n: int) -> None:
    """Not a multiple of four: rows of fp32 that start anywhere."""
    run(Case(130, n, 544, out="new"))


@ON_HOPPER_TOO
@pytest.mark.parametrize("n", [4, 28, 36, 124, 132])
def test_every_kind_of_last_columns_by_tma(n: int) -> None:
    run(Case(130, n, 544))


@ON_HOPPER_TOO
@pytest.mark.parametrize("k", [32, 64, 96, 224, 256, 288, 800])
def test_every_kind_of_last_step(k: int) -> None:
    """K a multiple of 32 ends in the middle of a scale atom, of an instruction, of a stage; rows with room between."""
    run(Case(130, 136, k, pitch=48))


@ON_HOPPER_TOO
@pytest.mark.parametrize("shape", [(1, 1, 32), (3, 200, 96), (200, 3, 288), (129, 127, 160)], ids=str)
@pytest.mark.parametrize("swap", [False, True])
def test_small(shape: tuple[int, int, int], swap: bool) -> None:
    run(Case(*shape, swap=swap, out="rows" if not swap else "columns"))


def test_more_clusters_than_tiles() -> None:
    run(Case(130, 136, 544, workers=40))


@ON_HOPPER_TOO
def test_without_a_plan() -> None:
    """One is chosen."""
    for shape in ((100, 300, 1056), (8, 512, 2048)):
        run(Case(*shape, workers=0))


# --- exact numbers

EXACT = Case(200, 136, 2080, exact=True)
ORDERS = (
    EXACT, replace(EXACT, swap=True), replace(EXACT, tile_n=64, split_k=8), replace(EXACT, split_k=2),
    replace(EXACT, scheduler="stream_k", workers=5), replace(EXACT, scheduler="stream_k", workers=9),
    replace(EXACT, pair=True, cluster_m=2, tile_n=64),
)  # fmt: skip


@pytest.mark.parametrize("case", ORDERS, ids=str)
def test_exact_sums_in_any_order(case: Case) -> None:
    """Sums of few bits are right to the last, whoever computes them."""
    problem = make(case)
    assert problem.run().double().equal(problem.expected[0])


@ON_HOPPER_TOO
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_outputs_are_rounded_once(dtype: str) -> None:
    """To nearest even, also those halfway between two; too large for fp16 is infinite."""
    for alpha in (2.0**-6, 16.0):
        problem = make(replace(EXACT, dtype=dtype, alpha=alpha))
        c, result = problem.run(), problem.expected[0]
        assert c.equal(gemm_problems.rounded(result, gemm_problems.DTYPES[dtype]))
        assert ((c.double() != result) & c.isfinite()).any()
    assert c.isinf().any() == (dtype == "float16")


def test_repeats_bit_for_bit() -> None:
    """Inexact sums too, with the same plan and the same data."""
    for case in (Case(200, 136, 1312, split_k=2), Case(200, 136, 1312, scheduler="stream_k", workers=5)):
        problem = make(case)
        first = problem.run().clone()
        assert problem.run().view(torch.int32).equal(first.view(torch.int32))


@pytest.mark.sim_only("looks at the flags of a launch")
def test_flags_are_lowered() -> None:
    """A stream-K launch leaves the flags as it found them, for the next on the stream."""
    problem = make(Case(130, 200, 1312, tile_n=64, scheduler="stream_k", workers=9))
    with keeping_flags() as flags:
        gemm_problems.check(problem, problem.run())
    assert len(flags) == 1 and lowered(flags)


# --- factors


@ON_HOPPER_TOO
def test_alpha_as_number_and_as_tensor_are_the_same() -> None:
    case = Case(130, 136, 288, alpha=-3.7e-5)
    number, tensor = (run(replace(case, alpha_tensor=x)) for x in (False, True))
    assert number.equal(tensor)


@ON_HOPPER_TOO
def test_global_scales() -> None:
    """Both, and alpha in memory: three device scalars."""
    case = Case(130, 136, 288, a_global=0.037, b_global=-1.5)
    run(case)
    run(replace(case, alpha=2.0**-7, alpha_tensor=True))


@ON_HOPPER_TOO
@pytest.mark.parametrize("swap,bias", [(False, "batch"), (True, "n")])
def test_bias(swap: bool, bias: str) -> None:
    """Whether it lies along the kernel's columns or, swapped, its rows; one for all of the batch, or one each."""
    run(Case(130, 203, 288, 3, bias=bias, bias_dtype="bfloat16", alpha=1e-4, swap=swap, exact=False))


@ON_HOPPER_TOO
def test_alpha_of_nothing() -> None:
    """Zero, NaN and infinity go through; the bias is added after."""
    assert (make(Case(5, 8, 64, alpha=0.0)).run() == 0).all()
    assert make(Case(5, 8, 64, alpha=float("nan"))).run().isnan().all()
    signs = make(Case(5, 8, 64)).run().sign()
    assert make(Case(5, 8, 64, alpha=float("inf"))).run().equal(signs * float("inf"))
    biased = make(Case(5, 8, 64, alpha=0.0, bias="n"))
    assert biased.run().equal(biased.bias.expand(1, 5, 8))


# --- data


@ON_HOPPER_TOO
@pytest.mark.parametrize("repeat", ["a", "b"])
def test_batch_stride_zero(repeat: str) -> None:
    """One matrix for all of a batch: its data is there once, its scales for each."""
    run(Case(130, 136, 288, 3, **{f"repeat_{repeat}": True}))


@pytest.mark.parametrize(
    "fmt,nan", [pytest.param("nvfp4", 0x7F, marks=ON_HOPPER_TOO), ("mxfp4", 0xFF), ("mxfp8", 0xFF)]
)
@pytest.mark.parametrize("which", ["a", "b"])
def test_a_nan_scale_is_its_row(fmt: str, nan: int, which: str) -> None:
    """Of A a row of the output, of B a column, though the block be zeros: 0 · NaN is NaN. No other element notices."""
    problem = make(Case(200, 136, 288, a_format=fmt, b_format=fmt, exact=True))
    clean = problem.run().clone()
    operand = getattr(problem, which)
    block = operand.format.block_bytes
    places = {3: 0, 64: 5, 131: operand.format.scale_columns(288) - 1}
    for row, column in places.items():
        r, c = row % 128, column % 4
        operand.scale[r % 32, r // 32, row // 128, c, column // 4, 0] = nan
        operand.data[0, row, block * column : block * (column + 1)] = 0
    c = problem.run()
    expected = torch.zeros(200, 136, dtype=torch.bool, device=c.device)
    (expected if which == "a" else expected.t())[list(places)] = True
    assert c[0].isnan().equal(expected)
    assert c[0][~expected].equal(clean[0][~expected])


def test_nan_elements_of_fp8() -> None:
    """A NaN of E4M3, an infinity and a NaN of E5M2."""
    problem = make(Case(130, 136, 288, a_format="mxfp8", b_format="mxfp8_e5m2", exact=True))
    problem.a.data[0, 7, 100] = 0x7F
    problem.b.data[0, 9, 200] = 0x7C
    problem.b.data[0, 11, 30] = 0xFE
    c = problem.run()[0]
    assert c[7].isnan().all() and c[:, 11].isnan().all()
    column = torch.cat([c[:7, 9], c[8:, 9]])
    # infinity times zero is NaN
    assert (column.isinf() | column.isnan()).all() and column.isinf().any()
    rest = torch.ones_like(c, dtype=torch.bool)
    rest[7], rest[:, 9], rest[:, 11] = False, False, False
    assert c.isfinite().equal(rest)


@pytest.mark.sim_only("compiles for another architecture")
@pytest.mark.parametrize("arch", ["sm_103a"])
def test_other_architectures(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_NVFP4_ARCH", arch)
    run(Case(130, 136, 288))


# --- more of the same


def test_random_problems() -> None:
    generator, every = np.random.default_rng(7), structures()
    for _ in range(2):
        run(random_case(generator, every, max_mn=300, max_k=1500))


@pytest.mark.sim_only("draws problems and runs none")
def test_draws_cover_all_pairs() -> None:
    """A hundredth of the structures already meets most pairs of choices that there can be."""
    pairs, every = Pairs(), structures()
    drawn = [pairs.complete(structure) for structure in every[::25]]
    for name, count in (("out", 7), ("bias", 3), ("batch", 3), ("dtype", 3)):
        for other, choices in (("swap", 2), ("store", 2), ("tile_n", 4), ("pair", 2), ("scheduler", 2), ("exact", 2)):
            assert len({(getattr(c, name), getattr(c, other)) for c in drawn}) == count * choices


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_shapes() -> None:
    """The correctness shapes of the problem, with the plans that are chosen for them."""
    for m, n, k in GEMM_SHAPES:
        with simulating(checks=False):
            run(Case(m, n, k, workers=0, dtype="float32", out="new"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_problems_more() -> None:
    generator, every = np.random.default_rng(8), structures()
    for _ in range(200):
        run(random_case(generator, every))
