"""prepare of grouped_gemm with prepared weights: the operation's bits, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support import backends
from support.packed_problems import operand

from cute_nvfp4 import BlockScaledTensor, PreparedWeight, export, grouped_gemm, prepare, prepare_weight, simulating
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import MXFP4, MXFP8, NVFP4, Format

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("hopper")]
SIZES = ((3, 40, 96), (1, 72, 128))


class Groups:
    """Two groups, or more: x of bfloat16 or of a format; global scales that lie as ``scales`` says; a gate or none."""

    def __init__(self, seed: int, scales: str, format: Format | None = None, gate: str = "", count: int = 2) -> None:
        generator, device = torch.Generator().manual_seed(seed), backends.device()
        dtype = torch.float16 if format is NVFP4 else torch.bfloat16
        place = {"none": None, "one": [0] * count, "row": range(count), "apart": range(count)[::-1]}[scales]
        names, self.gate = ("global_scale", "up_global_scale")[: 1 + bool(gate)], gate
        self.xs, self.weights, self.outs = [], [], []
        kept = (torch.rand(3, 160, generator=generator) + 0.5).to(device)
        for i in range(count):
            m, n, k = SIZES[i % 2]
            both = [operand((n, k), generator) for _ in names]
            weight = prepare_weight(*(dataclasses.replace(x, global_scale=None) for x in both), dtype=dtype)
            given = {} if place is None else {x: kept[j, place[i]].reshape(1) for j, x in enumerate(names)}
            self.weights.append(dataclasses.replace(weight, **given))
            x: Any = torch.randn(m, k, generator=generator).to(dtype).to(device)
            if format is not None:
                x = operand((m, k), generator, format=format)
                factor = None if place is None else kept[2, place[i]].reshape(1)
                x = BlockScaledTensor(x.data, x.scale, factor, format)
            self.xs.append(x)
            self.outs.append(torch.full((m, n), float("nan"), dtype=torch.float32, device=device))

    @property
    def problems(self) -> list[tuple[Any, PreparedWeight]]:
        return [*zip(self.xs, self.weights)]

    def same(self, got: list[torch.Tensor], **options: Any) -> bool:
        """Whether results are those of the operation, and what torch says of them."""
        want = grouped_gemm(self.problems, gate=self.gate, out_dtype=torch.float32, **options)
        exact = grouped_gemm(self.problems, gate=self.gate, out_dtype=torch.float32, backend="reference", **options)
        near = all(torch.allclose(x, y, rtol=1e-3, atol=1e-3 * float(y.abs().max())) for x, y in zip(want, exact))
        return near and all(map(torch.equal, got, want))


CASES = {
    "numbers": (("row",), {}),
    "gated, gathered": (("apart", None, "silu"), {"alpha": 0.5}),
    "nvfp4, gathered": (("apart", NVFP4), {"alpha": 0.5}),
    "a table": (("none", NVFP4, "", 17), {"alpha": 0.5}),
}


@pytest.mark.parametrize("name", CASES)
def test_prepared(name: str) -> None:
    """x, the weights and results vary, or nothing does; alpha is of each group."""
    given, options = CASES[name]
    first, second = (Groups(seed, *given) for seed in (1, 2))
    if not options:
        options = {"alpha": torch.linspace(0.5, 2.0, len(first.xs), device=backends.device())}
    if backends.backend() == "sim":
        with simulating("sm_90a"):
            check(first, second, options)
    else:
        check(first, second, options)


def check(first: Groups, second: Groups, options: dict[str, Any]) -> None:
    vary = ("a", "b", "out")
    run = prepare(grouped_gemm, first.problems, gate=first.gate, out=first.outs, vary=vary, **options)
    assert all(x.isnan().all() for x in first.outs), "preparing runs nothing"
    for problem in (second, first):
        assert run(problem.xs, problem.weights, problem.outs) is problem.outs
        assert problem.same(problem.outs, **options)
    alone = prepare(grouped_gemm, first.problems, gate=first.gate, out_dtype=torch.float32, **options)
    got = alone()
    for weight in first.weights:
        if weight.global_scale is not None:
            weight.global_scale.mul_(-0.5)
    for x, y in zip(first.xs, second.xs):
        for name in ("data", "scale"):
            getattr(x, name).copy_(getattr(y, name)) if isinstance(x, BlockScaledTensor) else x.copy_(y)
    assert alone() is got and first.same(got, **options)


@pytest.mark.sim_only("refuses CPU tensors")
def test_addresses_that_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of tensors at addresses of an earlier call are not checked again, all others are."""
    first, second = (Groups(seed, "none") for seed in (1, 2))
    second.weights = first.weights
    with simulating("sm_90a"):
        run = prepare(grouped_gemm, first.problems, out=first.outs, vary=("a", "out"))
        for problem in (first, second):
            assert run(problem.xs, problem.outs) is problem.outs
        checked: list[int] = []
        monkeypatch.setattr(run, "_checked", lambda given, check=run._checked: checked.append(1) or check(given))
        for problem in (second, first):
            for out in problem.outs:
                out.fill_(float("nan"))
            run(tuple(problem.xs), problem.outs)
            assert problem.same(problem.outs)
        assert not checked
        one, two = first.xs
        room = torch.zeros(3 * 96 + 1, dtype=one.dtype)
        for a, out in (
            ([one, two.half()], first.outs),
            ([one], first.outs),
            ([two, one], first.outs),
            (one, first.outs),
            ([room[1:].view(3, 96), two], first.outs),
            (first.xs, [over(one), first.outs[1]]),
            (first.xs, [over(first.outs[1]), first.outs[1]]),
        ):
            with pytest.raises(OperandError, match=r"prepared|memory of out"):
                run(a, out)
        same = torch.cat([one, one])[:3]
        assert run([same, two], second.outs) is second.outs and second.outs[0].equal(first.outs[0])


