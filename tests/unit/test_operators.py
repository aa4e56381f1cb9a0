"""The operators of ``torch.ops.cute_nvfp4``: what ``opcheck`` asks, on the CPU and in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from cute_nvfp4 import (
    GroupedRows,
    gated_gemm,
    gemm,
    gemv,
    grouped_gemm,
    grouped_gemm_contiguous,
    prepare_weight,
    quantize,
    rmsnorm_quantize,
    route,
    silu_mul_quantize,
)
from cute_nvfp4.ops import library
from cute_nvfp4.scale_layout import blocked_flat

OPS = torch.ops.cute_nvfp4
assert library


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


A, B, B2 = quantize(normal(40, 64)), quantize(normal(48, 64)), quantize(normal(48, 64) * 2)
MX = quantize(normal(2, 40, 64), "mxfp8_e4m3"), quantize(normal(2, 48, 64), "mxfp8_e5m2")
ROWS = GroupedRows.of(A, [0, 7, 7, 40])
STACK = quantize(normal(3, 48, 64))
ALPHA = torch.tensor([0.5])


def parts(*operands: Any) -> tuple[torch.Tensor, ...]:
    return tuple(t for x in operands for t in (x.data, blocked_flat(x.scale) if x.scale.ndim == 6 else x.scale))


def lists(*pairs: Any) -> tuple[list, ...]:
    data, scales, factors = [], [], []
    for side in zip(*pairs):
        data.append([None if x is None else x.data for x in side])
        scales.append([None if x is None else parts(x)[1] for x in side])
        factors.append([None if x is None else x.global_scale for x in side])
    return data[0], scales[0], data[1], scales[1], *factors


class Case(NamedTuple):
    """Arguments of an operator; ``outs``: of its out variant besides; ``public``: the same by a public function."""

    name: str
    args: tuple
    options: dict[str, Any]
    outs: dict[str, Any]
    public: Callable[[], Any]


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float16)


def byte(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


FACTORS = A.global_scale, B.global_scale
BIAS = normal(48)
CASES = {
    "gemv": Case("gemv", (*parts(A, B), *FACTORS), {"alpha": 2.0}, {"out": half(40)}, lambda: gemv(A, B, alpha=2.0)),
    "gemm": Case(
        "gemm",
        (*parts(A, B), *FACTORS, ALPHA, BIAS),
        {"out_dtype": torch.float32},
        {"out": torch.empty(40, 48)},
        lambda: gemm(A, B, alpha=ALPHA, bias=BIAS, out_dtype=torch.float32),
    ),
    "gemm, MX": Case(
        "gemm",
        parts(*MX),
        {"a_format": "mxfp8", "b_format": "mxfp8_e5m2", "alpha": 0.5},
        {"out": half(2, 40, 48)},
        lambda: gemm(*MX, alpha=0.5),
    ),
    "gated_gemm": Case(
        "gated_gemm",
        (*parts(A, B, B2), *FACTORS, B2.global_scale, ALPHA),
        {"gate": "relu"},
        {"out": half(40, 48)},
        lambda: gated_gemm(A, B, B2, alpha=ALPHA, gate="relu"),
    ),
    "gated_gemm_quantized": Case(
        "gated_gemm_quantized",
        (*parts(A, B, B2), *FACTORS, B2.global_scale, None, torch.tensor(0.1)),
        {},
        {"out": byte(40, 24), "out_scale": byte(512)},
        lambda: parts(gated_gemm(A, B, B2, out_global_scale=0.1)),
    ),
    "grouped_gemm": Case(
        "grouped_gemm",
        lists((A, B), (None, B2), (B2, B)),
        {"alpha": 2.0},
        {"out": [half(40, 48), half(0, 48), half(48, 48)]},
        lambda: grouped_gemm([(A, B), (None, B2), (B2, B)], alpha=2.0),
    ),
    "grouped_gemm_contiguous": Case(
        "grouped_gemm_contiguous",
        (*parts(ROWS), ROWS.offsets, *parts(STACK), ROWS.global_scale, STACK.global_scale),
        {},
        {"out": half(40, 48), "status": torch.zeros(1, dtype=torch.int32)},
        lambda: (grouped_gemm_contiguous(ROWS, STACK), torch.zeros(1, dtype=torch.int32)),
    ),
    "quantize": Case(
        "quantize",
        (normal(40, 64),),
        {"compute_global_scale": True},
        {"out": byte(40, 32), "out_scale": byte(512), "out_global_scale": torch.zeros(())},
        lambda: (*parts(A), A.global_scale),
    ),
    "quantize, MX": Case(
        "quantize",
        (normal(2, 40, 64),),
        {"format": "mxfp8", "scale_layout": "rowmajor", "seed": 3},
        {"out": byte(2, 40, 64), "out_scale": byte(2, 40, 2)},
        lambda: _stochastic(),
    ),
    "dequantize": Case(
        "dequantize",
        (*parts(A), A.global_scale),
        {},
        {"out": torch.empty(40, 64)},
        lambda: A.dequantize(),
    ),
}


PACKED, PACKED16 = prepare_weight(B), prepare_weight(B, dtype=torch.float16)
CASES |= {
    "packed_gemm": Case(
        "packed_gemm",
        (normal(5, 64).bfloat16(), None, PACKED.packed, None, PACKED.global_scale, None, ALPHA, BIAS),
        {"rows": 48, "dtype": torch.bfloat16, "out_dtype": torch.float32},
        {"out": torch.empty(5, 48)},
        lambda: gemm(normal(5, 64).bfloat16(), PACKED, alpha=ALPHA, bias=BIAS, out_dtype=torch.float32),
    ),
    "packed_gemm, NVFP4": Case(
        "packed_gemm",
        (*parts(A), PACKED16.packed, A.global_scale, PACKED16.global_scale),
        {"rows": 48, "dtype": torch.float16, "alpha": 0.5},
        {"out": half(40, 48)},
        lambda: gemm(A, PACKED16, alpha=0.5),
    ),
}
ROWS8, PACKED8 = quantize(normal(5, 64).bfloat16(), "fp8_e4m3"), prepare_weight(B, dtype=torch.float8_e4m3fn)
CASES |= {
    "packed_gemm, FP8": Case(
        "packed_gemm",
        (ROWS8.data, ROWS8.scale, PACKED8.packed, None, PACKED8.global_scale, None, None, BIAS, PACKED8.row_factor),
        {"rows": 48, "dtype": torch.float8_e4m3fn, "alpha": 0.5, "out_dtype": torch.bfloat16},
        {"out": half(5, 48).bfloat16()},
        lambda: gemm(ROWS8, PACKED8, alpha=0.5, bias=BIAS),
    ),
    "quantize_rows": Case(
        "quantize_rows",
        (normal(5, 64).bfloat16(),),
        {},
        {"out": torch.empty(5, 64).to(torch.float8_e4m3fn), "out_scale": torch.empty(5)},
        lambda: (ROWS8.data, ROWS8.scale),
    ),
}
CASES["route"] = Case(
    "route",
    (normal(5, 12), normal(12)),
    {"top_k": 3, "scoring": "sigmoid", "scale": 2.5, "dtype": torch.float16},
    {"out_ids": torch.zeros(5, 3, dtype=torch.int32), "out_weights": half(5, 3)},
    lambda: route(normal(5, 12), 3, scoring="sigmoid", correction=normal(12), scale=2.5, dtype=torch.float16),
)
BOTH = prepare_weight(B, B2)
CASES["packed_gemm, gated"] = Case(
    "packed_gemm",
    (normal(5, 64).bfloat16(), None, BOTH.packed, None, BOTH.global_scale, BOTH.up_global_scale),
    {"rows": 48, "dtype": torch.bfloat16, "alpha": 0.5, "gate": "relu"},
    {"out": half(5, 48).bfloat16()},
    lambda: gated_gemm(normal(5, 64).bfloat16(), BOTH, alpha=0.5, gate="relu"),
)
EXPERTS, OFFSETS = prepare_weight(STACK, STACK), torch.tensor([0, 3, 3, 5][: len(ROWS.offsets)], dtype=torch.int32)
CASES |= {
    "packed_grouped_gemm": Case(
        "packed_grouped_gemm",
        ([A.data, None, B2.data], [A.scale, None, B2.scale], [PACKED16.packed] * 3,
         [A.global_scale, None, B2.global_scale], [PACKED16.global_scale] * 3, [None] * 3),
        {"rows": [48] * 3, "k": [64] * 3, "dtype": torch.float16, "alpha": 2.0},
        {"out": [half(40, 48), half(0, 48), half(48, 48)]},
        lambda: grouped_gemm([(A, PACKED16), (None, PACKED16), (B2, PACKED16)], alpha=2.0),
    ),
    "packed_grouped_gemm, gated": Case(
        "packed_grouped_gemm",
        ([normal(5, 64).bfloat16()], [None], [BOTH.packed], [None], [BOTH.global_scale], [BOTH.up_global_scale]),
        {"rows": [48], "k": [64], "dtype": torch.bfloat16, "gate": "relu"},
        {"out": [half(5, 48).bfloat16()]},
        lambda: grouped_gemm([(normal(5, 64).bfloat16(), BOTH)], gate="relu"),
    ),
    "packed_grouped_gemm_contiguous": Case(
        "packed_grouped_gemm_contiguous",
        (normal(5, 64).bfloat16(), None, OFFSETS, EXPERTS.packed, None, EXPERTS.global_scale, EXPERTS.up_global_scale),
        {"rows": EXPERTS.rows, "dtype": torch.bfloat16, "gate": "silu"},
        {"out": half(5, EXPERTS.rows).bfloat16(), "status": torch.zeros(1, dtype=torch.int32)},
        lambda: (
            grouped_gemm_contiguous(normal(5, 64).bfloat16(), EXPERTS, offsets=OFFSETS, gate="silu"),
            torch.zeros(1, dtype=torch.int32),
        ),
    ),
}  # fmt: skip
X, RESIDUAL, WEIGHT = normal(40, 64).bfloat16(), normal(64, 40).t().contiguous().bfloat16(), normal(64) + 2
CASES |= {
    "rmsnorm_quantize": Case(
        "rmsnorm_quantize",
        (X, WEIGHT, RESIDUAL),
        {"return_values": True, "eps": 0.5, "compute_global_scale": True},
        {
            **{"out": byte(40, 32), "out_scale": byte(512), "out_global_scale": torch.zeros(())},
            **{"residual_out": torch.zeros_like(X), "values_out": torch.zeros_like(X)},
        },
        lambda: _rmsnorm(),
    ),
    "rmsnorm_quantize, one row": Case(
        "rmsnorm_quantize",
        (X[0],),
        {"format": "mxfp8", "scale_layout": "rowmajor"},
        {"out": byte(1, 64), "out_scale": byte(1, 2)},
        lambda: (
            *parts(rmsnorm_quantize(X[0], None, global_scale=None, format="mxfp8", scale_layout="rowmajor")),
            *(torch.empty(0), torch.empty(0).bfloat16(), torch.empty(0).bfloat16()),
        ),
    ),
    "silu_mul_quantize": Case(
        "silu_mul_quantize",
        (X,),
        {"compute_global_scale": True, "return_values": True},
        {
            **{"out": byte(40, 16), "out_scale": byte(512), "out_global_scale": torch.zeros(())},
            "values_out": torch.zeros(40, 32, dtype=torch.bfloat16),
        },
        lambda: _silu_mul(),
    ),
}


def _rmsnorm() -> tuple[torch.Tensor, ...]:
    found = rmsnorm_quantize(X, WEIGHT, residual=RESIDUAL, global_scale="auto", eps=0.5, return_normed=True)
    return *parts(found.quantized), found.quantized.global_scale, found.residual, found.normed


def _silu_mul() -> tuple[torch.Tensor, ...]:
    found = silu_mul_quantize(X, global_scale="auto", return_activation=True)
    return *parts(found.quantized), found.quantized.global_scale, found.activation


def _stochastic() -> tuple[torch.Tensor, ...]:
    x = quantize(normal(2, 40, 64), "mxfp8", rounding="stochastic", generator=3, scale_layout="rowmajor")
    return x.data, x.scale, torch.empty(0)


def tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str) -> None:
    case = CASES[name]
    operator = getattr(OPS, case.name)
    # torch compares no float8, which this one of its checks asks for
    skipped = ("test_schema",) if name in ("packed_gemm, FP8", "quantize_rows") else ()
    checks = [x for x in ALL_CHECKS if x not in skipped]
    torch.library.opcheck(operator.default, case.args, case.options, test_utils=checks)
    torch.library.opcheck(operator.out, case.args, case.options | case.outs, test_utils=checks)


@pytest.mark.parametrize("name", CASES)
def test_they_are_the_public_functions(name: str) -> None:
    """``default`` gives what the function gives, and ``out`` writes it."""
    case = CASES[name]
    operator, want = getattr(OPS, case.name), tensors(case.public())
    got = tensors(operator.default(*case.args, **case.options))
    assert len(got) == len(want)
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    outs = {k: [t.clone() for t in v] if isinstance(v, list) else v.clone() for k, v in case.outs.items()}
    assert operator.out(*case.args, **case.options, **outs) is None
    written = [t for v in outs.values() for t in tensors(v)]
    for one, other in zip(written, want):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
