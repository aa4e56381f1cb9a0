"""Calls of the products: what is called, and what it must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.exact_sums import Expected

from cute_nvfp4 import (
    BlockScaledTensor,
    GroupedRows,
    gated_gemm,
    gemm,
    gemv,
    grouped_gemm,
    grouped_gemm_contiguous,
    prepare_weight,
    to_blocked,
)

from .axes import Call, float32
from .others import decoded, quantized
from .problems import DTYPES, Impossible, Tensors, alpha_value, expected_of, gated_of

Trial = tuple[Callable[[], Any], list[Expected]]
"""What calls the function, and what each of its results must be."""


class Product:
    """Both operands of a call. The right one may be two (gate and up)."""

    def __init__(self, call: Call, tensors: Tensors, two: bool = False, stack: int = 0) -> None:
        self.call, self.tensors = call, tensors
        prepared, lead = call.b == "prepared", ((stack,) if stack else ())
        if call.a.startswith("float") and not prepared:
            raise Impossible("floats need a prepared weight")
        batched = call.batch and not (prepared or stack) and call.function in ("gemm", "gated_gemm", "gemv")
        batch = (call.batch,) if batched else ()
        right = "nvfp4" if prepared else call.b
        self.dtype = torch.bfloat16 if call.seed % 2 and call.a != "nvfp4" else torch.float16
        if call.a in ("mxfp4", "mxfp8", "mxfp8_e5m2") and prepared:
            self.dtype = torch.bfloat16
        if call.a.startswith("float"):
            self.a, self.left = tensors.floats("x", call.a, self.dtype, (call.m, call.k))
            self.a_factor = 1.0
        else:
            self.a, self.left, self.a_factor = tensors.operand("a", call.a, (*batch, call.m, call.k), call.a_scale)
        shape = (*lead, *batch, call.n, call.k)
        self.b, self.right, self.b_factor = tensors.operand("b", right, shape, call.b_scale)
        self.up = self.up_right = None
        if two:
            # a factor of its own, and one or none as the first
            self.up, self.up_right, self.up_factor = tensors.operand("up", right, shape, call.b_scale)
        self.prepared = prepared

    def weight(self) -> Any:
        return prepare_weight(self.b, self.up, dtype=self.dtype) if self.prepared else self.b

    def of(self, left: torch.Tensor, right: torch.Tensor, factor: float, bias: Any = None) -> Expected:
        return expected_of(self.call, left, right, alpha_value(self.call) * self.a_factor * factor, bias)

    def plain(self, bias: Any = None) -> Expected:
        return self.of(self.left, self.right, self.b_factor, bias)

    def gated(self) -> Expected:
        up = self.of(self.left, self.up_right, self.up_factor)
        return gated_of(self.plain(), up, self.call.gate)


def options(call: Call, tensors: Tensors, shape: tuple[int, ...], backend: str) -> dict[str, Any]:
    out = tensors.output(shape)
    return {"out": out, "out_dtype": None if out is not None else DTYPES[call.out], "backend": backend}


def gemm_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    product = Product(call, tensors)
    bias = None
    if call.bias:
        exact = (torch.arange(call.n) % 5 - 2.0).to(torch.float32)
        bias, exact = tensors.given("bias", exact), exact.double()
    shape = (*product.left.shape[:-1], call.n)
    alpha, rest = tensors.alpha(), options(call, tensors, shape, backend)
    return lambda: gemm(product.a, product.weight(), alpha=alpha, bias=bias, **rest), [
        product.plain(None if bias is None else exact.expand(*product.left.shape[:-2], call.n))
    ]


def gemv_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    product = Product(call, tensors)
    alpha, rest = tensors.alpha(), options(call, tensors, product.left.shape[:-1], backend)
    column = product.of(product.left, product.right[..., :1, :], product.b_factor)
    expected = Expected(column.exact[..., 0], column.error[..., 0])
    return lambda: gemv(product.a, product.weight(), alpha=alpha, **rest), [expected]


def gated_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    product = Product(call, tensors, two=True)
    alpha, rest = tensors.alpha(), options(call, tensors, (*product.left.shape[:-1], call.n), backend)
    up = None if product.prepared else product.up
    if call.quantized != "none":
        return quantized_trial(product, up, alpha, backend)
    return lambda: gated_gemm(product.a, product.weight(), up, gate=call.gate, alpha=alpha, **rest), [product.gated()]


def quantized_trial(product: Product, up: Any, alpha: Any, backend: str) -> Trial:
    """A gated result in NVFP4, which the caller may have a place for."""
    call, tensors, shape = product.call, product.tensors, (*product.left.shape[:-1], product.call.n)
    value, exact = float32(call.quantized), product.gated()
    scale: Any = value
    if call.on_device or call.given or call.argument == "out_global_scale":
        scale = tensors.number("out_global_scale", call.quantized)
    rest = {"gate": call.gate, "alpha": alpha, "backend": backend}
    if call.given:
        poison = torch.full((*shape[:-1], call.n // 2), 0xFF, dtype=torch.uint8)
        scales = to_blocked(torch.full((*shape[:-1], call.n // 16), 0xFF, dtype=torch.uint8))
        rest["out"] = BlockScaledTensor(tensors.given("out", poison), scales, scale)
    else:
        rest["out_global_scale"] = scale
    return decoded(lambda: gated_gemm(product.a, product.weight(), up, **rest), backend), [
        quantized(exact.exact, exact.error, value, exact.free, "max")
    ]


def grouped_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    gate = call.gate if call.b == "prepared" and call.seed % 3 == 0 else ""
    products = [Product(call, tensors, two=bool(gate)), Product(call, tensors, two=bool(gate))]
    out, alpha = None, tensors.alpha()
    if call.given:
        out = [tensors.output((call.m, call.n)) for _ in products]
    rest = {"out": out, "out_dtype": None if out else DTYPES[call.out], "backend": backend, "alpha": alpha}
    return lambda: grouped_gemm([(x.a, x.weight()) for x in products], gate=gate, **rest), [
        x.gated() if gate else x.plain() for x in products
    ]


def contiguous_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    product = Product(call, tensors, stack=2)
    cut = call.m // 2
    offsets = tensors.given("offsets", torch.tensor([0, cut, call.m], dtype=torch.int32))
    status = tensors.given("status", torch.full((1,), 9, dtype=torch.int32))
    rows = (slice(0, cut), slice(cut, call.m))
    each = [product.of(product.left[r], product.right[i], product.b_factor) for i, r in enumerate(rows)]
    expected = Expected(torch.cat([x.exact for x in each]), torch.cat([x.error for x in each]))
    rest = options(call, tensors, (call.m, call.n), backend) | {"alpha": tensors.alpha(), "status": status}

    def run() -> torch.Tensor:
        if isinstance(product.a, BlockScaledTensor):
            return grouped_gemm_contiguous(GroupedRows.of(product.a, offsets), product.weight(), **rest)
        return grouped_gemm_contiguous(product.a, product.weight(), offsets=offsets, **rest)

    return run, [expected]


TRIALS = {
    "gemm": gemm_trial, "gemv": gemv_trial, "gated_gemm": gated_trial, "grouped_gemm": grouped_trial,
    "grouped_gemm_contiguous": contiguous_trial,
}  # fmt: skip
