"""rmsnorm and silu · mul to rows in FP8 in one launch: the bits of ``quantize`` of what the other kernels compute."""

from __future__ import annotations

import pytest
import torch
from support import backends
from support.mutants import Ptx, at, drop, instead, outcome

from cute_nvfp4 import RowScaledTensor, gemm, prepare_weight, quantize, rmsnorm_quantize, silu_mul_quantize, simulating
from cute_nvfp4.errors import OperandError, OperandTypeError

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.usefixtures("hopper")]
FP8 = {"global_scale": None, "format": "fp8_e4m3"}


def matrices(rows: int, k: int, dtype: torch.dtype, count: int = 3) -> list[torch.Tensor]:
    """Numbers whose rows differ in size by powers of two."""
    generator = torch.Generator().manual_seed(k)
    sizes = 2.0 ** torch.randint(-6, 7, (rows, 1), generator=generator)
    return [(torch.randn(rows, k, generator=generator) * sizes).to(dtype).to(backends.device()) for _ in range(count)]


def empty(like: torch.Tensor) -> RowScaledTensor:
    """An operand in which NaN stands."""
    data = torch.full(like.shape, 0x7F, dtype=torch.uint8, device=like.device).view(torch.float8_e4m3fn)
    return RowScaledTensor(data, torch.full((len(like),), float("nan"), device=like.device))


def equal(a: RowScaledTensor, b: RowScaledTensor) -> bool:
    return torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, k", [(5, 576), (3, 4096), (1, 16)])
def test_silu_mul(rows: int, k: int, dtype: torch.dtype) -> None:
    gate, up, _ = matrices(rows, k, dtype)
    out = empty(gate)
    with simulating("sm_90a"):
        assert silu_mul_quantize(gate, up, out=out, **FP8) is out
        both = silu_mul_quantize(torch.cat([gate, up], 1), **FP8)
        values = silu_mul_quantize(gate, up, global_scale=None, return_activation=True).activation
        assert equal(out, quantize(values, "fp8_e4m3")) and equal(out, both)
    exact = silu_mul_quantize(gate, up, backend="reference", **FP8)
    assert (out.dequantize() - exact.dequantize()).norm() < 0.01 * exact.dequantize().norm()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("rows, k", [(5, 576), (3, 4096)])
def test_rmsnorm(rows: int, k: int, residual: bool) -> None:
    """x and the residual are small integers: sums of squares are exact in any order."""
    generator = torch.Generator().manual_seed(k)
    x, old = (torch.randint(-9, 10, (rows, k), generator=generator).bfloat16() for _ in range(2))
    x, old = x.to(backends.device()), old.to(backends.device()) if residual else None
    weight = matrices(1, k, torch.bfloat16, 1)[0][0]
    with simulating("sm_90a"):
        found = rmsnorm_quantize(x, weight, residual=old, **FP8)
        other = rmsnorm_quantize(x, weight, residual=old, global_scale=None, return_normed=True)
        quantized = found.quantized if residual else found
        assert equal(quantized, quantize(other.normed, "fp8_e4m3"))
        if residual:
            assert torch.equal(found.residual, other.residual)
            rmsnorm_quantize(x, weight, residual=old, residual_out=old, **FP8)
            assert torch.equal(old, other.residual)


def test_a_weight_that_the_kernel_cannot_read_is_copied() -> None:
    x, weight, _ = matrices(4, 48, torch.bfloat16)
    with simulating("sm_90a"):
        odd = rmsnorm_quantize(x[:, :32].contiguous(), weight[0, 1:33], **FP8)
        assert equal(odd, rmsnorm_quantize(x[:, :32].contiguous(), weight[0, 1:33].clone(), **FP8))


def test_into_a_product() -> None:
    """What a layer does: norm, quantize and multiply in two launches."""
    x, w, _ = matrices(8, 256, torch.bfloat16)
    weight = prepare_weight(quantize(w.bfloat16(), backend="reference"), dtype=torch.float8_e4m3fn)
    with simulating("sm_90a") as runs:
        y = gemm(rmsnorm_quantize(x, None, **FP8), weight, out_dtype=torch.float32)
    assert len(runs) in (0, 2)
    exact = gemm(rmsnorm_quantize(x, None, backend="reference", **FP8), weight, backend="reference", out_dtype=y.dtype)
    assert (y - exact).norm() < 0.01 * exact.norm()


@pytest.mark.sim_only("refuses CPU tensors")
def test_what_is_refused() -> None:
    x, other, _ = matrices(4, 32, torch.bfloat16)
    with simulating("sm_90a"):
        with pytest.raises(OperandError, match="global_scale=None"):
            silu_mul_quantize(x, other, global_scale=1.0, format="fp8_e4m3")
        with pytest.raises(OperandTypeError, match="dtype of up"):
            silu_mul_quantize(x, other.half(), **FP8)
        with pytest.raises(OperandError, match=r"shape of residual: got \(2, 32\), expected \(4, 32\)"):
            rmsnorm_quantize(x, None, residual=other[:2], **FP8)
        with pytest.raises(OperandError, match="without a residual"):
            rmsnorm_quantize(x, None, residual_out=other, **FP8)
        with pytest.raises(OperandError, match="multiple of 16"):
            rmsnorm_quantize(x[:, :8], None, **FP8)
        with pytest.raises(OperandError, match=r"shape of data of out: got \(2, 32\), expected \(4, 32\)"):
            silu_mul_quantize(x, other, out=empty(x[:2]), **FP8)
        wide = empty(x.new_empty(4, 64))
        with pytest.raises(OperandError, match="strides of the data of out"):
            silu_mul_quantize(x, other, out=RowScaledTensor(wide.data[:, :32], wide.scale), **FP8)
        with pytest.raises(OperandTypeError, match="out: got BlockScaledTensor"):
            silu_mul_quantize(x, other, out=quantize(x), **FP8)


MUTANTS = (
    ("a reciprocal root left out", at("rsqrt.approx.f32", instead("mov.b32 {0}, {1};"))),
    ("the largest of a warp", at("bar.sync", drop())),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.parametrize("name, change", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_noticed(name: str, change: Ptx) -> None:
    x, _, _ = matrices(4, 2048, torch.bfloat16)
    exact = rmsnorm_quantize(x, None, backend="reference", **FP8).dequantize()

    def right() -> bool:
        found = rmsnorm_quantize(x, None, **FP8).dequantize()
        return bool((found - exact).norm() < 0.01 * exact.norm())

    assert outcome(change, right, "sm_90a")
