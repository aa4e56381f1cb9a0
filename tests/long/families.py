"""The kinds of cases: how one is drawn, and how it is run. A case is a record; what raises in its run is a failure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import fused_problems
import gated_gemm_problems as gated
import gemm_problems as gemm
import gemv_problems as gemv
import grouped_problems as grouped
import numpy as np
import quantize_problems as quantizing
import torch
from gemm_structures import Pairs, random_case, structures
from pydantic import TypeAdapter

from tests.long import fuzzing

ARCHS = ("sm_100a", "sm_90a")


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


@dataclass(frozen=True)
class Family:
    """``draw(generator, number)`` makes the case of a number; ``run`` runs it on an architecture; ``weight``: how often
    it comes; ``schedules``: how many each case runs under."""

    name: str
    case: type
    draw: Callable[[np.random.Generator, int], Any]
    run: Callable[[Any], None]
    weight: int = 1
    schedules: int = 1
    archs: Sequence[str] = ("sm_100a",)

    def parse(self, text: str) -> Any:
        return TypeAdapter(self.case).validate_json(text)

    @staticmethod
    def text(case: Any) -> str:
        """The case as one line of JSON, without what is as it is by default."""
        return json.dumps(_changed(case), separators=(",", ":"))


def _changed(case: Any) -> Any:
    made = asdict(case)
    for name, field in type(case).__dataclass_fields__.items():
        value = getattr(case, name)
        if hasattr(value, "__dataclass_fields__"):
            made[name] = _changed(value)
        elif value == field.default:
            del made[name]
    return made


@cache
def _structures() -> list[gemm.Case]:
    every = list(structures())
    return [every[i] for i in np.random.default_rng(0).permutation(len(every))]


def _structure(generator: np.random.Generator, number: int) -> gemm.Case:
    every = _structures()
    return Pairs(int(generator.integers(1 << 30))).complete(every[number % len(every)], tries=1)


def _gated(generator: np.random.Generator, number: int) -> gated.Gated:
    while (found := gated.random_gated(generator, _structures())) is None:
        pass
    return found


def _quantize(generator: np.random.Generator, number: int) -> QuantizeCase:
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


def _run_gemm(case: gemm.Case) -> None:
    problem = gemm.make(case)
    gemm.check(problem, problem.run())


def _run_gemv(case: GemvCase) -> None:
    drawn = gemv.random_case(np.random.default_rng(case.seed), case.max_m, case.max_k)
    problem = gemv.make(drawn)
    gemv.check(problem, problem.run())


def _run_gated(case: gated.Gated) -> None:
    problem = gated.make(case)
    problem.check(problem.run())


def _run_grouped(case: grouped.Grouped) -> None:
    problem = grouped.make(case)
    problem.check(problem.run())


def _run_quantize(case: QuantizeCase) -> None:
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


FAMILIES = {
    family.name: family
    for family in (
        Family("gemm-structure", gemm.Case, _structure, _run_gemm, weight=4, schedules=20),
        Family("gemm", gemm.Case, lambda g, n: random_case(g, _structures()), _run_gemm, weight=4),
        Family("gated-gemm", gated.Gated, _gated, _run_gated, weight=2),
        Family("grouped-gemm", grouped.Grouped, lambda g, n: grouped.random_grouped(g, max_groups=12), _run_grouped, 2),
        Family("gemv", GemvCase, lambda g, n: GemvCase(int(g.integers(1 << 30))), _run_gemv, 2, 1, ARCHS),
        Family("quantize", QuantizeCase, _quantize, _run_quantize, 3, 1, ARCHS),
        Family("fuzzed-ptx", fuzzing.FuzzCase, fuzzing.draw, fuzzing.run, weight=6),
    )
}
"""What there is, by name."""
