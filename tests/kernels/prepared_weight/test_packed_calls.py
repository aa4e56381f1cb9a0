"""Calls of gemm with a prepared weight: bad input over both roads, autograd's versions, inductor."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest
import test_packed_gemm as packed_input
import torch
from support.compilers import needs_compiler
from support.roads import Roads, table

from cute_nvfp4 import PreparedWeight, gemm, grouped_gemm, prepare_weight, quantize, simulating
from cute_nvfp4.errors import OperandError
from cute_nvfp4.ops import grouped_gemm as grouped_gemm_module
from cute_nvfp4.ops import list_fast_path
from cute_nvfp4.ops.grouped_gemm import GROUPED
from cute_nvfp4.ops.prepared_weight.gemm import PREPARED_GEMM

pytestmark = [pytest.mark.kernels, pytest.mark.sim_only("CPU tensors")]


@pytest.fixture(autouse=True)
def simulator() -> Iterator[None]:
    with simulating("sm_90a"):
        yield
    for calls in (PREPARED_GEMM.calls, GROUPED.calls, list_fast_path.CALLS):
        calls.clear()


def test_tables() -> None:
    """A good call was planned, or none."""
    weight, x = prepare_weight(packed_input.W), packed_input.X
    out = torch.empty(4, 32, dtype=torch.bfloat16)
    good = [
        lambda: gemm(x, weight),
        lambda: gemm(x, weight, out=out),
        lambda: gemm(x, weight, bias=torch.zeros(32)),
        lambda: gemm(x, weight, alpha=2.0),
    ]
    roads = Roads(PREPARED_GEMM.calls, good)
    for call, _, message in table(packed_input.test_bad_input):
        said = roads.refused(lambda call=call: call(weight))
        assert re.search(message, said), said
    for options, message in (
        ({"alpha": "2"}, "expected a Python number"),
        ({"alpha": torch.ones(2)}, "alpha: got shape"),
        ({"out": 5}, "out: got int"),
        ({"out": out.double()}, "dtype of out"),
        ({"out": out, "out_dtype": torch.float16}, "out_dtype"),
        ({"backend": "gpu"}, "backend: got"),
        ({"backend": ["sim"]}, "backend: got"),
        ({"config": "fast"}, "config: got str"),
        ({"config": ["fast"]}, "config: got list"),
    ):
        said = roads.refused(lambda options=options: gemm(x, weight, **options))
        assert re.search(message, said), said


@pytest.mark.parametrize("where", ["a", "b.packed", "bias", "alpha", "b.global_scale"])
def test_over_an_input(where: str) -> None:
    """Of the same key as a good call, which only addresses are not part of."""
    x, bias, alpha, factor = torch.zeros(4, 64).bfloat16(), torch.zeros(64), torch.ones(64), torch.ones(64)
    prepared = prepare_weight(packed_input.W)
    weight = PreparedWeight(prepared.packed, 32, 64, prepared.dtype, factor[:1])
    memory = {"a": x, "b.packed": weight.packed, "bias": bias, "alpha": alpha, "b.global_scale": factor}[where]
    over = torch.tensor([], dtype=torch.bfloat16).set_(memory.untyped_storage(), 0, (4, 32))

    def call(out: torch.Tensor) -> None:
        gemm(x, weight, alpha=alpha[:1], bias=bias[:32], out=out)

    roads = Roads(PREPARED_GEMM.calls, [lambda: call(torch.empty_like(over))])
    assert f"overlap {where} at" in roads.refused(lambda: call(over))


def test_groups() -> None:
    """The same of groups: what is wrong is refused also where good calls were planned."""
    weight, x = prepare_weight(packed_input.W), packed_input.X
    pairs, rows = [(x, weight)] * 2, torch.empty(12, 32, dtype=torch.bfloat16)
    good = [lambda: grouped_gemm(pairs), lambda: grouped_gemm(pairs, out=[rows[:4], rows[4:8]])]
    roads = Roads(GROUPED.calls, good, list_fast_path.CALLS)
    over = torch.tensor([], dtype=torch.bfloat16).set_(weight.packed.untyped_storage(), 0, (4, 32))
    unaligned = torch.zeros(4 * 64 + 1, dtype=torch.bfloat16)[1:].view(4, 64)
    for problems, out, message in (
        (pairs, [], "out: got list of 0"),
        (pairs, [rows[:4]], "out: got list of 1"),
        (pairs, [rows[:4], rows[4:9]], "shape of out"),
        (pairs, [rows[:4], rows[4:8].float()], "group 1"),
        (pairs, [rows[:4], rows[2:6]], "memory of out"),
        (pairs, [rows[:4], over], "memory of packed of b"),
        (pairs, [rows[:4], 5], "out: got int"),
        (pairs, rows[:8].view(2, 4, 32), "out: got Tensor"),
        ([(x, weight), (x.clone().requires_grad_(), weight)], [rows[:4], rows[4:8]], "grad"),
        ([(x, weight), (unaligned, weight)], None, "group 1: alignment of a"),
        ([(x, weight), (x, weight, 1)], None, "group 1: problem: got tuple"),
        ([(x, weight), (x.half(), weight)], None, "group 1: dtype of a"),
        ([(x, weight), (x, None)], None, "group 1: b: got NoneType"),
        ([(x, weight), x], None, "group 1: problem: got Tensor"),
    ):
        said = roads.refused(lambda problems=problems, out=out: grouped_gemm(problems, out=out))
        assert message in said, said


class Groups:
    """Two groups with new numbers: the weights' global scales are those of ``scales``, x of both is one tensor or not.

    out: results are given. gate: of two weights.
    """

    def __init__(self, seed: int, scales: str, shared: bool, out: bool, gate: str = "") -> None:
        generator = torch.Generator().manual_seed(seed)
        factors = [x.split(1) for x in torch.rand(2, 2, generator=generator) + 0.5]
        places = {"none": (None, None), "one": (0, 0), "row": (0, 1), "apart": (1, 0)}[scales]

        def weight(n: int, place: int | None) -> PreparedWeight:
            both = [
                quantize(torch.randn(n, 64, generator=generator), global_scale=None, backend="reference")
                for _ in range(1 + bool(gate))
            ]
            names = ("global_scale", "up_global_scale")[: len(both)]
            kept = {} if place is None else {name: x[place] for name, x in zip(names, factors)}
            return dataclasses.replace(prepare_weight(*both), **kept)

        self.weights = [weight(32, places[0]), weight(48, places[1])]
        self.gate = gate
        xs = [torch.randn(3, 64, generator=generator).bfloat16() for _ in range(2)]
        self.xs = [xs[0]] * 2 if shared else xs
        self.out = [torch.empty(3, n, dtype=torch.bfloat16) for n in (32, 48)] if out else None

    def right(self) -> bool:
        """Calls grouped_gemm."""
        got = grouped_gemm([*zip(self.xs, self.weights)], out=self.out, gate=self.gate)
        wanted = [x.double() @ w.dequantize(torch.float64).mT for x, w in zip(self.xs, self.weights)]
        wanted = [torch.nn.functional.silu(x[0]) * x[1] for x in wanted] if self.gate else wanted
        same = self.out is None or all(x is y for x, y in zip(got, self.out))
        return same and all(torch.allclose(x.double(), y, rtol=2**-7, atol=1e-2) for x, y in zip(got, wanted))


@pytest.mark.parametrize(
    "scales, shared, out, gate",
    [
        ("none", False, True, ""),
        ("one", True, True, ""),
        ("row", False, False, ""),
        ("apart", False, True, ""),
        ("row", False, True, "silu"),
    ],
)
def test_groups_again(scales: str, shared: bool, out: bool, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors like those of a call take the short road, unless scales must be gathered; what is unlike them never."""
    slow: list[int] = []

    class Counted:
        found = GROUPED.found

        def call(self, *given):
            slow.append(1)
            return GROUPED(*given)

    monkeypatch.setattr(grouped_gemm_module, "GROUPED", Counted())
    first, second = (Groups(seed, scales, shared, out, gate) for seed in (0, 1))
    for problem in (first, first, second, first):
        assert problem.right()
    assert len(slow) == (4 if scales == "apart" else 1)
    slow.clear()
    others = {"none": ("one", shared), "one": ("row", shared), "row": ("apart", shared), "apart": ("one", not shared)}
    assert Groups(2, *others[scales], out, gate).right() and Groups(2, scales, not shared, out, gate).right()
    assert len(slow) >= 2
    assert second.right()
    second.xs[0].requires_grad_()
    if out:
        with pytest.raises(OperandError, match="a: got a tensor that requires a gradient"):
            second.right()
    else:
        assert all(y.requires_grad for y in grouped_gemm([*zip(second.xs, second.weights)], gate=gate))


