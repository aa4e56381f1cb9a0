"""A sample of ``tests.fuzz.extreme``: every kind of every tensor of every function, and every value of every axis."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

if str(Path(__file__).parents[2]) not in sys.path:
    sys.path.append(str(Path(__file__).parents[2]))

from cute_nvfp4 import quantize
from tests.fuzz.extreme import axes, others, products
from tests.fuzz.extreme.axes import ARCHS, ARGUMENTS, Call, random_call, sample
from tests.fuzz.extreme.verdict import judge

FUNCTIONS = (*axes.PRODUCTS, *axes.OTHERS)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_sample(function: str) -> None:
    """Many combinations are refused; the test would mean nothing if all of them were."""
    counts: Counter[str] = Counter()
    for call in sample():
        if call.function == function:
            found = judge(call)
            assert not found.failed, f"{found.kind}: {found.text}\n  python -m tests.fuzz.extreme --call '{call}'"
            counts[found.kind] += 1
    assert counts["right"] >= 3 and counts["refused"] >= 10, counts


def test_the_sample_has_every_value() -> None:
    calls = sample()
    for name, values in (("arch", ARCHS[:4]), ("a", axes.FORMATS), ("alpha", axes.NUMBERS), ("kind", axes.KINDS)):
        assert set(values) <= {getattr(call, name) for call in calls}
    for function, arguments in ARGUMENTS.items():
        assert set(arguments) <= {call.argument for call in calls if call.function == function}


@pytest.mark.parametrize("index", range(200))
def test_text_and_back(index: int) -> None:
    call = random_call(random.Random(index))
    assert Call.parse(str(call)) == call


def test_a_wrong_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call("gemm", alpha="1e20", a_scale="3e-38", b_scale="20")
    assert judge(call).kind == "right"
    monkeypatch.setattr(products, "gemm", lambda *given, **options: torch.full((3, 16), 1.0))
    assert judge(call).kind == "wrong"


@pytest.mark.parametrize("given", [False, True])
def test_a_wrong_quantized_result_is_noticed(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One scale that is twice as large, and a result beyond float32 that is not NaN."""
    call = Call("gated_gemm", quantized="20", given=given)
    beyond = Call("gated_gemm", alpha="1e20", quantized="0.004", given=given)
    assert judge(call).kind == judge(beyond).kind == "right"
    right = products.gated_gemm

    def doubled(*operands: object, **options: object) -> object:
        found = right(*operands, **options)
        assert found.scale.is_contiguous()
        found.scale.view(-1)[:1].add_(8)
        return found

    monkeypatch.setattr(products, "gated_gemm", doubled)
    assert judge(call).kind == "wrong"
    zeros = lambda *operands, **options: quantize(torch.zeros(3, 16), global_scale=0.004, backend="reference")  # noqa: E731
    monkeypatch.setattr(products, "gated_gemm", zeros)
    assert judge(beyond).kind == "wrong"


def test_a_nested_alpha_of_a_quantized_product_is_refused() -> None:
    """A run of the fuzz found it: the overlap of ``out`` was looked for in a tensor without memory."""
    text = "function=gated_gemm,b=prepared,n=48,alpha=20,on_device=True,given=True,quantized=0.004"
    call = Call.parse(f"{text},argument=alpha,kind=jagged")
    assert judge(call).kind == "refused"


def test_another_exception_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(*given: object, **options: object) -> torch.Tensor:
        raise RuntimeError("reshape is not implemented for sparse tensors")

    monkeypatch.setattr(others, "quantize", bad)
    assert judge(Call("quantize", argument="x", kind="coo")).kind == "foreign"


def test_what_must_be_refused_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "tensor_amax", lambda x: torch.zeros(()))
    assert judge(Call("tensor_amax", argument="x", kind="negative")).kind == "accepted"


DEFECTS = (
    "function=gemm,arch=sm_90a,alpha=3e36,data=zeros",
    "function=gemm,arch=sm_90a,a=float tiny,b=prepared,alpha=-9e31,seed=1",
    "function=gemm,arch=sm_120a,a=float,b=prepared,alpha=20,b_scale=3e35,data=zeros",
    "function=gemv,arch=sm_100a,a_scale=3e38,b_scale=3e-38",
    "function=gemm,arch=sm_90a,a_scale=3e38,b_scale=3e-38",
    "function=export,arch=sm_90a,a=float,a_scale=0.004,argument=x,kind=parameter",
)


@pytest.mark.parametrize("text", DEFECTS)
def test_what_was_wrong(text: str) -> None:
    found = judge(Call.parse(text))
    assert found.kind == "right" and found.launches, found


@pytest.mark.parametrize("arch", ARCHS[:4])
@pytest.mark.parametrize("function", ["gemm", "gated_gemm", "grouped_gemm", "grouped_gemm_contiguous"])
def test_formats_that_no_mma_multiplies(function: str, arch: str) -> None:
    found = judge(Call(function, arch, "nvfp4", "mxfp4", k=64))
    assert found.kind == "refused" and not found.launches
    assert arch == "sm_90a" or "got nvfp4 and mxfp4, expected nvfp4 and nvfp4" in found.text


def test_a_refusal_says_what_differs() -> None:
    found = judge(Call("prepare", "sm_100a", argument="a.data", place=16))
    assert found.kind == "refused" and "got alignment 16, expected alignment 32, as prepared" in found.text
