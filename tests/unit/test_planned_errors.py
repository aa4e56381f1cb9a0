"""gemv and gemm refuse bad input alike, whether a call of the same kind was planned before or not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import test_gemm_input as gemm_input
import test_ops_errors as gemv_input
import torch
from support.roads import Roads, table

from cute_nvfp4 import gemm, gemv, simulating
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.gemm import GEMM
from cute_nvfp4.ops.gemv import GEMV
from cute_nvfp4.scale_layout import to_blocked

M, N, K = gemm_input.M, gemm_input.N, gemm_input.K
A, VECTOR = gemv_input.operand(), gemv_input.operand(rows=1)
LEFT, RIGHT = gemm_input.operand(), gemm_input.operand(rows=N)


@pytest.fixture(scope="module", autouse=True)
def simulator() -> Iterator[None]:
    with simulating():
        yield
    for operation in (GEMV, GEMM):
        operation.calls.clear()


def like(x: torch.Tensor) -> torch.Tensor:
    """Memory of its own that a plan does not tell from ``x``."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    room = torch.empty(size + 64, dtype=x.dtype)
    first = (x.data_ptr() % 64) // x.element_size()
    return room.as_strided(x.shape, x.stride(), first)


# --- gemv


def over_gemv() -> dict[str, dict[str, Any]]:
    """Outputs in the bytes of each part of the operands: only addresses are wrong."""
    room = torch.empty(4096, dtype=torch.uint8)

    def at(place: int) -> torch.Tensor:
        return room[place : place + 2 * M].view(torch.float16)

    data, scale = room[1024 : 1024 + M * 32].view(M, 32), room[2048 : 2048 + M * 4].view(M, 4)
    vector, its_scale = room[3072 : 3072 + 32].view(1, 32), room[3584 : 3584 + 4].view(1, 4)
    room.fill_(56)
    factor = room[3840:3844].view(torch.float32)
    a, b = BlockScaledTensor(data, scale), BlockScaledTensor(vector, its_scale, factor)
    places = {"a.data": 1024 + 16, "a.scale": 2048 + 64, "b.data": 3072, "b.scale": 3584 - 32, "b.global_scale": 3840}
    return {name: {"a": a, "b": b, "out": at(place)} for name, place in {**places, "": 0}.items()}


@pytest.fixture(scope="module")
def gemv_roads(simulator: None) -> Roads:
    good = over_gemv()[""]
    return Roads(
        GEMV.calls,
        [
            lambda: gemv(A, VECTOR),
            lambda: gemv(A, VECTOR, alpha=2.0),
            lambda: gemv(A, VECTOR, alpha=2),
            lambda: gemv(A, VECTOR, out=torch.empty(2, M, dtype=torch.float16)),
            lambda: gemv(**good),
        ],
    )


@pytest.mark.parametrize("where", ["a.data", "a.scale", "b.data", "b.scale", "b.global_scale"])
def test_gemv_over_an_operand(gemv_roads: Roads, where: str) -> None:
    """Of the same key as a good call, which only addresses are not part of."""
    bad = over_gemv()[where]
    assert f"overlap {where} at" in gemv_roads.refused(lambda: gemv(**bad))


def test_gemv_tables(gemv_roads: Roads) -> None:
    for make, _, message in table(gemv_input.test_bad_outputs):
        bad = make()
        said = gemv_roads.refused(lambda out=bad: gemv(A, VECTOR, out=out))
        assert re.search(message, said), said
    for alpha in table(gemv_input.test_alpha):
        if alpha is not None:
            assert "expected a Python number" in gemv_roads.refused(lambda x=alpha: gemv(A, VECTOR, alpha=x))
    for a, b, message in table(gemv_input.test_operands_must_match):
        pair = gemv_input.operand(**a), gemv_input.operand(rows=1, **b)
        assert re.search(message, gemv_roads.refused(lambda x=pair: gemv(*x)))
    for options in (
        {"backend": "cuda"},
        {"backend": "gpu"},
        {"backend": ["sim"]},
        {"out_dtype": torch.float64},
        {"config": "fast"},
    ):
        gemv_roads.refused(lambda x=options: gemv(A, VECTOR, **x))
    gemv_roads.refused(lambda: gemv(A.data, VECTOR))
    gemv_roads.refused(lambda: gemv(A, None))


