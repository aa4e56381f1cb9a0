"""GEMV and quantization: problems at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fused_problems
import gemv_problems as gemv
import numpy as np
import quantize_problems as quantizing
import torch

from tests.long.family import Family, Once

ARCHS = ("sm_100a", "sm_90a", "sm_120a", "sm_121a")


@dataclass(frozen=True)
class GemvCase:
    """A seed of ``gemv_problems.random_case``, with limits that a smaller case lowers."""

    seed: int
    max_m: int = 700
    max_k: int = 5000


@dataclass(frozen=True)
class QuantizeCase:
    """Edge values and random rows by one rule; ``operation``: quantize, rmsnorm or silu_mul."""

    format: str
    rule: str
    rows: int
    k: int
    operation: str = "quantize"
    dtype: str = "bfloat16"
    global_scale: float | None = None
    stochastic: bool = False
    seed: int = 0


def _random_gemv(generator: np.random.Generator, arch: str) -> GemvCase:
    return GemvCase(int(generator.integers(1 << 30)))


def _random_quantize(generator: np.random.Generator, arch: str) -> QuantizeCase:
    g = generator
    kind = str(g.choice(quantizing.FORMATS))
    operation = str(g.choice(("quantize", "quantize", "rmsnorm", "silu_mul")))
    rule = str(g.choice([r for r in quantizing.rules(kind) if r != "optimal"]))
    rows, k = int(2 ** g.integers(0, 9)), 32 * int(2 ** g.integers(0, 7))
    return QuantizeCase(
        kind, rule, int(g.integers(1, rows + 1)), 32 * int(g.integers(1, k // 32 + 1)), operation,
        str(g.choice(("bfloat16", "float16", "float32"))), None if g.integers(2) else float(2.0 ** g.integers(-8, 8)),
        operation == "quantize" and bool(g.integers(3) == 0), int(g.integers(1 << 20)),
    )  # fmt: skip


def _gemv(case: GemvCase) -> Once:
    drawn = gemv.random_case(np.random.default_rng(case.seed), case.max_m, case.max_k)
    problem = gemv.make(drawn)
    return lambda: gemv.check(problem, problem.run())


def _quantize(case: QuantizeCase) -> Once:
    return lambda: _check_quantize(case)


def _check_quantize(case: QuantizeCase) -> None:
    dtype = getattr(torch, case.dtype)
    options: dict[str, Any] = {"global_scale": case.global_scale if case.format == "nvfp4" else None}
    if case.operation == "quantize":
        x = fused_problems.random(case.rows, case.k, dtype, case.seed)
        options |= {"seed": case.seed} if case.stochastic else {}
        found = quantizing.differences(x, case.format, case.rule, **options)
        assert not found, found
        return
    options |= {"format": case.format, "rule": case.rule}
    options = {name: value for name, value in options.items() if value is not None}
    if case.operation == "rmsnorm":
        x = fused_problems.random(case.rows, case.k, dtype, case.seed)
        weight = fused_problems.random(1, case.k, dtype, case.seed + 1)[0]
        fused_problems.check_rmsnorm(x, weight, **options)
    else:
        fused_problems.check_silu_mul(fused_problems.random(case.rows, 2 * case.k, dtype, case.seed), **options)


FAMILIES = (
    Family("gemv", GemvCase, _gemv, _random_gemv, archs=ARCHS, weight=2, goal=500),
    Family("quantize", QuantizeCase, _quantize, _random_quantize, archs=ARCHS, weight=3, goal=500),
)
