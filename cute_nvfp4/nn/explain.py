"""Explains, before a call, what a layer's product runs, and why."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_nvfp4.formats import NVFP4
from cute_nvfp4.nn.input_rules import E4M3, takes_4_bits, takes_fp8
from cute_nvfp4.planning.packed_problem import PackedProblem, can_take
from cute_nvfp4.runtime.backend import Backend, resolve

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_PRODUCTS = _NAMES | {E4M3: "float8_e4m3fn"}

_MMA = {"sm90": "WGMMA", "sm100": "tcgen05", "sm120": "mma.sync"}


class KernelChoice(NamedTuple):
    """backend: "cuda", "sim" or "reference". kernel: what multiplies. reason: why it is this one."""

    backend: str
    kernel: str
    reason: str


def explain_product(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    *,
    input_rule: str | None,
    backend: Backend,
    device: torch.device,
    released: torch.dtype | None = None,
    block: int = NVFP4.block,
) -> KernelChoice:
    """The choice of ``NVFP4Linear`` for x (rows, k) of ``dtype`` and a weight (n, k).

    released: the dtype that a weight is prepared for, if that is its only copy. block: the elements that share a scale.
    """
    target = resolve(backend, device)
    hopper, x = target.arch.generation == "sm90", _NAMES.get(dtype, str(dtype))
    # x rounded to MXFP4 stays in 16 bits, and a single row of it has no kernel of its own
    nvfp4 = block == NVFP4.block
    quantized, fp8 = takes_4_bits(input_rule) and nvfp4, takes_fp8(input_rule, rows)
    product = torch.float16 if quantized else E4M3 if fp8 else dtype
    if target.backend == "reference":
        where = "backend='reference'" if backend == "reference" else f"tensors on {device.type} and no simulator"
        return KernelChoice("reference", "exact torch", where)
    if fp8 and not hopper:
        return KernelChoice("reference", "exact torch", f"{target.arch.name} has no kernel of 4-bit weights for FP8")
    in_16_bits = not (takes_4_bits(input_rule) or fp8)
    if in_16_bits and product not in (torch.bfloat16, torch.float16):
        return KernelChoice(target.backend, "torch's linear, weight decoded for each call", f"x is {x}")
    if released is not None and released is not product and not (fp8 and input_rule == "auto"):
        why = f"x is {x}, and the weight's only copy is prepared for {_PRODUCTS[released]}: prepare() again"
        return KernelChoice(target.backend, "torch's linear, weight decoded for each call", why)
    if rows == 1 and quantized and released is None:
        return KernelChoice(target.backend, "gemv", "one row, quantized: the weight is read once as it is")
    if not (hopper or in_16_bits):
        return KernelChoice(target.backend, "gemm", f"block-scaled products of {target.arch.name}")
    padded = -(-k // block) * block
    options = {"quantized": quantized, "vector": True, "factors": 1}
    problem = PackedProblem(m=rows, n=n, k=padded, dtype=_PRODUCTS[product], out=x, **options)
    if can_take(problem):
        why = f"few rows ({rows}): they take the time of the weight's bytes"
        return KernelChoice(target.backend, "packed streaming gemm", why)
    why = f"{rows} rows{' in FP8' * fp8}, K {padded}: the tensor cores of {target.arch.name}"
    return KernelChoice(target.backend, f"packed {_MMA[target.arch.generation]} gemm", why)
