"""prepare: the results of the operation, whatever operands vary; and what a prepared call refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import gemm_problems, gemv_problems

import cute_nvfp4 as nv
from cute_nvfp4 import BlockScaledTensor, prepare, simulating
from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.runtime.kernel import Kernel

GEMV = gemv_problems.Case(20, 64, a_global=0.5, dtype=torch.float32)
# of GEMMs: a plan given (M on either side, stream-K), and what surrounds the product
GEMMS = {
    "plain": gemm_problems.Case(20, 24, 64, batch=0),
    "swapped": gemm_problems.Case(20, 24, 64, batch=0, swap=True, a_global=0.5, b_global=-2.0),
    "stream-K": gemm_problems.Case(20, 24, 1024, batch=0, scheduler="stream_k", b_global=0.25),
    "bias and alpha": gemm_problems.Case(20, 24, 64, batch=2, bias="batch", alpha=0.5, alpha_tensor=True, a_global=3.0),
    "chosen": gemm_problems.Case(20, 24, 64, batch=0, workers=0, alpha=0.5, dtype="bfloat16"),
}


def gemv_given(seed: int = 0) -> dict[str, Any]:
    problem = gemv_problems.make(replace(GEMV, seed=seed))
    return {"a": problem.a, "b": problem.b, "out": torch.full((1, GEMV.m), torch.nan)}


def gemm_given(name: str, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """What may vary, and the other arguments, which are those of seed 0."""
    case = GEMMS[name]
    problem, first = gemm_problems.make(replace(case, seed=seed)), gemm_problems.make(case)
    varying = {"a": problem.a, "b": problem.b, "out": problem.out.fill_(torch.nan)}
    return varying, {"alpha": first.alpha, "bias": first.bias, "config": case.plan()}


def check(operation: Any, given: Any, vary: tuple[str, ...], **options: Any) -> None:
    """A prepared call, made twice with other operands: the operation's bits, in the output that is given."""
    first, others = given(0), [given(1), given(2)]
    operands = {name: x for name, x in first.items() if name != "out"}
    run = prepare(operation, *operands.values(), out=first["out"], vary=vary, **options)
    assert first["out"].isnan().all(), "preparing runs nothing"
    for other in (*others, first):
        used = {name: other[name] if name in vary else x for name, x in first.items()}
        want = operation(used["a"], used["b"], out=torch.empty_like(used["out"]), **options)
        used["out"].fill_(torch.nan)
        assert run(*(other[name] for name in vary)) is used["out"]
        assert used["out"].equal(want)


@pytest.mark.parametrize("vary", [(), ("a",), ("b",), ("out",), ("out", "b", "a")], ids=str)
def test_gemv(vary: tuple[str, ...]) -> None:
    check(nv.gemv, gemv_given, vary, alpha=-1.5)


@pytest.mark.sweep
@pytest.mark.parametrize("vary", [("a",), ("out", "b")], ids=str)
@pytest.mark.parametrize("name", GEMMS)
def test_gemm(name: str, vary: tuple[str, ...]) -> None:
    _, options = gemm_given(name)
    check(nv.gemm, lambda seed: gemm_given(name, seed)[0], vary, **options)


def matrix(seed: int = 0, offset: int = 0) -> torch.Tensor:
    room = torch.randn(8 * 64 + 16, generator=torch.Generator().manual_seed(seed))
    return room[offset : offset + 8 * 64].view(8, 64)


def same(got: BlockScaledTensor, want: BlockScaledTensor) -> bool:
    scales = got.global_scale is None or float(got.global_scale) == float(want.global_scale)
    return got.data.equal(want.data) and got.scale.equal(want.scale) and scales


@pytest.mark.parametrize("options", [{"global_scale": 0.02}, {"global_scale": None}, {"format": "mxfp8_e4m3"}], ids=str)
def test_quantize(options: dict[str, Any]) -> None:
    """The global scale is read where it is, and so is that of an output that varies."""
    outs = [nv.quantize(matrix(9), **options) for _ in range(2)]
    if options.get("global_scale"):
        options = {"global_scale": outs[0].global_scale}
    run = prepare(nv.quantize, matrix(), out=outs[0], vary=("x", "out"), **options)
    for seed, out in ((1, outs[1]), (2, outs[0])):
        assert run(matrix(seed), out) is out
        assert same(out, nv.quantize(matrix(seed), **options, backend="reference"))
    alone = prepare(nv.quantize, x := matrix(), **options)
    got = alone()
    x.copy_(matrix(5))
    assert alone() is got and same(got, nv.quantize(matrix(5), **options, backend="reference"))


