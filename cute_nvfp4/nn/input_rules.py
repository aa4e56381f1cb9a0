"""How a layer rounds x before it multiplies: by a rule of the weight's format, to FP8, or not at all."""

from __future__ import annotations

import torch

from cute_nvfp4.errors import OperandError
from cute_nvfp4.formats import NVFP4, Format
from cute_nvfp4.quantization.rules import resolve_rule

E4M3 = torch.float8_e4m3fn
FP8_RULES = ("fp8", "auto")
"""The rules that round rows of x to E4M3: always, or if there are so many that 16 bits take longer."""
FP8_ROWS = 64
"""The number of rows from which "auto" takes FP8. An H200 took 18.2 µs for 32 rows of 8192 × 8192 in FP8 and 17.2 in 16
bits, for 64 rows 19.5 and 20.4 (benchmarks/records/hopper.md)."""


def check_input_rule(rule: str | None, format: Format = NVFP4) -> None:
    """Raises unless ``rule`` can round the x of a layer with weights of ``format``."""
    if rule is None or rule in FP8_RULES:
        return
    if resolve_rule(rule, format).choice == "hessian":
        hint = "method='gptq' weighs errors by activations."
        raise OperandError.of("input_rule", got="'hessian'", expected="a rule that needs only x", hint=hint)


def takes_4_bits(rule: str | None) -> bool:
    """Whether x is rounded to the weight's format."""
    return rule is not None and rule not in FP8_RULES


def takes_fp8(rule: str | None, rows: int) -> bool:
    """Whether x with so many rows is rounded to FP8."""
    return rule == "fp8" or (rule == "auto" and rows >= FP8_ROWS)


def product_dtypes(rule: str | None, dtype: torch.dtype, format: Format = NVFP4) -> tuple[torch.dtype, ...]:
    """The dtypes that weights are prepared for; the first keeps most of a weight.

    dtype: that of an x that is not rounded, or is rounded to MXFP4, whose values fit 16 bits.
    """
    if rule in FP8_RULES:
        return (E4M3,) if rule == "fp8" else (dtype, E4M3)
    return (torch.float16 if takes_4_bits(rule) and format is NVFP4 else dtype,)