def test_groups_again_at_other_addresses() -> None:
    """Looked at: which are aligned, and apart from each other."""
    problem = Groups(0, "none", False, True)
    assert problem.right() and problem.right()
    room = torch.zeros(1024, dtype=torch.bfloat16)
    good, x = problem.out, problem.xs[0]
    for over, start in ((problem.xs[1], 8), (problem.weights[0].packed, 0), (good[1], 0), (good[1], 48)):
        problem.out = [torch.tensor([], dtype=torch.bfloat16).set_(over.untyped_storage(), start, (3, 32)), good[1]]
        with pytest.raises(OperandError, match="memory of"):
            problem.right()
    problem.out = good
    problem.xs[0] = room[1 : 1 + 3 * 64].view(3, 64).copy_(x)
    with pytest.raises(OperandError, match="group 0: alignment of a"):
        problem.right()
    problem.xs[0] = x
    problem.out = [room[1 : 1 + 3 * 32].view(3, 32), good[1]]
    assert problem.right()


def test_groups_again_count_as_written() -> None:
    """Autograd does not use what it had saved of an output that is written on the short road."""
    problem = Groups(0, "none", False, True)
    factor = torch.ones(3, 32, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        assert problem.right()
    y = (problem.out[0] * factor).sum()
    assert problem.right()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_autograd_knows_what_was_written() -> None:
    """What it had saved of an output is not used."""
    weight, x = prepare_weight(packed_input.W), packed_input.X
    out = gemm(x, weight)
    factor = torch.ones(4, 32, dtype=torch.bfloat16, requires_grad=True)
    for call in (lambda: gemm(x, weight, out=out), lambda: gemm(x, weight, out=out, alpha=2.0)):
        y = (out * factor).sum()
        call()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
    with torch.inference_mode():
        gemm(x, weight, out=gemm(x, weight))
    refused = torch.zeros(4, 32, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises((RuntimeError, OperandError), match="grad"):
        gemm(x, weight, out=refused)


@needs_compiler
def test_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code calls the kernel, between operations of its own; one graph."""
    monkeypatch.setenv("CUTE_NVFP4_ARCH", "sm_90a")
    weight, rows = prepare_weight(quantize(torch.randn(48, 128), backend="reference")), torch.randn(5, 128).bfloat16()

    def function(x: torch.Tensor) -> torch.Tensor:
        return gemm(x * 2, weight, bias=x[0, :48].float(), backend="sim") + 1

    torch._dynamo.reset()
    with simulating() as runs:
        got = torch.compile(function, fullgraph=True)(rows)
    assert len(runs) == 1 and torch.equal(got, function(rows))
