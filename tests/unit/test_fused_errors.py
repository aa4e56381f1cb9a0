"""Bad input to rmsnorm_quantize and silu_mul_quantize: a clear error, on the kernels' road and on the reference's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.roads import Roads

from cute_nvfp4 import quantize, rmsnorm_quantize, silu_mul_quantize, simulating
from cute_nvfp4.errors import OperandError, OperandTypeError, TargetError
from cute_nvfp4.ops.rmsnorm_quantize import RMSNORM
from cute_nvfp4.ops.silu_mul_quantize import SILU_MUL

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
W = torch.ones(64, dtype=torch.bfloat16)
OUT = quantize(X, global_scale=0.5)


def norm(x: Any = X, weight: Any = W, **options: Any) -> Callable[[], object]:
    return lambda: rmsnorm_quantize(x, weight, **{"global_scale": 0.5, **options})


def gated(gate: Any = X, up: Any = X, **options: Any) -> Callable[[], object]:
    return lambda: silu_mul_quantize(gate, up, **{"global_scale": 0.5, **options})


BOTH = {
    "dtype": (lambda f: f(X.double()), OperandTypeError, "got torch.float64, expected torch.float16 or"),
    "no tensor": (lambda f: f([1.0]), OperandTypeError, "got list, expected torch.Tensor"),
    "batch": (lambda f: f(X[None]), OperandError, r"got \(1, 4, 64\).*flatten\(0, -2\) makes one matrix"),
    "empty": (lambda f: f(X[:0]), OperandError, r"got \(0, 64\), expected \(K,\) or \(M, K\), and no empty"),
    "format": (lambda f: f(format="nvfp5"), OperandError, "format: got 'nvfp5'"),
    "rule": (lambda f: f(rule="floor"), OperandError, "rule .*got 'floor'"),
    "a search": (
        lambda f: f(rule="optimal"),
        OperandError,
        "rule: got 'optimal', expected a rule that does not search",
    ),
    "layout": (lambda f: f(scale_layout="row"), OperandError, "scale_layout: got 'row'"),
    "global scale": (lambda f: f(global_scale=1e-40), OperandError, "global scale: got 1e-40"),
    "its type": (lambda f: f(global_scale="given"), OperandTypeError, "global scale: got 'given'"),
    "its dtype": (
        lambda f: f(global_scale=torch.ones(1).double()),
        OperandTypeError,
        "global scale: got torch.float64",
    ),
    "of MX": (lambda f: f(format="mxfp4"), OperandError, "global scale of mxfp4: got float, expected None or 'auto'"),
    "backend": (lambda f: f(backend="gpu"), TargetError, "backend: got 'gpu'"),
    "no GPU": (lambda f: f(backend="cuda"), TargetError, "backend='cuda': got cpu"),
    "out": (lambda f: f(out=X), OperandTypeError, "out: got Tensor, expected BlockScaledTensor"),
    "out's rows": (lambda f: f(out=quantize(X[:3])), OperandError, r"data of out: got \(3, 32\), expected \(4, 32\)"),
    "out's format": (lambda f: f(out=quantize(X, "mxfp4")), OperandError, "format of out: got mxfp4, expected nvfp4"),
    "out's layout": (lambda f: f(scale_layout="rowmajor", out=OUT), OperandError, "scale layout of out: got blocked"),
    "out's scale": (
        lambda f: f(global_scale=None, out=OUT),
        OperandError,
        "global scale of out: got one, expected none",
    ),
}


@pytest.mark.parametrize("operation", [norm, gated])
@pytest.mark.parametrize("road", ["kernels", "reference"])
@pytest.mark.parametrize("call,error,message", BOTH.values(), ids=BOTH.keys())
def test_both(operation: Callable, road: str, call: Callable, error: type, message: str) -> None:
    _check(call(operation), error, message, road)


SHARED = torch.zeros(4, 128, dtype=torch.bfloat16)
OTHERS = {
    "K": (norm(X[:, :40], W[:40]), OperandError, "K of nvfp4: got 40, expected a multiple of 16"),
    "K of a gate": (gated(X[:, :40], X[:, :40]), OperandError, "K of nvfp4: got 40"),
    "weight's type": (norm(weight=1.0), OperandTypeError, "weight: got float, expected torch.Tensor"),
    "weight's dtype": (norm(weight=W.half()), OperandTypeError, "dtype of weight: got torch.float16, expected torch"),
    "weight's shape": (norm(weight=W[:32]), OperandError, r"shape of weight: got \(32,\), expected \(64,\)"),
    "weight's device": (norm(weight=W.to("meta")), OperandError, "device of weight: got meta, expected cpu"),
    "eps": (norm(eps=-1.0), OperandError, "eps: got -1.0, expected a finite number that is not negative"),
    "eps as a tensor": (norm(eps=torch.ones(())), OperandError, "eps: got tensor"),
    "residual's shape": (norm(residual=X[:3]), OperandError, r"shape of residual: got \(3, 64\), expected \(4, 64\)"),
    "residual's dtype": (norm(residual=X.half()), OperandTypeError, "dtype of residual: got torch.float16"),
    "a new residual without an old": (norm(residual_out=X.clone()), OperandError, "got one, without a residual"),
    "its shape": (norm(residual=X, residual_out=X[:3]), OperandError, r"shape of residual_out: got \(3, 64\)"),
    "its strides": (norm(residual=X, residual_out=X.t().contiguous().t()), OperandError, "stride of residual_out"),
    "its alignment": (
        norm(residual=X, residual_out=SHARED.flatten()[4:260].view(4, 64)), OperandError, "at multiples of 16 bytes"
    ),
    "across the old one": (
        norm(residual=SHARED.flatten()[:256].view(4, 64), residual_out=SHARED.flatten()[64:320].view(4, 64)),
        OperandError, "memory of out: got bytes .* which overlap residual",
    ),
    "onto the weight": (
        norm(weight=SHARED[0, :64], residual=X, residual_out=SHARED[:, :64]), OperandError, "which overlap weight"
    ),
    "a row twice": (
        norm(residual=X, residual_out=SHARED[:1, :64].expand(4, -1)), OperandError, "no element of out to be another's"
    ),
    "up's shape": (gated(X, X[:, :32]), OperandError, r"shape of up: got \(4, 32\), expected \(4, 64\)"),
    "up's dtype": (gated(X, X.float()), OperandTypeError, "dtype of up: got torch.float32, expected torch.bfloat16"),
    "odd columns": (gated(X[:, :33], None), OperandError, "gate and up in one tensor: got 33, expected an even number"),
}  # fmt: skip


@pytest.mark.parametrize("road", ["kernels", "reference"])
@pytest.mark.parametrize("call,error,message", OTHERS.values(), ids=OTHERS.keys())
def test_others(road: str, call: Callable, error: type, message: str) -> None:
    _check(call, error, message, road)


def _check(call: Callable, error: type, message: str, road: str) -> None:
    if road == "reference":
        with pytest.raises(error, match=message):
            call()
        return
    with simulating("sm_90a") as runs, pytest.raises(error, match=message):
        call()
    assert not runs


def test_tables_over_planned_calls() -> None:
    """The same words where a call of the same kind was planned before."""
    good = [
        f(global_scale=scale, out=out) for f in (norm, gated) for scale in (0.5, torch.ones(1)) for out in (None, OUT)
    ]
    good += [norm(global_scale=None), norm(residual=X), norm(residual=X, residual_out=X.clone()), gated(up=None)]
    # of the same kind as outputs in the wrong place
    good.append(norm(residual=SHARED[:, :64], residual_out=torch.zeros_like(SHARED)[:, :64]))
    good.append(norm(residual=X.clone(), residual_out=torch.zeros_like(X)))
    bad = [(message, call(f)) for f in (norm, gated) for call, _, message in BOTH.values()]
    bad += [(message, call) for call, _, message in OTHERS.values()]
    with simulating("sm_90a"):
        roads = [Roads(x.calls, good) for x in (RMSNORM, SILU_MUL)]
        for message, call in bad:
            for road in roads:
                assert re.search(message, road.refused(call))
    for operation in (RMSNORM, SILU_MUL):
        operation.calls.clear()


def test_codes_onto_what_is_read() -> None:
    memory = torch.zeros(4, 64, dtype=torch.bfloat16)
    out = quantize(X, global_scale=0.5)
    object.__setattr__(out, "data", memory.view(torch.uint8)[:, :32])
    with pytest.raises(OperandError, match="which overlap up"):
        silu_mul_quantize(X, memory, global_scale=0.5, out=out)
    with pytest.raises(OperandError, match="which overlap residual"):
        rmsnorm_quantize(X, W, residual=memory, global_scale=0.5, out=out)


def test_rows_that_are_too_long() -> None:
    x = torch.zeros(1, 32784, dtype=torch.bfloat16)
    message = "K of rmsnorm in bfloat16: got 32784, expected at most 32768"
    with simulating("sm_90a"), pytest.raises(OperandError, match=message):
        rmsnorm_quantize(x, None, global_scale=0.5)
