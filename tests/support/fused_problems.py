"""Problems and checks for tests of ``rmsnorm_quantize`` and ``silu_mul_quantize``, in the simulator and on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from cute_nvfp4 import BlockScaledTensor, quantize, rmsnorm_quantize, silu_mul_quantize
from cute_nvfp4.ops.rmsnorm_quantize import RmsnormQuantized
from cute_nvfp4.ops.silu_mul_quantize import SiluMulQuantized
from cute_nvfp4.reference import rmsnorm_reference, silu_mul_reference
from support import backends

# tolerance of float32 values against float64, relative; values of 16 bits, rounded once, may be off by a step
RMSNORM_ERROR, SILU_ERROR = 2.0**-19, 5e-6


def random(rows: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random rows of very different magnitudes, with some zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
    x[torch.rand(rows, k, generator=generator) < 0.05] = 0.0
    return x.to(dtype)


def same(got: BlockScaledTensor, want: BlockScaledTensor) -> list[str]:
    """What differs between two results, including every byte of the scales' padding."""
    pairs = [("data", got.data, want.data), ("scale", got.scale, want.scale)]
    if want.global_scale is not None:
        # NaN equals NaN
        pairs.append(("global scale", *(x.global_scale.reshape(()).view(torch.int32) for x in (got, want))))
    return [f"{name}: {int((a != b).sum())} of {a.numel()}" for name, a, b in pairs if not torch.equal(a, b)]


def steps(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """How many values of a 16-bit dtype lie between the two; NaN equals NaN and nothing else."""
    assert torch.equal(got.isnan(), want.isnan())
    bits = [x.masked_fill(x.isnan(), 0).contiguous().view(torch.int16).int() for x in (got, want)]
    places = [torch.where(x < 0, -(x & 0x7FFF), x) for x in bits]
    return (places[0] - places[1]).abs()


def near(got: torch.Tensor, want: torch.Tensor, error: float) -> bool:
    """Whether ``got`` is as near the reference as the docstrings promise."""
    if got.dtype is not torch.float32:
        apart = steps(got, want)
        # few elements are so near the middle between two values that they round to the other one
        return int(apart.max()) <= 1 and int((apart > 0).sum()) <= 1 + 0.03 * apart.numel()
    got, want = got.double(), want.double()
    assert torch.equal(got.isnan(), want.isnan())
    close = (got == want) | ((got - want).abs() <= error * want.abs() + 1e-37)
    return bool(close[~want.isnan()].all())


def _options(options: dict[str, Any]) -> dict[str, Any]:
    options = {"global_scale": None, **options}
    return {name: backends.place(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def requantized(values: torch.Tensor, options: dict[str, Any]) -> BlockScaledTensor:
    """Quantizes ``values`` in exact torch."""
    names = ("format", "rule", "global_scale", "scale_layout")
    return quantize(values, **{n: options[n] for n in names if n in options}, backend="reference")


def check_rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    *,
    alone: bool = False,
    **options: Any,
) -> RmsnormQuantized:
    """Checks and returns the kernel's result: an exact residual, normalized rows near the reference, their codes and
    scales.

    alone: also checks the kernel that does not store the normalized rows.
    """
    options = _options(options)
    x, weight, residual = (None if t is None else backends.place(t) for t in (x, weight, residual))
    summed = x if residual is None else x + residual
    got = rmsnorm_quantize(x, weight, residual=residual, return_normed=True, backend=backends.backend(), **options)
    assert got.residual is None if residual is None else got.residual.equal(summed)
    want = rmsnorm_reference(summed, weight, options.get("eps", 1e-6))
    assert near(got.normed, want, RMSNORM_ERROR)
    assert same(got.quantized, requantized(got.normed, options)) == []
    if alone:
        found = rmsnorm_quantize(x, weight, residual=residual, backend=backends.backend(), **options)
        assert same(found if residual is None else found.quantized, got.quantized) == []
    return got


def check_silu_mul(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, alone: bool = False, **options: Any
) -> SiluMulQuantized:
    """Checks and returns the kernel's result for silu(gate) · up; see ``check_rmsnorm``."""
    options = _options(options)
    gate, up = backends.place(gate), None if up is None else backends.place(up)
    got = silu_mul_quantize(gate, up, return_activation=True, backend=backends.backend(), **options)
    halves = gate.chunk(2, -1) if up is None else (gate, up)
    # below −80, silu is smaller than 2e-33 and may become zero
    low = (halves[0] < -80) & halves[1].isfinite() & halves[0].isfinite()
    small = got.activation.double().abs() <= 2e-33 * halves[1].double().abs()
    assert bool(small[low].all())
    values = got.activation, silu_mul_reference(*halves)
    assert near(*(x.masked_fill(low, 0.0) for x in values), SILU_ERROR)
    assert same(got.quantized, requantized(got.activation, options)) == []
    if alone:
        found = silu_mul_quantize(gate, up, backend=backends.backend(), **options)
        assert same(found, got.quantized) == []
    return got
