"""Gradients of what results are linear in, against float64; and refusals of those that have no formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from cute_nvfp4 import (
    BlockScaledTensor,
    PreparedWeight,
    dequantize,
    gated_gemm,
    gemm,
    gemv,
    grouped_gemm,
    grouped_gemm_contiguous,
    prepare_weight,
    quantize,
    simulating,
)
from cute_nvfp4.errors import OperandError
from cute_nvfp4.scale_layout import blocked_flat


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


A, B = quantize(normal(40, 64, seed=1)), quantize(normal(48, 64, seed=2))
BATCH = quantize(normal(2, 40, 64, seed=3)), quantize(normal(2, 48, 64, seed=4))


def compiled(function: Callable) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("how", [lambda f: f, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("operands", "shape", "dtype"),
    [((A, B), (48,), torch.float32), (BATCH, (48,), torch.bfloat16), (BATCH, (2, 48), torch.float32)],
    ids=["a matrix", "shared by a batch", "a batch"],
)
def test_bias(how: Callable, operands: tuple, shape: tuple, dtype: torch.dtype) -> None:
    bias = normal(*shape, seed=5).to(dtype).requires_grad_()
    y = how(lambda bias: gemm(*operands, bias=bias, out_dtype=torch.float32))(bias)
    dy = normal(*y.shape, seed=6)
    y.backward(dy)
    # what a product of decoded operands and autograd give
    exact = bias.detach().double().requires_grad_()
    left, right = (x.dequantize(torch.float64) for x in operands)
    want = left @ right.mT + exact.unsqueeze(-2)
    want.backward(dy.double())
    torch.testing.assert_close(y.detach(), want.detach().float(), rtol=1e-5, atol=1e-4)
    assert bias.grad.dtype is dtype
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(bias.grad, exact.grad.to(dtype), **tolerance)


def by_operator(x: BlockScaledTensor) -> torch.Tensor:
    return torch.ops.cute_nvfp4.dequantize(x.data, blocked_flat(x.scale), x.global_scale)


@pytest.mark.parametrize("how", [dequantize, by_operator, compiled(dequantize), compiled(by_operator)])
def test_global_scale_of_dequantize(how: Callable) -> None:
    for shape in ((), (1,)):
        factor = A.global_scale.reshape(shape).clone().requires_grad_()
        y = how(BlockScaledTensor(A.data, A.scale, factor))
        dy = normal(*y.shape, seed=7)
        y.backward(dy)
        values = BlockScaledTensor(A.data, A.scale).dequantize(torch.float64)
        torch.testing.assert_close(factor.grad.double(), (values * dy.double()).sum().reshape(shape), rtol=1e-5, atol=0)
        torch.testing.assert_close(y.detach(), A.dequantize(), rtol=0, atol=0)


SIZES = ((3, 40), (0, 24), (5, 48))
OFFSETS = torch.tensor([1, 4, 4, 9], dtype=torch.int32)


def frozen(gate: str, *shape: int) -> PreparedWeight:
    return prepare_weight(*(quantize(normal(*shape, seed=i)) for i in range(1 + bool(gate))))


def product(x: torch.Tensor, weight: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """In torch, of a weight, or of gate and up."""
    both = x @ weight.double().mT * alpha
    return torch.nn.functional.silu(both[0]) * both[1] if both.ndim == 3 else both


@pytest.mark.sweep
@pytest.mark.parametrize("how", [lambda f: f, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("gate", ["", "silu"])
@pytest.mark.parametrize("form", ["list", "rows"])
def test_x_of_groups(how: Callable, gate: str, form: str) -> None:
    """Of frozen weights, with a factor for each group; rows of no group have none."""
    alpha, x = torch.tensor([0.5, 3.0, -2.0]), normal(10, 64, seed=8).bfloat16().requires_grad_()
    rows = [slice(start, end) for start, end in pairwise(OFFSETS.tolist())]
    if form == "list":
        weights = [frozen(gate, n, 64) for _, n in SIZES]
        values = [w.dequantize() for w in weights]

        def call(x: torch.Tensor) -> list[torch.Tensor]:
            pairs = [(x[mine] if m else None, w) for mine, (m, _), w in zip(rows, SIZES, weights)]
            return grouped_gemm(pairs, gate=gate, alpha=alpha, out_dtype=torch.float32)
    else:
        stack = frozen(gate, 3, 40, 64)
        values = [*stack.dequantize()]

        def call(x: torch.Tensor) -> list[torch.Tensor]:
            options = {"gate": gate, "alpha": alpha, "out_dtype": torch.float32}
            y = grouped_gemm_contiguous(x, stack, offsets=OFFSETS, **options)
            return [y[mine] for mine in rows]

    results = how(call)(x)
    dys = [normal(*y.shape, seed=i) for i, y in enumerate(results)]
    sum((y * dy).sum() for y, dy in zip(results, dys)).backward()
    exact = x.detach().double().requires_grad_()
    wants = [product(exact[mine], w, f.double()) for mine, w, f in zip(rows, values, alpha)]
    sum((y * dy.double()).sum() for y, dy in zip(wants, dys)).backward()
    assert x.grad.dtype is torch.bfloat16 and not x.grad[[0, 9]].any()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2**-7, atol=2**-7 * float(exact.grad.abs().max()))


@pytest.mark.parametrize("name", ["alpha_tensor", "b_global_scale", "up_global_scale", "x, with out"])
def test_of_groups_only_x(name: str) -> None:
    """Every other gradient is refused; so is that of a list which torch takes for a constant."""
    weight, x = frozen("silu", 3, 40, 64), normal(9, 64).bfloat16()
    one = replace(weight, packed=weight.packed[0])
    options = {"alpha": WANTED} if name == "alpha_tensor" else {}
    if name.endswith("global_scale"):
        field = name.removeprefix("b_")
        weight, one = (replace(w, **{field: torch.ones((), requires_grad=True)}) for w in (weight, one))
    if name == "x, with out":
        x, options, name = x.requires_grad_(), {"out": torch.empty(9, 40)}, "a"
    refused = f"{name}: got a tensor that requires a gradient"
    with pytest.raises(OperandError, match=refused):
        grouped_gemm_contiguous(x, weight, offsets=OFFSETS, gate="silu", **options)
    if "out" in options:
        options = {"out": [options["out"]]}
    with pytest.raises(OperandError, match=refused):
        grouped_gemm([(x, one)], gate="silu", **options)
    lists = [[x.detach().requires_grad_(), None], [None] * 2, [one.packed] * 2, *[[None] * 2] * 3]
    with pytest.raises(OperandError, match="a: got None, expected tensors in all groups"):
        torch.ops.cute_nvfp4.packed_grouped_gemm(*lists, rows=[40] * 2, k=[64] * 2, dtype=x.dtype, gate="silu")


WANTED = torch.ones(1, requires_grad=True)
SCALED = BlockScaledTensor(A.data, A.scale, WANTED)
OUT = torch.empty(40, 48)
REFUSED: dict[str, tuple[Callable, str]] = {
    "alpha": (lambda: gemm(A, B, alpha=WANTED), "alpha_tensor"),
    "a global scale": (lambda: gemm(A, BlockScaledTensor(B.data, B.scale, WANTED)), "b_global_scale"),
    "gemv": (lambda: gemv(SCALED, B), "a_global_scale"),
    "gated": (lambda: gated_gemm(A, B, B, alpha=WANTED), "alpha_tensor"),
    "gated, quantized": (lambda: gated_gemm(A, B, B, out_global_scale=WANTED), "out_global_scale"),
    "grouped": (lambda: grouped_gemm([(A, B), (SCALED, B)]), "a_global_scale"),
    "bias, with out": (lambda: gemm(A, B, bias=torch.ones(48, requires_grad=True), out=OUT), "bias"),
    "out": (lambda: gemm(A, B, out=torch.zeros(40, 48, requires_grad=True)), "out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_no_gradient_is_dropped(name: str) -> None:
    function, argument = REFUSED[name]
    match = f"{argument}: got a tensor that requires a gradient"
    with pytest.raises(OperandError, match=match):
        function()
    with torch.no_grad():
        function()


def test_no_gradient_is_dropped_in_a_graph() -> None:
    for function in (lambda x: gemm(A, B, alpha=x), lambda x: gemv(BlockScaledTensor(A.data, A.scale, x), B)):
        with pytest.raises(Exception, match="got a tensor that requires a gradient"):
            compiled(function)(torch.ones(1, requires_grad=True))


def test_codes_have_no_gradient() -> None:
    q = quantize(normal(40, 64).requires_grad_())
    assert not q.data.requires_grad and not q.global_scale.requires_grad
    with pytest.raises(OperandError, match="x: got a tensor that requires a gradient"):
        torch.ops.cute_nvfp4.quantize(normal(40, 64).requires_grad_())


@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_what_was_saved_is_not_used_when_it_was_written(backend: str) -> None:
    """An output that autograd keeps for a backward pass: torch says so, rather than use its new values."""
    x, w, out = normal(40, 48), torch.ones(40, 48, requires_grad=True), torch.zeros(40, 48)
    loss = (out * w * x).sum()
    torch.ops.cute_nvfp4.gemm.out(
        *(t for q in (A, B) for t in (q.data, blocked_flat(q.scale))), A.global_scale, B.global_scale,
        out=out, backend=backend,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_saved_out_that_is_overwritten_is_noticed() -> None:
    """As with torch's own ``out=``: the gradient would be of what is not there any more."""
    a, b = quantize(torch.randn(8, 64)), quantize(torch.randn(1, 64))
    factor = torch.ones(8, requires_grad=True)
    with simulating("sm_90a"):
        out = gemv(a, b, out_dtype=torch.float32)
        product = (factor * out).sum()
        gemv(a, b, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
