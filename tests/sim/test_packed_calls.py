"""Calls of gemm with a prepared weight: bad input over both roads, autograd's versions, inductor."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import test_packed_gemm as packed_input
import torch
from compilers import needs_compiler
from roads import Roads, table

from cute_nvfp4 import PreparedWeight, gemm, grouped_gemm, prepare_weight, quantize, simulating
from cute_nvfp4.errors import OperandError
from cute_nvfp4.ops import packed_gemm as packed_module
from cute_nvfp4.ops import packed_list as packed_groups

pytestmark = [pytest.mark.kernels, pytest.mark.sim_only("CPU tensors")]


@pytest.fixture(autouse=True)
def simulator() -> Iterator[None]:
    with simulating("sm_90a"):
        yield
    packed_module._calls.clear()


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
    roads = Roads(packed_module._calls, good)
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
        ({"config": "fast"}, "config: got str"),
        ({"config": ["fast"]}, "config: got list"),
    ):
        said = roads.refused(lambda options=options: gemm(x, weight, **options))
        assert re.search(message, said), said


@pytest.mark.parametrize("where", ["a", "b", "bias", "device scalar 0", "device scalar 1"])
def test_over_an_input(where: str) -> None:
    """Of the same key as a good call, which only addresses are not part of."""
    x, bias, alpha, factor = torch.zeros(4, 64).bfloat16(), torch.zeros(64), torch.ones(64), torch.ones(64)
    prepared = prepare_weight(packed_input.W)
    weight = PreparedWeight(prepared.packed, 32, 64, prepared.dtype, factor[:1])
    memory = {"a": x, "b": weight.packed, "bias": bias, "device scalar 0": alpha, "device scalar 1": factor}[where]
    over = torch.tensor([], dtype=torch.bfloat16).set_(memory.untyped_storage(), 0, (4, 32))

    def call(out: torch.Tensor) -> None:
        gemm(x, weight, alpha=alpha[:1], bias=bias[:32], out=out)

    roads = Roads(packed_module._calls, [lambda: call(torch.empty_like(over))])
    assert f"overlap {where} at" in roads.refused(lambda: call(over))


def test_groups() -> None:
    """The same of groups: what is wrong is refused also where good calls were planned."""
    weight, x = prepare_weight(packed_input.W), packed_input.X
    pairs, rows = [(x, weight)] * 2, torch.empty(12, 32, dtype=torch.bfloat16)
    good = [lambda: grouped_gemm(pairs), lambda: grouped_gemm(pairs, out=[rows[:4], rows[4:8]])]
    roads = Roads(packed_groups._calls, good)
    over = torch.tensor([], dtype=torch.bfloat16).set_(weight.packed.untyped_storage(), 0, (4, 32))
    for problems, out, message in (
        (pairs, [], "out: got list of 0"),
        (pairs, [rows[:4]], "out: got list of 1"),
        (pairs, [rows[:4], rows[4:9]], "shape of out"),
        (pairs, [rows[:4], rows[4:8].float()], "group 1"),
        (pairs, [rows[:4], rows[2:6]], "memory of out"),
        (pairs, [rows[:4], over], "memory of an operand"),
        (pairs, [rows[:4], 5], "out: got int"),
        ([(x, weight), (x.half(), weight)], None, "group 1: dtype of a"),
        ([(x, weight), (x, None)], None, "group 1: b: got NoneType"),
        ([(x, weight), x], None, "group 1: problem: got Tensor"),
    ):
        said = roads.refused(lambda problems=problems, out=out: grouped_gemm(problems, out=out))
        assert message in said, said
    packed_groups._calls.clear()


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
    weight, rows = prepare_weight(quantize(torch.randn(48, 128))), torch.randn(5, 128).bfloat16()

    def function(x: torch.Tensor) -> torch.Tensor:
        return gemm(x * 2, weight, bias=x[0, :48].float(), backend="sim") + 1

    torch._dynamo.reset()
    with simulating() as runs:
        got = torch.compile(function, fullgraph=True)(rows)
    assert len(runs) == 1 and torch.equal(got, function(rows))
