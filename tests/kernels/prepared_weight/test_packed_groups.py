"""Grouped GEMM of prepared weights on sm_90a against the exact products, on full-range data."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from support import backends
from support.moe import mixture_of_experts
from support.mutants import LAST, at, drop, instead, outcome
from support.packed_group_problems import Case, Problem
from support.packed_problems import operand, run, within
from torch.nn.functional import silu

from cute_nvfp4 import (
    BlockScaledTensor,
    gemm,
    grouped_gemm,
    grouped_gemm_contiguous,
    prepare_weight,
    quantize,
    simulating,
)
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import MXFP8
from cute_nvfp4.kernels.gemm.routed_config import RoutedConfig
from cute_nvfp4.kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig, can_implement_groups
from cute_nvfp4.planning.grouped import random_sizes, uneven_sizes
from cute_nvfp4.planning.packed import PackedPlan
from cute_nvfp4.planning.packed_groups import PackedGroups, choose_groups
from cute_nvfp4.sim import adversarial
from cute_nvfp4.target import ARCHITECTURES

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("hopper")]


SLOW = Case((250, 60, 150), 40, 128, torch.float16, torch.float16, 2, {"tile_n": 256})
CASES = (
    # chosen: few rows, many groups, some empty; decoded x
    Case((1, 0, 3), 130, 256, out=torch.bfloat16),
    Case((0,) * 30 + (2, 5, 0, 0, 0, 9), 130, 144, torch.float16, workers=3, tiling={"tile_n": 8}, before=2),
    Case((5, 0, 20), 100, 160, torch.float16, torch.float16, 2, {"tile_n": 16}, quantized=True, before=1),
    # widths of tiles, tiles of two rows of tiles, more tiles than CTAs
    Case((33, 7, 70), 136, 256, workers=3, tiling={"tile_n": 64}, out=torch.bfloat16),
    Case((130, 0, 20, 90), 130, 384, workers=2, tiling={"tile_n": 128}),
    # rows that a copy brings, a width ends within
    Case((70, 0, 20, 90), 130, 256, workers=2, tiling={"tile_n": 96, "narrower": (24, 72, 80)}),
    SLOW,
    Case((40, 17), 300, 256, workers=2, tiling={"tile_n": 32, "warpgroups": 4}),
    Case((1, 0, 20), 130, 288, out=torch.bfloat16, format=MXFP8),
    Case((140, 0, 70), 130, 192, workers=2, tiling={"tile_n": 128, "stage_tiles": 1}, format=MXFP8),
)


@pytest.mark.parametrize("case", [x if x != SLOW else pytest.param(x, marks=pytest.mark.slow) for x in CASES], ids=str)
def test_exact(case: Case) -> None:
    problem = Problem(case)
    assert problem.right(run(problem))


def groups(sizes: list[tuple[int, int, int]], quantized: bool, out: torch.dtype) -> tuple[list, list, list]:
    """Pairs of sizes (m, n, k), results that are not written yet, and what they should be with their bounds."""
    generator = torch.Generator().manual_seed(len(sizes))
    dtype = torch.float16 if quantized else torch.bfloat16
    pairs, outs, expected = [], [], []
    for i, (m, n, k) in enumerate(sizes):
        weight = operand((n, k), generator)
        x: Any = None
        if m:
            x = torch.randn(m, k, generator=generator).to(dtype).to(backends.device())
            x = operand((m, k), generator) if quantized else x
        elif i % 2:
            x = torch.empty(0, k, dtype=dtype, device=backends.device())
        pairs.append((x, prepare_weight(weight, dtype=dtype)))
        # rows apart, not all aligned
        room = torch.full((m, n + 8 + i % 2), float("nan"), dtype=out, device=backends.device())
        outs.append(room[:, :n])
        wide = torch.zeros(m, k, dtype=torch.float64, device=backends.device())
        if m:
            wide = x.dequantize(torch.float64) if quantized else x.double()
        values = weight.dequantize(torch.float64)
        expected.append((wide @ values.t() * 0.75, wide.abs() @ values.abs().t() * 0.75))
    return pairs, outs, expected


LISTS = (
    ([(3, 130, 256), (0, 64, 128), (20, 40, 384), (1, 200, 128)], False, torch.bfloat16),
    ([(5, 64, 160), (17, 130, 128)], True, torch.float32),
    ([(i % 4, 40 + i, 128 + 16 * (i % 3)) for i in range(19)], False, torch.float16),
)


@pytest.mark.parametrize("sizes, quantized, out", LISTS, ids=["parameters", "nvfp4", "workspace"])
def test_lists(sizes, quantized, out) -> None:
    pairs, outs, expected = groups(sizes, quantized, out)

    def call() -> None:
        results = grouped_gemm(pairs, alpha=0.75, out=outs)
        assert all(x is y for x, y in zip(results, outs))

    with simulating():
        call()
    for got, (exact, magnitude) in zip(outs, expected):
        assert within(got, exact, magnitude)


@pytest.mark.parametrize("out, n", [(torch.bfloat16, 72), (torch.float32, 20)])
def test_gated(out: torch.dtype, n: int) -> None:
    """Gate and up prepared together, with global scales and factors of their own."""
    generator = torch.Generator().manual_seed(n)
    device, sizes = backends.device(), (3, 0, 21)
    both = [quantize(torch.randn(3, n, 160, generator=generator).to(device), backend="reference") for _ in range(2)]
    weight = prepare_weight(*both)
    x = (torch.randn(24, 160, generator=generator) / 10).bfloat16().to(device)
    alpha = torch.tensor([0.5, 2.0, 1.5], device=device)

    def call() -> torch.Tensor:
        offsets = [*accumulate(sizes, initial=0)]
        return grouped_gemm_contiguous(x, weight, offsets=offsets, gate="silu", alpha=alpha, out_dtype=out)

    with simulating():
        got = call()
    values = [w.dequantize(torch.float64) for w in both]
    parts = zip(x.double().split(sizes), *values, alpha.double())
    exact = torch.cat([silu(f * (a @ gate.t())) * (f * (a @ up.t())) for a, gate, up, f in parts])
    tolerance = 2.0**-8 if out is torch.bfloat16 else 1e-5
    assert torch.allclose(got.double(), exact, rtol=tolerance, atol=1e-5)
    assert torch.equal(weight.dequantize(torch.float64), torch.stack(values, dim=1))


@pytest.mark.parametrize(
    "count, quantized", [(3, False), (2, True), (18, False)], ids=["parameters", "nvfp4", "workspace"]
)
def test_gated_lists(count: int, quantized: bool) -> None:
    """Of sizes of their own; the global scales of gate are neighbours, up has one, and alpha is one for each group."""
    generator, device = torch.Generator().manual_seed(count), backends.device()
    dtype = torch.float16 if quantized else torch.bfloat16

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    factors = (torch.rand(count, generator=generator) / 64).to(device)
    alpha, pairs, exact = normal(count), [], []
    for i in range(count):
        m, n, k = (0 if i == 1 else 3 + i), 40 + 8 * i, 96 + 32 * (i % 2)
        both = [quantize(normal(n, k), global_scale=factor, backend="reference") for factor in (factors[i], factors[0])]
        x: Any = normal(m, k).to(dtype)
        if quantized:
            x = quantize(x, global_scale=factors[1], backend="reference") if m else None
        pairs.append((x, prepare_weight(*both, dtype=dtype)))
        wide = normal(0, k) if x is None else x.dequantize(torch.float64) if quantized else x
        gate, up = (alpha[i].double() * (wide.double() @ w.dequantize(torch.float64).t()) for w in both)
        exact.append(silu(gate) * up)
    with simulating() as runs:
        got = grouped_gemm(pairs, gate="silu", alpha=alpha, out_dtype=torch.float32)
    for result, wanted in zip(got, exact, strict=True):
        assert torch.allclose(result.double(), wanted, rtol=1e-4, atol=1e-5)
    assert len(runs) == (backends.backend() == "sim") * (1 + (count > 16) + quantized)
    for result, wanted in zip(grouped_gemm(pairs, gate="silu", alpha=alpha, backend="reference"), exact, strict=True):
        assert torch.allclose(result.double(), wanted, rtol=2.0**-7, atol=1e-4)


def test_mixture_of_experts() -> None:
    """Against the same layer in float64; on a GPU in a CUDA graph, too, with other rows."""
    generator = torch.Generator().manual_seed(5)
    device, (tokens, k, inner, experts, top) = backends.device(), (9, 128, 64, 6, 2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    weights = [
        quantize(normal(experts, *size) / size[1] ** 0.5, backend="reference")
        for size in ((inner, k), (inner, k), (k, inner))
    ]
    x, router = normal(tokens, k).bfloat16(), normal(k, experts)
    layer = router, prepare_weight(*weights[:2]), prepare_weight(weights[2]), top

    def exact(x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (w.dequantize(torch.float64) for w in weights)
        scores, chosen = (x.float() @ router).softmax(-1).topk(top)
        y = torch.zeros(tokens, k, dtype=torch.float64, device=device)
        for t in range(tokens):
            for score, e in zip(scores[t], chosen[t]):
                hidden = silu(gate[e] @ x[t].double()) * (up[e] @ x[t].double())
                y[t] += score * (down[e] @ hidden)
        return y

    def near(y: torch.Tensor, x: torch.Tensor) -> bool:
        want = exact(x)
        # the hidden rows are rounded to bfloat16
        return ((y.double() - want).norm() / want.norm()).item() < 2.0**-8

    if backends.backend() == "sim":
        with simulating("sm_90a"):
            assert near(mixture_of_experts(x, *layer), x)
        return
    assert near(mixture_of_experts(x, *layer), x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mixture_of_experts(x, *layer)
    x.copy_(normal(tokens, k))
    graph.replay()
    assert near(y, x)


CUT = CASES[3]


@pytest.mark.sim_only("runs schedules")
@pytest.mark.parametrize("schedule", adversarial(2), ids=str)
def test_any_schedule_gives_the_same_bits(schedule) -> None:
    problem = Problem(CUT)
    out = run(problem, schedule=schedule)
    assert problem.right(out) and torch.equal(out.nan_to_num(), run(problem).nan_to_num())


MUTANTS = (
    ("stages not waited for", at("mbarrier.try_wait", instead("setp.eq.b32 {0}, 0, 0;"), LAST), "Race"),
    ("the table not waited for", at("bar.sync", drop()), "Race"),
    ("a box of x not loaded", at("cp.async.bulk.tensor", drop(), LAST), "Deadlock"),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.parametrize("name, change, noticed", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_noticed(name, change, noticed) -> None:
    problem = Problem(CUT)
    assert outcome(change, lambda: problem.right(problem.run()), "sm_90a") == noticed


@pytest.mark.parametrize(
    "offsets, status, used",
    [((0, 4, 3, 9), 3, (0, 4, 4, 9)), ((-1, 4, 5, 9), 1, (0, 4, 5, 9)), ((2, 4, 5, 70), 4, (2, 4, 5, 12))],
)
def test_bad_offsets_are_told_and_clamped(offsets, status, used) -> None:
    problem = Problem(Case((4, 3, 2), 72, 128))
    given = torch.tensor(offsets, dtype=torch.int32, device=backends.device())
    said = torch.zeros(1, dtype=torch.int32, device=backends.device())
    out = torch.full((12, 72), 3.0, dtype=torch.bfloat16, device=backends.device())

    def call() -> None:
        grouped_gemm_contiguous(problem.x, problem.weight, offsets=given, out=out, status=said)

    with simulating():
        call()
    assert said.item() == status
    values = problem.weight.dequantize(torch.float64)
    exact = torch.full((12, 72), 3.0, dtype=torch.float64, device=backends.device())
    for e in range(3):
        mine = slice(used[e], used[e + 1])
        exact[mine] = problem.x[mine].double() @ values[e].t()
    assert torch.allclose(out.double(), exact, rtol=2.0**-7, atol=1e-2)


X = torch.zeros(4, 64, dtype=torch.bfloat16)
STACK = BlockScaledTensor(torch.zeros(2, 32, 32, dtype=torch.uint8), torch.zeros(2, 32, 4, dtype=torch.uint8))
ONE = BlockScaledTensor(STACK.data[0], STACK.scale[0])
GATED = prepare_weight(ONE, ONE)
HALVES = PackedPlan(GroupedWgmmaConfig(warpgroups=3), 1)
BAD = (
    (lambda s, w: grouped_gemm_contiguous(X, s), OperandError, "offsets"),
    (lambda s, w: grouped_gemm_contiguous(X, s, offsets=[0, 2, 5]), OperandError, r"offsets\[2\]"),
    (lambda s, w: grouped_gemm_contiguous(X, s, offsets=[0, 2, 3, 4]), OperandError, "matrices of b"),
    (lambda s, w: grouped_gemm_contiguous(X, w, offsets=[0, 4]), OperandError, "a stack"),
    (lambda s, w: grouped_gemm_contiguous(X.half(), s, offsets=[0, 2, 4]), OperandTypeError, "dtype of a"),
    (lambda s, w: grouped_gemm_contiguous([1], s, offsets=[0, 2, 4]), OperandTypeError, "a: got list"),
    (lambda s, w: grouped_gemm_contiguous(X, s, offsets=[0, 2, 4], alpha=torch.ones(3)), OperandError, "alpha"),
    (lambda s, w: grouped_gemm_contiguous(X, s, offsets=[0, 2, 4], out=X), OperandError, "shape of out"),
    (lambda s, w: grouped_gemm_contiguous(X, s, offsets=[0, 2, 4], status=torch.zeros(2)), OperandTypeError, "status"),
    (lambda s, w: grouped_gemm_contiguous(X, s, offsets=[0, 2, 4], config=1), OperandTypeError, "config"),
    (lambda s, w: grouped_gemm_contiguous(X, s, offsets=[0, 2, 4], config=HALVES), OperandError, "warpgroups"),
    (lambda s, w: grouped_gemm_contiguous(X, s, offsets=[0, 2, 4], gate="silu"), OperandError, "prepared weight"),
    (lambda s, w: gemm(X, s), OperandError, "a matrix"),
    (lambda s, w: grouped_gemm([(X, w), (X, s)]), OperandError, "group 1: b"),
    (lambda s, w: grouped_gemm([(X, w), (X, X)]), OperandTypeError, "group 1: b"),
    (lambda s, w: grouped_gemm([(X, w)], gate="silu"), OperandError, "group 0: prepared weight: got one weight"),
    (lambda s, w: grouped_gemm([(X, GATED)]), OperandError, "group 0: prepared weight: got gate and up"),
    (lambda s, w: grouped_gemm([(X, GATED), (X, w)], gate="silu"), OperandError, "group 1: prepared weight"),
    (lambda s, w: grouped_gemm([(X, GATED)], gate="sin"), OperandError, "gate: got 'sin'"),
    (lambda s, w: grouped_gemm([(ONE, ONE)], gate="silu"), OperandError, "gate: got 'silu'"),
    (lambda s, w: grouped_gemm([(X, w), (X[:, :32], w)]), OperandError, "group 1: shape of a"),
    (lambda s, w: grouped_gemm([(X, w)], out=[torch.zeros(3, 32)]), OperandError, "group 0: shape of out"),
    (lambda s, w: grouped_gemm([(X, w)] * 2, out=[torch.zeros(4, 32)] * 2), OperandError, "memory of out"),
)


@pytest.mark.sim_only("refuses CPU tensors")
@pytest.mark.parametrize("call, error, message", BAD, ids=[message + str(i) for i, (_, _, message) in enumerate(BAD)])
def test_bad_input(call, error, message) -> None:
    stack = prepare_weight(STACK)
    one = prepare_weight(ONE)
    with simulating("sm_90a"), pytest.raises(error, match=message):
        call(stack, one)


@pytest.mark.sim_only("compares exact torch on the CPU")
def test_reference_on_the_cpu() -> None:
    problem = Problem(CASES[0])
    options = {"out_dtype": torch.float32, "backend": "reference"}
    out = grouped_gemm_contiguous(problem.x, problem.weight, offsets=problem.offsets, alpha=problem.alpha, **options)
    inside = ~problem.exact.isnan()
    assert torch.allclose(out.double()[inside], problem.exact[inside], rtol=1e-6)
    pairs, _, expected = groups(LISTS[0][0], False, torch.float32)
    for got, (exact, _) in zip(grouped_gemm(pairs, alpha=0.75, **options), expected):
        assert torch.allclose(got.double(), exact, rtol=1e-6)


def test_plans() -> None:
    """Wide tiles where groups fill them, narrow ones for few rows; what was fastest of those run on an H200."""
    arch = ARCHITECTURES["sm_90a"]
    first = PackedGroups(sizes=tuple((m, 4096, 7168) for m in (80, 176, 128, 72, 64, 248, 96, 160)))
    groups = PackedGroups(sizes=((8, 4096, 4096),), stack=8)
    assert choose_groups(first, arch, 132).config.tile_n == 128
    assert choose_groups(groups, arch, 132).config.tile_n == 8


def test_plans_expect_rows_that_take_any_group() -> None:
    """64 rows a group on average are up to 75: one pass over a weight, where even shares would call for two."""
    sizes = random_sizes(512, 8)
    assert sizes == tuple(sorted(sizes, reverse=True)) and abs(sum(sizes) - 512) <= 8
    assert (sizes[0], sizes[-1]) == (76, 53)
    assert random_sizes(1, 1000) == (1,) and random_sizes(7, 1) == (7,)
    problem = PackedGroups(sizes=((512, 4096, 14336),), stack=8)
    assert choose_groups(problem, ARCHITECTURES["sm_90a"], 132).config.tile_n >= 76


def test_plans_expect_uneven_groups_unless_a_router_sends_their_rows() -> None:
    """Groups with offsets may be two or three times one another; those of experts are as random rows make them."""
    assert uneven_sizes(1024, 8, 0.0) == (128,) * 8
    found = uneven_sizes(1024, 8, 0.5)
    assert sum(found) == 1024 and list(found) == sorted(found, reverse=True) and (found[0], found[-1]) == (248, 54)
    assert uneven_sizes(3, 8, 0.5) == (1, 1, 1)
    routed = RoutedConfig(gathered=True)
    offsets = PackedGroups(sizes=((1024, 4096, 7168),), stack=8, dtype="float8_e4m3fn")
    of_experts = replace(offsets, routed=routed)
    assert [len({m for m, _, _ in sizes}) > 1 for sizes in offsets.expected] == [True] * 4
    assert of_experts.expected == (tuple((m, 4096, 7168) for m in random_sizes(1024, 8)),)
    plans = [choose_groups(x, ARCHITECTURES["sm_90a"], 132).config.tile_n for x in (offsets, of_experts)]
    assert plans == [256, 144]


def test_widths_are_in_order() -> None:
    for narrower in ((64, 32), (32, 60), (8, 16, 24, 32), (128,)):
        assert "narrower" in can_implement_groups(GroupedWgmmaConfig(tile_n=128, narrower=narrower))
    assert not can_implement_groups(GroupedWgmmaConfig(tile_n=144, narrower=(112, 120, 128)))