@pytest.mark.sim_only("counts launches")
def test_one_launch_decodes_a_list() -> None:
    """For each format; then the product."""
    problem = Groups(3, "none", MXFP8)
    problem.xs += Groups(4, "none", MXFP4).xs
    problem.weights += Groups(5, "none").weights
    with simulating("sm_90a") as runs:
        outs = grouped_gemm(problem.problems, out_dtype=torch.float32)
    assert [x.name for x in runs] == ["grouped_dequantize"] * 2 + ["grouped_wgmma"]
    assert problem.same(outs)


GROUPS = Groups(4, "apart")
OTHER = Groups(5, "one")
MORE = Groups(6, "apart", count=3)
X, W = GROUPS.xs, GROUPS.weights
NOT_PREPARED = [(x, x) for x in Groups(7, "none", NVFP4).xs]
EMPTY = [GROUPS.problems[0], (None, W[1])]
BAD = (
    (lambda: prepare(grouped_gemm, NOT_PREPARED), OperandTypeError, "problems: got BlockScaledTensor and Block"),
    (lambda: prepare(grouped_gemm, []), OperandTypeError, "problems: got an empty list"),
    (lambda: prepare(grouped_gemm, 3), OperandTypeError, "problems: got int"),
    (lambda: prepare(grouped_gemm, EMPTY), OperandError, "group 1: rows of a of a prepared call: got 0"),
    (lambda: prepare(grouped_gemm, GROUPS.problems, gate="silu"), OperandError, "group 0: prepared weight"),
    (lambda: prepare(grouped_gemm, GROUPS.problems, backend="reference"), OperandError, "got exact torch"),
    (lambda: prepare(grouped_gemm, GROUPS.problems, vary=("c",)), OperandError, "expected one of a, b, out"),
    (lambda: prepare(grouped_gemm, GROUPS.problems, out=[GROUPS.outs[0]]), OperandError, "out: got list of 1"),
    (lambda: prepare(grouped_gemm, GROUPS.problems, alpha=torch.ones(3)), OperandError, "alpha: got shape"),
    (lambda: export("x", grouped_gemm, GROUPS.problems), OperandError, "call to export: got a list of groups"),
    (lambda: varying("a")([X[0]]), OperandError, r"a.*: got .+, expected .+"),
    (lambda: varying("a")(X[0]), OperandError, r"a.*: got .+, expected .+"),
    (lambda: varying("a")([X[0], None]), OperandError, r"a.*: got .+, expected .+"),
    (lambda: varying("a")([X[0], X[1].half()]), OperandError, r"a.*: got .+, expected .+"),
    (lambda: varying("a")(X[::-1]), OperandError, r"a.*: got .+, expected .+"),
    (lambda: varying("a")(MORE.xs), OperandError, r"a.*: got .+, expected .+"),
    (lambda: varying("b")(OTHER.weights), OperandError, r"b.*: got .+, expected .+"),
    (lambda: varying("out")([x.half() for x in GROUPS.outs]), OperandError, r"out.*: got .+, expected .+"),
    (lambda: varying("out")([over(X[0]), GROUPS.outs[1]]), OperandError, "memory of out"),
    (lambda: varying("out")([over(W[1].packed), GROUPS.outs[1]]), OperandError, "memory of out"),
    (lambda: varying("out")([over(GROUPS.outs[1]), GROUPS.outs[1]]), OperandError, "memory of out"),
    (lambda: varying("out")([over(W[1].global_scale), GROUPS.outs[1]]), OperandError, "memory of out"),
)


def varying(name: str) -> Any:
    return prepare(grouped_gemm, GROUPS.problems, out=GROUPS.outs, vary=(name,))


def over(memory: torch.Tensor) -> torch.Tensor:
    """An output that begins where ``memory`` does."""
    storage = memory.untyped_storage()
    if storage.nbytes() < 480:
        storage.resize_(512)
    return torch.tensor([], dtype=torch.float32).set_(storage, 0, (3, 40))


@pytest.mark.sim_only("refuses CPU tensors")
@pytest.mark.parametrize("call, error, message", BAD, ids=[f"{i} {message}" for i, (_, _, message) in enumerate(BAD)])
def test_refused(call: Any, error: type[Exception], message: str) -> None:
    with simulating("sm_90a"), pytest.raises(error, match=message):
        call()
