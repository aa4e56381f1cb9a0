"""Compiles the kernels that quantize what they compute, for given sizes."""

from __future__ import annotations

from typing import Any

import torch

from cute_nvfp4.formats import Format
from cute_nvfp4.kernels.quantize.fused import RmsnormConfig, SiluMulConfig
from cute_nvfp4.ops.checks import DTYPE_NAMES
from cute_nvfp4.ops.rmsnorm_quantize import KERNEL as RMSNORM
from cute_nvfp4.ops.silu_mul_quantize import KERNEL as SILU_MUL
from cute_nvfp4.planning.fused import FusedProblem, RmsnormProblem, choose_rmsnorm, choose_silu_mul
from cute_nvfp4.planning.quantize import QuantizeProblem
from cute_nvfp4.quantization.rules import resolve_format, resolve_rule
from cute_nvfp4.runtime.compile import CompiledKernel
from cute_nvfp4.target import architecture


def _quantized(format: str | Format, rule: str, rows: int, k: int, dtype: torch.dtype, **more: Any) -> QuantizeProblem:
    """The quantization problem of contiguous matrices of this size."""
    of = resolve_format(format)
    return QuantizeProblem(of, resolve_rule(rule, of), rows, k, dtype=DTYPE_NAMES[dtype], alignment=16, **more)


def compile_rmsnorm_quantize(
    arch: str,
    format: str | Format = "nvfp4",
    rule: str = "max",
    *,
    rows: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    values: bool = False,
    residual: bool = False,
    weight: torch.dtype | None = torch.bfloat16,
    **more: Any,
) -> tuple[CompiledKernel, RmsnormConfig]:
    """The kernel for contiguous matrices of this size on ``arch``, and its configuration. more: fields of the
    problem."""
    found, quantized = architecture(arch), _quantized(format, rule, rows, k, dtype, **more)
    problem = RmsnormProblem(quantized, values, residual, "" if weight is None else DTYPE_NAMES[weight])
    config = choose_rmsnorm(problem, found, found.sm_count).config
    return RMSNORM.compile(config), config


def compile_silu_mul_quantize(
    arch: str,
    format: str | Format = "nvfp4",
    rule: str = "max",
    *,
    rows: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    values: bool = False,
    **more: Any,
) -> tuple[CompiledKernel, SiluMulConfig]:
    """The kernel for contiguous matrices (rows, k) on ``arch``, and its configuration. more: fields of the problem."""
    found, quantized = architecture(arch), _quantized(format, rule, rows, k, dtype, **more)
    config = choose_silu_mul(FusedProblem(quantized, values), found, found.sm_count).config
    return SILU_MUL.compile(config), config
