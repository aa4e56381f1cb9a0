"""What a warm call costs besides its launch, counted: operations of torch, and nothing of them with ``out=``.

The driver is replaced, so that calls on CPU tensors take the road that CUDA tensors take. Operations are counted by
torch's profiler: a dispatch mode would send calls through the operators of ``torch.library``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile

import cute_nvfp4 as nv
from cute_nvfp4 import BlockScaledTensor
from cute_nvfp4.ops.operation import OPERATIONS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from launch import without_driver

K = 64
NEW, EMPTY = "aten::empty_like", "aten::empty"


@pytest.fixture(scope="module", autouse=True)
def no_driver() -> Iterator[None]:
    """Plans of calls that launch nothing are forgotten."""
    plans = [x.calls for x in OPERATIONS.values()]
    kept = [dict(x) for x in plans]
    for calls in plans:
        calls.clear()
    with without_driver("sm_100a"):
        yield
    for calls, before in zip(plans, kept):
        calls.clear()
        calls.update(before)


def operand(rows: int, scaled: bool = False) -> BlockScaledTensor:
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows))
    return nv.quantize(x, global_scale=0.5 if scaled else None, backend="reference")


def operations(call: Callable[[], object]) -> list[str]:
    """What a warm call does in torch, the outermost operations only."""
    call()
    with profile() as found:
        call()
    return [x.name for x in found.function_events if x.cpu_parent is None]


A, B, WIDE = operand(16, scaled=True), operand(24, scaled=True), operand(128)
PLAIN = operand(16)
ROWS = nv.GroupedRows.of(operand(6), torch.tensor([0, 3, 6], dtype=torch.int32))
STACK = nv.quantize(torch.randn(2, 8, K), global_scale=None, backend="reference")
GROUPS = [(operand(3), operand(8)), (operand(5), operand(8))]
X, OTHER = torch.randn(16, K), torch.randn(16, K)
ALPHA = torch.ones(1)
QUANTIZED = nv.quantize(X, global_scale=0.5, backend="reference")
SCALE, GAIN, BOTH = QUANTIZED.global_scale, torch.ones(K), torch.randn(16, 2 * K)
VECTOR, MATRIX, SQUARE = torch.empty(16), torch.empty(16, 24), torch.empty(16, 128)
OUTS = [torch.empty(3, 8), torch.empty(5, 8)]
OUTS_OF_ONE = [torch.empty(0, 8), OUTS[1]]
FACTORS, ALPHAS = torch.tensor([0.5, 2.0]).unbind(), torch.ones(2)
WIDE_K = nv.quantize(torch.randn(16, 128), global_scale=None, backend="reference")
PREPARED_WEIGHT, ROW = nv.prepare_weight(WIDE_K, backend="reference"), torch.randn(16, 128, dtype=torch.bfloat16)
DEALT, STATUS = torch.empty(6, 8), torch.zeros(1, dtype=torch.int32)

WITH_OUT: dict[str, Callable[[], object]] = {
    "gemv": lambda: nv.gemv(A, B, out=VECTOR, alpha=0.5),
    "gemm": lambda: nv.gemm(A, B, out=MATRIX, alpha=ALPHA),
    "gated_gemm": lambda: nv.gated_gemm(PLAIN, WIDE, WIDE, out=SQUARE),
    "grouped_gemm": lambda: nv.grouped_gemm(GROUPS, out=OUTS),
    "grouped_gemm, one scale for all": lambda: nv.grouped_gemm(with_scales(FACTORS[0], FACTORS[0]), out=OUTS),
    "grouped_gemm, scales in a row": lambda: nv.grouped_gemm(with_scales(*FACTORS), alpha=ALPHAS, out=OUTS),
    "grouped_gemm, one group of two": lambda: nv.grouped_gemm(
        [(None, GROUPS[0][1]), GROUPS[1]], alpha=1.0, out=OUTS_OF_ONE
    ),
    "grouped_gemm_contiguous": lambda: nv.grouped_gemm_contiguous(ROWS, STACK, out=DEALT, status=STATUS),
    "quantize, scale given": lambda: nv.quantize(X, global_scale=QUANTIZED.global_scale, out=QUANTIZED),
    "quantize, scale computed": lambda: nv.quantize(X, out=QUANTIZED),
    "rmsnorm_quantize": lambda: nv.rmsnorm_quantize(X, GAIN, global_scale=SCALE, out=QUANTIZED),
    "rmsnorm_quantize, in place": lambda: nv.rmsnorm_quantize(
        X, GAIN, residual=OTHER, residual_out=OTHER, global_scale=SCALE, out=QUANTIZED
    ),
    "silu_mul_quantize": lambda: nv.silu_mul_quantize(X, OTHER, global_scale=SCALE, out=QUANTIZED),
    "silu_mul_quantize, one tensor": lambda: nv.silu_mul_quantize(BOTH, global_scale=SCALE, out=QUANTIZED),
}


def with_scales(*scales: torch.Tensor) -> list[tuple[BlockScaledTensor, BlockScaledTensor]]:
    return [(BlockScaledTensor(a.data, a.scale, scale), b) for (a, b), scale in zip(GROUPS, scales)]


@pytest.mark.parametrize("name", WITH_OUT)
def test_with_out_nothing_but_a_launch(name: str) -> None:
    assert operations(WITH_OUT[name]) == []


NEW_RESULT: dict[str, tuple[Callable[[], object], list[str]]] = {
    "gemv": (lambda: nv.gemv(A, B), [NEW]),
    "gemm": (lambda: nv.gemm(A, B), [NEW]),
    "gated_gemm": (lambda: nv.gated_gemm(PLAIN, WIDE, WIDE), [EMPTY]),
    "grouped_gemm": (lambda: nv.grouped_gemm(GROUPS), [NEW]),
    "grouped_gemm_contiguous": (lambda: nv.grouped_gemm_contiguous(ROWS, STACK, status=STATUS), [NEW]),
    "quantize, scale given": (lambda: nv.quantize(X, global_scale=QUANTIZED.global_scale), [NEW, NEW]),
    "quantize, scale computed": (lambda: nv.quantize(X), [NEW, NEW, NEW]),
    "quantize, no scale": (lambda: nv.quantize(X, global_scale=None), [NEW, NEW]),
    "rmsnorm_quantize": (lambda: nv.rmsnorm_quantize(X, GAIN, global_scale=SCALE), [NEW] * 2),
    "rmsnorm_quantize, residual": (lambda: nv.rmsnorm_quantize(X, GAIN, residual=OTHER, global_scale=SCALE), [NEW] * 3),
    "rmsnorm_quantize, one row": (
        lambda: nv.rmsnorm_quantize(X[0], None, global_scale=SCALE, return_normed=True),
        ["aten::select"] + [NEW] * 3,
    ),
    "silu_mul_quantize": (lambda: nv.silu_mul_quantize(BOTH, global_scale=SCALE, return_activation=True), [NEW] * 3),
}


@pytest.mark.parametrize("name", NEW_RESULT)
def test_without_out_only_the_result_is_allocated(name: str) -> None:
    call, allowed = NEW_RESULT[name]
    # results of groups are parts of one
    assert [x for x in operations(call) if x != "aten::unsafe_split_with_sizes"] == allowed


PREPARED: dict[str, Callable[[], Callable[[], object]]] = {
    "gemv": lambda: nv.prepare(nv.gemv, A, B, out=VECTOR),
    "gemv, result of its own": lambda: nv.prepare(nv.gemv, A, B),
    "gemv, b and out vary": lambda: _with(nv.prepare(nv.gemv, A, B, out=VECTOR, vary=("b", "out")), B, VECTOR),
    "gemm, a varies": lambda: _with(nv.prepare(nv.gemm, A, B, out=MATRIX, vary=("a",)), A),
    "quantize, x varies": lambda: _with(
        nv.prepare(nv.quantize, X, global_scale=QUANTIZED.global_scale, out=QUANTIZED, vary=("x",)), OTHER
    ),
}


def _with(run: Callable[..., object], *given: object) -> Callable[[], object]:
    return lambda: run(*given)


@pytest.mark.parametrize("name", PREPARED)
def test_a_prepared_call_is_nothing_but_a_launch(name: str) -> None:
    assert operations(PREPARED[name]()) == []


ROOT = str(Path(nv.__file__).parent)
ROAD = {"gemv": 6, "gemm": 6, "gated_gemm": 6, "quantize, scale given": 6, "silu_mul_quantize": 7}
"""Functions of a warm call: the public one, those compiled for the operation and the plan, overlap, the launch."""


def functions(call: Callable[[], object]) -> list[str]:
    """The functions of the package that a warm call runs, and those it compiled, but for where CPU tensors are run."""
    return [name for path, name in traced(call) if "simulating" not in path]


def traced(call: Callable[[], object]) -> list[tuple[str, str]]:
    """The files of these functions, and their names."""
    call(), call()
    found: list[tuple[str, str]] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and (path == "<string>" or path.startswith(ROOT)):
            found.append((path.removeprefix(f"{ROOT}/"), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("name", ROAD)
def test_a_warm_call_is_a_straight_road(name: str) -> None:
    found = functions(WITH_OUT[name])
    assert len(found) <= ROAD[name], found


def test_a_detour_is_counted() -> None:
    assert len(functions(lambda: (nv.gemv(A, B), nv.gemm(A, B)))) > max(ROAD.values())


def test_what_is_counted() -> None:
    """The count sees allocations, copies and views."""
    found = operations(lambda: torch.empty(3).zero_()[1:].copy_(torch.ones(())))
    assert found[:2] == [EMPTY, "aten::zero_"] and "aten::copy_" in found


def walks() -> dict[tuple[str, str], set[str]]:
    """The files of a planned call, by call and architecture, as the page says them."""
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "walks.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| (sm_\w+) \| (.+) \|$", page, re.M)
    return {(call, arch): set(re.findall(r"`(.+?)`", files)) for call, arch, files in rows}


CALLS: dict[str, Callable[[], object]] = {
    "gemm(a, b)": lambda: nv.gemm(WIDE_K, WIDE_K),
    "gemm(x, weight)": lambda: nv.gemm(ROW, PREPARED_WEIGHT),
    "quantize(x)": lambda: nv.quantize(X),
}


@pytest.mark.parametrize("walk", walks(), ids=" ".join)
def test_the_page_of_walks_names_the_files_of_a_call(walk: tuple[str, str]) -> None:
    call, arch = walk
    with without_driver(arch):
        for operation in OPERATIONS.values():
            operation.calls.clear()
        found = {path for path, _ in traced(CALLS[call])} - {"<string>"}
        for operation in OPERATIONS.values():
            operation.calls.clear()
    assert found == walks()[walk]


def test_the_page_has_the_three_calls() -> None:
    assert {call for call, _ in walks()} == {*CALLS}
