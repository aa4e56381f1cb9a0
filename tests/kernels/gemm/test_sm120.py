"""The kernels that sm_120a shares with the others: GEMV and quantization, from the same sources."""

from __future__ import annotations

import pytest
import torch
from support.fused_problems import check_silu_mul, random

from cute_nvfp4 import dequantize, gemm, gemv, prepare_weight, quantize, simulating
from cute_nvfp4.formats import NVFP4
from cute_nvfp4.kernels.gemm.config import GemmConfig
from cute_nvfp4.ops.gemm import compile_gemm
from cute_nvfp4.ops.gemv import compile_gemv
from cute_nvfp4.ops.quantize_launch import compile_quantize
from cute_nvfp4.quantization.rules import resolve_rule
from cute_nvfp4.runtime.inspection import innermost_loop, inspect_cubin
from cute_nvfp4.target import ARCHITECTURES

ARCHS = ("sm_120a", "sm_121a")


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("m,k", [(256, 1024), (130, 272), (70, 5120)])
def test_gemv(arch: str, m: int, k: int) -> None:
    torch.manual_seed(m)
    a, x = (
        quantize(torch.randn(m, k).half(), backend="reference"),
        quantize(torch.randn(1, k).half(), backend="reference"),
    )
    found = {}
    for name in ("sm_100a", arch):
        with simulating(name) as runs:
            found[name] = gemv(a, x, out_dtype=torch.float32)
        assert runs[0].kernel.arch == name
    exact = gemv(a, x, out_dtype=torch.float32, backend="reference")
    torch.testing.assert_close(found[arch], exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("format,rule", [("nvfp4", "max"), ("nvfp4", "four_six_mse"), ("mxfp8_e4m3", "rceil")])
def test_quantize(format: str, rule: str) -> None:
    torch.manual_seed(3)
    x = (torch.randn(130, 544) * 3).bfloat16()
    options = {} if format == "nvfp4" else {"format": format}
    with simulating("sm_120a") as runs:
        found = quantize(x, rule=rule, **options)
    assert runs and runs[0].kernel.arch == "sm_120a"
    exact = quantize(x, rule=rule, **options)
    for name in ("data", "scale"):
        assert torch.equal(getattr(found, name).view(torch.uint8), getattr(exact, name).view(torch.uint8))


def test_values_that_need_most_shared_memory() -> None:
    """Two rows of float32 in blocks of 32: fewer warps than elsewhere."""
    with simulating("sm_120a"):
        check_silu_mul(random(40, 192, torch.float32), format="mxfp8_e4m3", rule="rceil")


def test_hardware_conversions_and_wide_loads() -> None:
    """ptxas emits 256-bit loads and FP4 conversions for sm_120a, and no kernel spills."""
    gemv_kernel, _ = compile_gemv("sm_120a", m=4096, k=7168)
    report = inspect_cubin(gemv_kernel.cubin, gemv_kernel.ptx).kernel
    assert any(x.bits == 256 and x.space == "global" for x in report.sass_accesses)
    assert any("E2M1" in opcode for opcode in report.opcodes)
    quantize_kernel, _ = compile_quantize("sm_120a", NVFP4, resolve_rule("max", NVFP4), rows=256, k=4096)
    for kernel in (gemv_kernel, quantize_kernel):
        report = inspect_cubin(kernel.cubin, kernel.ptx).kernel
        assert report.spill_loads == report.spill_stores == report.stack_bytes == 0


@pytest.mark.parametrize("tile_n, most", [(16, 11), (32, 14), (64, 21), (128, 32)])
def test_instructions_of_the_gemm(tile_n: int, most: int) -> None:
    """A step of 64 along K: FP4 tensor cores, no moves of accumulators, no local memory. NVIDIA's kernel has 32.25 for
    128 columns."""
    kernel = compile_gemm(GemmConfig(arch=ARCHITECTURES["sm_120a"], store="direct", tile_n=tile_n))
    report = inspect_cubin(kernel.cubin, kernel.ptx)
    assert report.kernel.spill_loads == report.kernel.spill_stores == report.kernel.stack_bytes == 0
    assert not any(opcode.startswith(("LDL", "STL")) for opcode in report.kernel.opcodes)
    loop = innermost_loop(report.sass, "OMMA")
    assert loop.count("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X") == loop.count("OMMA") == max(8, tile_n // 2)
    assert loop.instructions <= 4 * most and loop.count("MOV") <= 4


@pytest.mark.sweep
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_weights(m: int, dtype: torch.dtype) -> None:
    """NVFP4 weights times 16-bit activations of few rows, by the streaming kernel of sm_90a."""
    torch.manual_seed(m)
    weight, x = quantize(torch.randn(130, 1056), backend="reference"), torch.randn(m, 1056).to(dtype)
    with simulating("sm_120a") as runs:
        found = gemm(x, prepare_weight(weight, dtype=dtype), out_dtype=torch.float32)
    assert runs[-1].kernel.arch == "sm_120a" and runs[-1].launch.dynamic_smem <= 101376
    exact = x.double() @ dequantize(weight, dtype=torch.float64).T
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-3)
