"""Gradients of what results are linear in, against float64; and refusals of those that have no formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cute_nvfp4 import BlockScaledTensor, dequantize, gated_gemm, gemm, gemv, grouped_gemm, quantize, simulating
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
