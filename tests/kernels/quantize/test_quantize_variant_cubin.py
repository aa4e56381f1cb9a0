"""What the compiled kernels of rotations, tiles and transposed reads cost, read from their cubins: it stays so."""

from __future__ import annotations

import pytest
import torch

from cute_nvfp4.kernels.quantize.config import QuantizeConfig
from cute_nvfp4.ops.quantize_launch import compile_quantize
from cute_nvfp4.quantization.rules import resolve_format, resolve_rule
from cute_nvfp4.runtime.inspection import inspect_cubin

pytestmark = pytest.mark.sweep
ARCHS = ("sm_100a", "sm_90a")
KINDS = [("nvfp4", "max"), ("nvfp4", "four_six_mse"), ("mxfp4", "even"), ("mxfp8_e4m3", "rceil")]
VARIANTS = [
    {"rotation": 16},
    {"tile": True},
    {"transposed": True},
    {"rotation": 16, "transposed": True},
    {"rotation": 16, "tile": True},
    {"tile": True, "transposed": True},
]
REGISTERS_OF_A_MULTIPROCESSOR = 65536


def allowed_spills(rule: str, config: QuantizeConfig, stochastic: bool) -> int:
    """Words that a thread may spill: none, but for kernels that have the 255 registers there are, and for one word."""
    if not stochastic:
        return 1 if config.tile and config.hadamard and rule == "four_six_mse" else 0
    if config.tile and rule == "four_six_mse":
        return 100
    # two blocks of 32 at once
    if config.transposed and config.block == 32 and config.item_bytes == 2:
        return 34 if config.tile else 4
    return 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("format,rule", KINDS)
def test_no_spills(arch: str, format: str, rule: str, variant: dict, dtype: torch.dtype, stochastic: bool) -> None:
    if len(variant) == 2 and "rotation" not in variant and rule == "four_six_mse":
        pytest.skip("copied first")
    resolved = resolve_format(format)
    kernel, config = compile_quantize(
        arch,
        resolved,
        resolve_rule(rule, resolved),
        rows=8192,
        k=8192,
        dtype=dtype,
        stochastic=stochastic,
        **variant,
    )
    report = inspect_cubin(kernel.cubin, kernel.ptx).kernel
    spilled = max(report.spill_loads, report.spill_stores)
    assert spilled <= allowed_spills(rule, config, stochastic) and report.local_bytes == 0
    assert report.registers * 32 * config.warps * config.min_blocks <= REGISTERS_OF_A_MULTIPROCESSOR