def test_a_result_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without out one is made, and written to by each call; preparing again plans nothing anew."""
    given = gemv_given()
    run = prepare(nv.gemv, given["a"], given["b"], vary=("b",), out_dtype=torch.float32)
    first = run(given["b"])
    assert run(gemv_given(1)["b"]) is first
    assert first.equal(nv.gemv(given["a"], gemv_given(1)["b"], out_dtype=torch.float32))
    monkeypatch.setattr(Kernel, "launcher", lambda *args: pytest.fail("planned again"))
    prepare(nv.gemv, given["a"], given["b"], out_dtype=torch.float32)


# --- what is refused


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("b", lambda given: gemv_problems.make(replace(GEMV, k=128)).b),
        ("b", lambda given: gemv_problems.make(replace(GEMV, b_global=2.0)).b),
        ("a", lambda given: gemv_problems.make(replace(GEMV, m=21)).a),
        ("a", lambda given: gemv_problems.make(replace(GEMV, alignment=8)).a),
        ("a", lambda given: given["a"].data),
        ("out", lambda given: given["out"].half()),
        ("out", lambda given: torch.empty(1, 21)),
        ("out", lambda given: torch.empty(21)[1:].view(1, 20)),
        ("out", lambda given: [0.0]),
        ("out", lambda given: None),
    ],
)
def test_another_kind_of_operand(name: str, bad: Any) -> None:
    given = gemv_given()
    run = prepare(nv.gemv, given["a"], given["b"], out=given["out"], vary=(name,))
    with pytest.raises(OperandError, match=rf"{name}( of a prepared call)?: got .+, expected .+"):
        run(bad(given))


def test_what_is_aligned_less() -> None:
    """quantize reads 32 bytes at once where it may."""
    at = [matrix(1, offset) for offset in range(0, 16, 4)]
    whole, half = (next(x for x in at if x.data_ptr() % 32 == place) for place in (0, 16))
    run = prepare(nv.quantize, whole, global_scale=None, vary=("x",))
    with pytest.raises(OperandError, match="got address modulo 32 16, expected address modulo 32 0"):
        run(half)


def test_as_many_as_vary() -> None:
    given = gemv_given()
    run = prepare(nv.gemv, given["a"], given["b"], vary=("b", "out"), out=given["out"])
    for bad in ((), (given["b"],), (given["b"], given["out"], given["a"])):
        with pytest.raises(OperandError, match=rf"operands of a prepared call: got {len(bad)}, expected 2: b, out"):
            run(*bad)
    with pytest.raises(OperandError, match="got 1, expected 0: none"):
        prepare(nv.gemv, given["a"], given["b"])(given["b"])


@pytest.mark.parametrize("vary", [("c",), ("x",), ("a", "a"), ("alpha",)], ids=str)
def test_names(vary: tuple[str, ...]) -> None:
    given = gemv_given()
    with pytest.raises(OperandError, match=r"operand that varies: got '.*', expected one of a, b, out, each once"):
        prepare(nv.gemv, given["a"], given["b"], vary=vary)


def test_operations() -> None:
    given = gemv_given()
    known = "gated_gemm, gemm, gemv, grouped_gemm, quantize"
    with pytest.raises(OperandError, match=f"operation to prepare: got dequantize, expected {known}"):
        prepare(nv.dequantize, given["a"])
    with pytest.raises(OperandTypeError, match="alpha: got str"):
        prepare(nv.gemv, given["a"], given["b"], alpha="1")
    with pytest.raises(OperandError, match="option of a prepared quantize: got hessian"):
        prepare(nv.quantize, matrix(), hessian=matrix())
    with pytest.raises(OperandError, match="request to prepare: got random rounding"):
        prepare(nv.quantize, matrix(), global_scale=None, rounding="stochastic")
    with pytest.raises(OperandError, match="request to prepare: got 2 launches, or a copy of x"):
        prepare(nv.quantize, torch.randn(64, 12, dtype=torch.bfloat16)[:, 1:].t()[:, ::2], global_scale=None)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("operation", ["gemv", "gemm", "quantize"])
def test_exact_torch_is_not_prepared(operation: str, backend: str) -> None:
    """With the hint what to do, also after a call that the simulator was planned for."""
    import contextvars

    problem = gemm_problems.make(GEMMS["plain"])
    args = (matrix(),) if operation == "quantize" else (problem.a, problem.b)
    # outside of the simulator that these tests run in
    run = contextvars.Context().run if backend == "auto" else lambda call: call()
    with pytest.raises(OperandError, match=r"backend of a prepared call: got exact torch.*simulating\(\)"):
        run(lambda: prepare(getattr(nv, operation), *args, backend=backend))


# --- memory


def _over(operation: str) -> dict[str, dict[str, Any]]:
    """Operands whose output lies in the bytes of each input; "" is right."""
    room = torch.zeros(1 << 15, dtype=torch.uint8)
    a = BlockScaledTensor(room[4096:4736].view(20, 32), room[8192:8704])
    b = BlockScaledTensor(room[12288:13056].view(24, 32), room[16384:16896], room[20480:20484].view(torch.float32))
    bias, alpha = room[24576 : 24576 + 96].view(torch.float32), room[28672:28676].view(torch.float32)
    given = {"a": a, "b": b, "bias": bias, "alpha": alpha}
    places = {"": 0, "a.data": 4096 + 128, "a.scale": 8192, "b.data": 12288, "b.scale": 16384, "b.global_scale": 20480}
    shape, count = (20, 24), 960
    if operation == "gemv":
        given, shape, count = {"a": a, "b": b}, (20,), 40
    else:
        places |= {"bias": 24576, "alpha": 28672}
    return {
        name: {**given, "out": room[place : place + count].view(torch.float16).view(shape)}
        for name, place in places.items()
    }


@pytest.mark.parametrize("operation", ["gemv", "gemm"])
def test_overlap(operation: str) -> None:
    """At a call, and before one: also if a good call was planned."""
    function, cases = getattr(nv, operation), _over(operation)
    good = cases.pop("")
    run = prepare(function, **{name: x for name, x in good.items() if name not in "ab"}, **_ab(good), vary=("out",))
    for name, bad in cases.items():
        with pytest.raises(OperandError, match="memory of out: got bytes"):
            run(bad["out"])
        with pytest.raises(OperandError, match="memory of out: got bytes"):
            prepare(function, **bad)
        assert name
    assert run(good["out"]) is good["out"]


def _ab(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in "ab"}


def test_overlap_of_a_quantized_output() -> None:
    room = torch.zeros(8192, dtype=torch.uint8)
    x = room[4096 : 4096 + 2048].view(torch.float32).view(8, 64)

    def out(data: int = 0, scale: int = 1024, factor: int = 2048) -> BlockScaledTensor:
        factor_ = room[factor : factor + 4].view(torch.float32)
        return BlockScaledTensor(room[data : data + 256].view(8, 32), room[scale : scale + 512], factor_)

    good = out()
    good.global_scale.fill_(0.5)
    run = prepare(nv.quantize, x, global_scale=good.global_scale, out=good, vary=("out",))
    for places in ((4096, 1024, 2048), (0, 4096 + 512, 2048), (0, 128, 2048), (0, 1024, 64), (0, 1024, 1024 + 128)):
        bad = out(*places)
        with pytest.raises(OperandError, match="memory of out"):
            run(bad)
        with pytest.raises(OperandError, match="memory of out"):
            prepare(nv.quantize, x, global_scale=bad.global_scale, out=bad)
    assert run(good) is good


def test_another_simulation() -> None:
    """A prepared call runs what it was prepared for, in the simulation around the call."""
    given = gemv_given()
    with simulating("sm_90a"):
        run = prepare(nv.gemv, given["a"], given["b"], out=given["out"])
    with simulating() as runs:
        run()
    assert [x.kernel.arch for x in runs] == ["sm_90a"] and given["out"].isfinite().all()
