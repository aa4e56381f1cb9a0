"""Calls of what is no product: quantizing, decoding, packing and prepared calls, with what each must give."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.exact_sums import LARGEST as FLOAT32
from support.exact_sums import Expected, product

from cute_nvfp4 import (
    dequantize,
    export,
    from_blocked,
    gemm,
    gemv,
    interleave,
    load_exported,
    prepare,
    prepare_weight,
    quantize,
    rmsnorm_quantize,
    silu_mul_quantize,
    tensor_amax,
    to_blocked,
)

from .axes import Call, float32
from .problems import DTYPES, Tensors, alpha_value

LEAST_SCALE, LARGEST_SCALE = 2.0**-100, 2.0**118
LARGEST, STEP = 6 * 448.0, 2.0**-9
"""What an element times a scale of NVFP4 can be, and from a scale to the next among the smallest."""
Trial = tuple[Callable[[], Any], list[Expected]]


def quantized(
    x: torch.Tensor, off: torch.Tensor, scale: float, free: torch.Tensor | None = None, rule: str = ""
) -> Expected:
    """What a matrix becomes, quantized with a global scale: within half a step of its block, and at most what is
    largest; off: what x itself may be off by. A scale out of range makes it NaN, an infinite number its block. free:
    where nothing is promised of x, and so of its block. By other rules than "max", a block that is too large may be off
    by as much as it is."""
    if not LEAST_SCALE <= scale <= LARGEST_SCALE:
        return Expected(torch.full_like(x, torch.nan), torch.zeros_like(x))
    blocks = _of_block(x.abs() + off, torch.amax)
    most, infinite = LARGEST * scale, FLOAT32[torch.float32]
    near = _of_block((x.abs() + off > infinite) & (x.abs() - off <= infinite), torch.any)
    exact = torch.where(_of_block(x.abs() - off > infinite, torch.any), torch.nan, x.clamp(-most, most))
    step = blocks.clamp(max=most) / 6 * (1 + 2.0**-3) + 6 * STEP * scale
    error = step if rule == "max" else torch.where(blocks > most * 0.9, blocks.clamp(max=most) * 1.0, step)
    return Expected(exact, error + off, near if free is None else near | _of_block(free, torch.any))


def _of_block(x: torch.Tensor, of: Callable[..., torch.Tensor]) -> torch.Tensor:
    """What is true of the 16 elements that share a scale, for each of them."""
    return of(x.unflatten(-1, (-1, 16)), -1).repeat_interleave(16, dim=-1)


def scale_of(call: Call, tensors: Tensors) -> tuple[Any, float]:
    """A global scale as the caller gives it, and its value."""
    text = "1" if call.a_scale == "none" else call.a_scale
    value = float32(text)
    if call.on_device or call.argument == "global_scale":
        return tensors.number("global_scale", text), value
    return value, value


def decoded(make: Callable[[], Any], backend: str) -> Callable[[], torch.Tensor]:
    return lambda: dequantize(make(), torch.float32, backend=backend)


def quantize_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    x, values = tensors.floats("x", call.a, DTYPES[call.out], (call.m, call.k))
    scale, value = scale_of(call, tensors)
    return decoded(lambda: quantize(x, global_scale=scale, backend=backend), backend), [
        quantized(values, torch.zeros_like(values), value)
    ]


def rmsnorm_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    dtype = DTYPES[call.out]
    x, values = tensors.floats("x", call.a, dtype, (call.m, call.k))
    weight, factors = tensors.floats("weight", "float", dtype, (call.k,))
    residual, more = tensors.floats("residual", call.a, dtype, (call.m, call.k))
    scale, value = scale_of(call, tensors)
    total = (values + more).to(dtype).double()
    normed = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * factors
    # squares of numbers that are huge are infinite in float32
    free = (total.abs().amax(-1, keepdim=True) > 1e17).expand_as(normed)
    expected = quantized(normed, normed.abs() * 2.0**-6, value)

    def make() -> Any:
        found = rmsnorm_quantize(x, weight, global_scale=scale, residual=residual, backend=backend)
        return found if residual is None else found[0]

    return decoded(make, backend), [expected._replace(free=free & expected.exact.isfinite())]


def silu_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    dtype = DTYPES[call.out]
    gate, values = tensors.floats("x", call.a, dtype, (call.m, call.k))
    up, factors = tensors.floats("up", "float", dtype, (call.m, call.k))
    scale, value = scale_of(call, tensors)
    exact = values * torch.sigmoid(values) * factors
    return decoded(lambda: silu_mul_quantize(gate, up, global_scale=scale, backend=backend), backend), [
        quantized(exact, exact.abs() * 2.0**-6, value)
    ]


def amax_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    x, values = tensors.floats("x", call.a, DTYPES[call.out], (call.m, call.k))
    return lambda: tensor_amax(x), [Expected(values.abs().amax(), torch.zeros(()))]


def dequantize_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    a, values, factor = tensors.operand("a", "nvfp4", (call.m, call.k), call.a_scale)
    exact = values * factor
    # half a unit of float32 before a shorter output rounds
    return lambda: dequantize(a, DTYPES[call.out], backend=backend), [
        Expected(exact, exact.abs() * 2.0**-23 + 2.0**-149)
    ]


def weight_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    b, values, factor = tensors.operand("b", "nvfp4", (call.n, call.k), call.b_scale)
    return lambda: prepare_weight(b, dtype=torch.float16, backend=backend).dequantize(torch.float32), [
        Expected(values * factor, (values * factor).abs() * 2.0**-23)
    ]


def blocked_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    scales = tensors.integers(0, 255, (call.n, call.k // 16))
    given = tensors.given("scale", scales)
    return lambda: from_blocked(to_blocked(given), call.n, call.k // 16)[0].float(), [
        Expected(scales.double(), torch.zeros(scales.shape))
    ]


def rowmajor_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    scales = tensors.integers(0, 255, (call.n, call.k // 16))
    given = tensors.given("scale", to_blocked(scales))
    return lambda: from_blocked(given, call.n, call.k // 16)[0].float(), [
        Expected(scales.double(), torch.zeros(scales.shape))
    ]


def interleave_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    b, first, factor = tensors.operand("b", "nvfp4", (128, call.k), call.b_scale)
    up, second, _ = tensors.operand("up", "nvfp4", (128, call.k), call.b_scale)
    exact = torch.cat([first, second]) * factor
    return lambda: interleave(b, up).dequantize(), [Expected(exact, exact.abs() * 2.0**-23)]


def prepare_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    """A prepared call is given other operands, one of which may be of another kind, or lie somewhere else."""
    plain = Tensors(call)
    plain.call = Call(seed=call.seed + 1, data=call.data)
    (a, *_), (b, *_) = (plain.operand(x, "nvfp4", (y, call.k), "1") for x, y in (("a", call.m), ("b", call.n)))
    a2, left, _ = tensors.operand("a", "nvfp4", (call.m, call.k), "1")
    b2, right, _ = tensors.operand("b", "nvfp4", (call.n, call.k), "1")
    function = gemv if call.seed % 2 else gemm
    shape = (call.m,) if function is gemv else (call.m, call.n)
    out, out2 = torch.empty(shape), tensors.given("out", torch.full(shape, torch.nan))
    alpha = None if call.alpha == "none" else float32(call.alpha)
    exact = product(left, right, alpha_value(call), coarse=call.data == "full")
    expected = Expected(exact.exact[:, 0], exact.error[:, 0]) if function is gemv else exact

    def run() -> torch.Tensor:
        # "auto", since exact torch has nothing to prepare
        step = prepare(function, a, b, alpha=alpha, out=out, vary=("a", "b", "out"))
        return step(a2, b2, out2)

    return run, [expected]


def export_trial(call: Call, tensors: Tensors, backend: str) -> Trial:
    """A product, or rows to quantize, in a file; what is loaded from it is given other operands, as for ``prepare``."""
    if call.argument == "x" or (not call.argument and call.seed % 3 == 0):
        x, values = tensors.floats("x", call.a, DTYPES[call.out], (call.m, call.k))
        value = 1.0 if call.a_scale == "none" else float32(call.a_scale)

        def loaded() -> Any:
            return _exported(quantize, torch.ones(call.m, call.k, dtype=DTYPES[call.out]), global_scale=value)(x=x)

        return decoded(loaded, backend), [quantized(values, torch.zeros_like(values), value)]
    plain = Tensors(Call(seed=call.seed + 1, data=call.data))
    a, b = (plain.operand(name, "nvfp4", (rows, call.k), "1")[0] for name, rows in (("a", call.m), ("b", call.n)))
    a2, left, _ = tensors.operand("a", "nvfp4", (call.m, call.k), "1")
    b2, right, _ = tensors.operand("b", "nvfp4", (call.n, call.k), "1")
    function = gemv if call.seed % 2 else gemm
    shape = (call.m,) if function is gemv else (call.m, call.n)
    out2 = tensors.given("out", torch.full(shape, torch.nan))
    alpha = None if call.alpha == "none" else float32(call.alpha)
    exact = product(left, right, alpha_value(call), coarse=call.data == "full")
    expected = Expected(exact.exact[:, 0], exact.error[:, 0]) if function is gemv else exact
    return lambda: _exported(function, a, b, alpha=alpha, out_dtype=torch.float32)(a=a2, b=b2, out=out2), [expected]


def _exported(*given: Any, **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        export(path := Path(folder) / "one.zip", *given, **options)
        return load_exported(path)


TRIALS = {
    "quantize": quantize_trial, "dequantize": dequantize_trial, "rmsnorm_quantize": rmsnorm_trial,
    "silu_mul_quantize": silu_trial, "tensor_amax": amax_trial, "prepare_weight": weight_trial,
    "to_blocked": blocked_trial, "from_blocked": rowmajor_trial, "interleave": interleave_trial,
    "prepare": prepare_trial, "export": export_trial,
}  # fmt: skip
