"""What the compiled quantization kernels cost, read from their cubins: it stays so."""

from __future__ import annotations

import pytest
import torch
from support.quantize_problems import rules

from cute_nvfp4.kernels.quantize.config import QuantizeConfig
from cute_nvfp4.ops.quantize_launch import compile_quantize
from cute_nvfp4.quantization.rules import resolve_format, resolve_rule
from cute_nvfp4.runtime.inspection import KernelReport, inspect_cubin

pytestmark = pytest.mark.sweep
ARCHS = ("sm_100a", "sm_90a")
KINDS = [*(("nvfp4", rule) for rule in rules("nvfp4")), ("mxfp4", "even"), ("mxfp8_e4m3", "rceil")]
REGISTERS_OF_A_MULTIPROCESSOR = 65536


def compiled(arch: str, format: str, rule: str, **options: object) -> tuple[KernelReport, QuantizeConfig]:
    resolved = resolve_format(format)
    sizes = {"rows": 8192, "k": 8192} | options
    kernel, config = compile_quantize(arch, resolved, resolve_rule(rule, resolved), **sizes)
    return inspect_cubin(kernel.cubin, kernel.ptx).kernel, config


def accesses(report: KernelReport, kind: str, space: str) -> dict[int, int]:
    """bits → how many, in SASS."""
    found: dict[int, int] = {}
    for x in report.sass_accesses:
        if (x.kind, x.space) == (kind, space):
            found[x.bits] = found.get(x.bits, 0) + x.count
    return found


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "options", [{}, {"rows": 100, "k": 544}, {"stochastic": True}], ids=["full", "ragged", "random"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("format,rule", KINDS)
def test_no_spills(arch: str, format: str, rule: str, dtype: torch.dtype, options: dict) -> None:
    """Everything stays in registers, and as many CTAs fit as the grid is made for."""
    report, config = compiled(arch, format, rule, dtype=dtype, **options)
    assert (report.stack_bytes, report.local_bytes, report.spill_loads, report.spill_stores) == (0, 0, 0, 0)
    assert report.registers * 32 * config.warps * config.min_blocks <= REGISTERS_OF_A_MULTIPROCESSOR


@pytest.mark.parametrize("arch", ARCHS)
def test_memory(arch: str) -> None:
    """x comes by bulk copies (the four rows of the first unit, and one in the loop); data leaves in 64-bit stores."""
    report, _ = compiled(arch, "nvfp4", "max")
    assert report.count("UBLKCP") == 5
    # the global scale; and the scales, a word a row
    assert accesses(report, "load", "global") == {32: 1}
    assert accesses(report, "store", "global") == {64: 1, 32: 1}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rule", ["four_six_mse", "four_six_mae", "four_six_abs_max"])
def test_four_rows_at_once(arch: str, rule: str) -> None:
    """4/6 has four rows in its loop, and a tensor core computes their differences: eight products a row. What is
    undecided is loaded and stored again, by a lane or by a warp."""
    report, _ = compiled(arch, "nvfp4", rule)
    assert report.count("UBLKCP") == 4 + 4
    assert report.count("HMMA") == 4 * 8
    assert accesses(report, "load", "global") in ({32: 1 + 1, 128: 2}, {32: 1 + 1, 256: 1})
    assert accesses(report, "store", "global") == {64: 4 + 2, 32: 1}


def test_conversions() -> None:
    """sm_100a converts pairs of products to E2M1 by an instruction; sm_90a cuts them to binary16."""
    report, _ = compiled("sm_90a", "nvfp4", "max")
    assert report.count("F2FP.F16.F32") == 8
    report, _ = compiled("sm_90a", "nvfp4", "four_six_mse")
    assert report.count("F2FP.F16.F32") == 8 * 2 * 4
    report, _ = compiled("sm_100a", "nvfp4", "max")
    assert report.count("F2FP.SATFINITE.E2M1") == 8
    # four rows of two candidates on the fast path, and candidates in turn on the slow one
    report, _ = compiled("sm_100a", "nvfp4", "four_six_mse")
    assert report.count("F2FP.SATFINITE.E2M1") == 8 * 2 * 4 + 8
