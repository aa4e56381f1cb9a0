"""What the compiled kernels of rmsnorm_quantize and silu_mul_quantize cost, read from their cubins: it stays so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.fused_kernels import compile_rmsnorm_quantize, compile_silu_mul_quantize

from cute_nvfp4.kernels.quantize.fused import FusedConfig
from cute_nvfp4.runtime.cache import CompiledKernel
from cute_nvfp4.runtime.inspection import KernelReport, inspect_cubin

pytestmark = pytest.mark.sweep
ARCHS = ("sm_100a", "sm_90a")
KINDS = [("nvfp4", "max"), ("nvfp4", "four_six_mse"), ("mxfp4", "even"), ("mxfp8_e4m3", "rceil")]
REGISTERS_OF_A_MULTIPROCESSOR = 65536


def check(kernel: CompiledKernel, config: FusedConfig) -> KernelReport:
    """Everything stays in registers, and as many CTAs fit as the grid is made for."""
    report = inspect_cubin(kernel.cubin, kernel.ptx).kernel
    assert (report.stack_bytes, report.local_bytes, report.spill_loads, report.spill_stores) == (0, 0, 0, 0)
    assert report.registers * 32 * config.warps * config.min_blocks <= REGISTERS_OF_A_MULTIPROCESSOR
    return report


def options(format: str, dtype: torch.dtype, values: bool) -> dict[str, Any]:
    return {"dtype": dtype, "values": values, "global_scale": "given" if format == "nvfp4" else "none"}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rows,k", [(4096, 8192), (16, 16384)])
@pytest.mark.parametrize("residual,values", [(False, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("format,rule", KINDS)
def test_rmsnorm(
    arch: str, format: str, rule: str, dtype: torch.dtype, residual: bool, values: bool, rows: int, k: int
) -> None:
    if format != "nvfp4" and dtype is torch.float32:
        k = min(k, 8192)
    more = {"rows": rows, "k": k, "residual": residual, "weight": torch.float32}
    check(*compile_rmsnorm_quantize(arch, format, rule, **more, **options(format, dtype, values)))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rows,k", [(4096, 8192), (100, 544)])
@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("format,rule", KINDS)
def test_silu_mul(arch: str, format: str, rule: str, dtype: torch.dtype, values: bool, rows: int, k: int) -> None:
    report = check(*compile_silu_mul_quantize(arch, format, rule, rows=rows, k=k, **options(format, dtype, values)))
    # four rows of two inputs before the loop, one row of both in it
    assert report.count("UBLKCP") == 2 * 5