def test_an_int_beyond_float64(gemv_roads: Roads, gemm_roads: Roads) -> None:
    """It is of the type of the good call's alpha."""
    assert "alpha: got an int beyond float64" in gemv_roads.refused(lambda: gemv(A, VECTOR, alpha=10**400))
    assert "alpha: got an int beyond float64" in gemm_roads.refused(lambda: gemm(LEFT, RIGHT, alpha=-(10**400)))


# --- gemm


@pytest.fixture(scope="module")
def gemm_roads(simulator: None) -> Roads:
    new = torch.empty(2, M, N, dtype=torch.float16)
    return Roads(
        GEMM.calls,
        [
            lambda: gemm(LEFT, RIGHT),
            lambda: gemm(LEFT, RIGHT, alpha=2.0),
            lambda: gemm(LEFT, RIGHT, alpha=2),
            lambda: gemm(LEFT, RIGHT, out=new),
            lambda: gemm(LEFT, RIGHT, bias=torch.zeros(N)),
            *(lambda x=x: gemm(**{**x, "out": like(x["out"])}) for x in over_gemm().values()),
        ],
    )


def over_gemm() -> dict[str, dict[str, Any]]:
    """The same for gemm."""
    a, b = gemm_input.operand(rows=32, k=512, batch=None), gemm_input.operand(rows=32, k=512, batch=None)
    bias, alpha = torch.zeros(32 * 32), torch.ones(32 * 32)
    memory = {"a.data": a.data, "a.scale": a.scale, "b.data": b.data, "b.scale": b.scale, "bias": bias, "alpha": alpha}
    given = {"a": a, "b": b, "bias": bias[:32], "alpha": alpha[:1]}
    return {name: {**given, "out": _half(x).as_strided((32, 32), (32, 1))} for name, x in memory.items()}


def _half(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([], dtype=torch.float16).set_(x.untyped_storage(), 0, (1,))


OVER = over_gemm()


@pytest.mark.parametrize("where", OVER)
def test_gemm_over_an_input(gemm_roads: Roads, where: str) -> None:
    assert f"overlap {where} at" in gemm_roads.refused(lambda: gemm(**OVER[where]))


@pytest.mark.parametrize("which", ["a", "b"])
def test_gemm_signs(gemm_roads: Roads, which: str) -> None:
    """Values are looked at in every simulated call."""
    given = {"a": LEFT, "b": RIGHT}
    scale = given[which].scale.clone(memory_format=torch.preserve_format)
    scale[3, 0, 0, 1, 0, 1] = 0xB8
    given[which] = BlockScaledTensor(given[which].data, scale)
    assert f"scales of {which}: got 1 negative" in gemm_roads.refused(lambda: gemm(**given))


def _options() -> Iterator[tuple[dict, str]]:
    for alpha, _, message in table(gemm_input.test_bad_alpha):
        yield {"alpha": alpha}, message
    for bias, _, message in table(gemm_input.test_bad_bias):
        yield {"bias": bias}, message
    for plan, _, message in table(gemm_input.test_bad_plans):
        yield {"config": plan}, message
    for make, _, message in table(gemm_input.test_bad_outputs):
        yield {"out": make()}, message
    yield {"out_dtype": torch.float64}, "out_dtype: got"
    yield {"backend": "gpu"}, "backend: got"
    yield {"backend": ["sim"]}, "backend: got"


def test_gemm_tables(gemm_roads: Roads) -> None:
    for options, message in _options():
        said = gemm_roads.refused(lambda x=options: gemm(LEFT, RIGHT, **x))
        assert re.search(message, said), said
    for a, b, message in table(gemm_input.test_operands_that_cannot_be_multiplied):
        pair = gemm_input.operand(**a), gemm_input.operand(rows=N, **b)
        assert re.search(message, gemm_roads.refused(lambda x=pair: gemm(*x)))
    rows = BlockScaledTensor(torch.zeros(M, 40, dtype=torch.uint8)[:, :32], to_blocked(torch.zeros(M, 4).byte()))
    gemm_roads.refused(lambda: gemm(rows, rows))
