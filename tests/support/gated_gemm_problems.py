"""Gated GEMM problems, and the check of an output: ``gemm_problems`` with a second weight and a gate.

A right output lies between the values that the gate and the product take at the ends of each sum's interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cute_nvfp4 import gated_gemm, interleave
from cute_nvfp4.formats import FORMATS, as_bytes
from cute_nvfp4.operand import BlockScaledTensor
from support import backends, gemm_problems
from support.gemm_problems import CANCELLED, DTYPES, FINISH_TOLERANCE, GUARD, TOLERANCE, Case, poisoned_memory, rounded
from support.gemm_structures import random_case

TEN_SHAPES = (
    (1536, 512, 7168), (256, 512, 256), (1536, 512, 7168), (3072, 1024, 1536), (7168, 1024, 256),
    (7168, 2304, 2048), (4608, 384, 7168), (7168, 384, 2304), (512, 768, 7168), (4096, 768, 512),
)  # fmt: skip
"""(m, n, k) of the correctness tests of nvfp4_dual_gemm."""
FORMS = ("two", "halves", "interleaved")
GATE_TOLERANCE = 2.0**-16
"""Relative error of a gate in fp32 (``kernels.core.gates``), including the effect of its argument's last bit."""


def _erf_gelu(x: torch.Tensor) -> torch.Tensor:
    # erfc does not suffer cancellation where the result is small
    return x * 0.5 * torch.special.erfc(-x * math.sqrt(0.5))


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


# each gate in float64, and where it has a minimum, if it has one
GATES = {
    "silu": (lambda x: x * torch.sigmoid(x), -1.2784645427610738),
    "gelu_tanh": (_tanh_gelu, -0.7524614220710162),
    "gelu_erf": (_erf_gelu, -0.7517915245650436),
    "relu": (lambda x: x.clamp(min=0), None),
    "identity": (lambda x: x, None),
}


@dataclass(frozen=True)
class Gated:
    """A GEMM's case (for one of b1, b2) with a gate. form: how b1 and b2 are passed."""

    case: Case
    gate: str = "silu"
    form: str = "two"

    def __str__(self) -> str:
        return f"{self.case},gate={self.gate},form={self.form}"


def usual_alpha(k: int) -> float:
    """An alpha that scales sums of full-range NVFP4 to where gates are curved."""
    return 2.0**-17 / math.sqrt(k)


def subset(x: BlockScaledTensor, rows: Any) -> BlockScaledTensor:
    """Some rows of a matrix, or of each matrix of a batch."""
    scale = as_bytes(x.rowmajor_scale())[:, rows]
    data = as_bytes(x.data)[..., rows, :]
    return BlockScaledTensor(data, scale if x.is_batched else scale[0], x.global_scale, x.format)


@dataclass(frozen=True)
class Problem:
    """Operands of a case, as they are passed (``weights``) and each by itself."""

    gated: Gated
    a: BlockScaledTensor
    weights: tuple[BlockScaledTensor, ...]
    alone: tuple[BlockScaledTensor, BlockScaledTensor]
    alpha: Any
    out: torch.Tensor | None
    room: torch.Tensor | None

    @property
    def options(self) -> dict[str, Any]:
        interleaved = self.gated.form == "interleaved"
        plan = self.gated.case.plan()
        return {
            "gate": self.gated.gate,
            "alpha": self.alpha,
            "interleaved": interleaved,
            "config": plan,
            "backend": backends.backend(),
        }

    def run(self, **changes: Any) -> Any:
        """The output of the kernel; the output and all scratch memory are NaN before."""
        options = {**self.options, **changes}
        with poisoned_memory():
            if self.out is None or {"out_global_scale", "out", "out_dtype"} & set(changes):
                default = (
                    {} if {"out_global_scale", "out"} & set(changes) else {"out_dtype": DTYPES[self.gated.case.dtype]}
                )
                return gated_gemm(self.a, *self.weights, **{**default, **options})
            self.room.fill_(GUARD)
            self.out.fill_(math.nan)
            c = gated_gemm(self.a, *self.weights, out=self.out, **options)
        assert c is self.out
        return c

    def products(self, rows: Any = slice(None), columns: Any = slice(None)) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(alpha · A · Bᵀ, its tolerance) for some rows and columns, for B1 and for B2."""
        alpha = 1.0 if self.alpha is None else float(self.alpha)
        left, found = subset(self.a, rows).dequantize(torch.float64), []
        for b in self.alone:
            right = subset(b, columns).dequantize(torch.float64).transpose(-1, -2)
            sums = left @ right * alpha
            error = torch.zeros_like(sums)
            if not self.gated.case.exact:
                total = left.abs() @ right.abs() * abs(alpha)
                error = TOLERANCE * (sums.abs() + CANCELLED * total) + FINISH_TOLERANCE * sums.abs()
            found.append((sums, error))
        return found

    def bounds(self, rows: Any = slice(None), columns: Any = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest and highest right output for some rows and columns, in the output's dtype."""
        gate, smallest = GATES[self.gated.gate]
        (x, x_error), (y, y_error) = self.products(rows, columns)
        ends = [gate(x - x_error), gate(x), gate(x + x_error)]
        if smallest is not None:
            inside = (x - smallest).abs() <= x_error
            ends.append(torch.where(inside, gate(torch.full_like(x, smallest)), ends[1]))
        curved = 0.0 if self.gated.gate in ("relu", "identity") else GATE_TOLERANCE
        off = [curved * end.abs() + (2.0**-119 if curved else 0.0) for end in ends]
        gates = [end + sign * o for end, o in zip(ends, off) for sign in (-1, 1)]
        corners = torch.stack([g * (y + sign * y_error) for g in gates for sign in (-1, 1)])
        low, high = corners.amin(0), corners.amax(0)
        if self.gated.case.exact and not curved:
            # only the product rounds in fp32
            low, high = low.float().double(), high.float().double()
        else:
            low, high = (x + s * (FINISH_TOLERANCE * x.abs() + 2.0**-149) for x, s in ((low, -1), (high, 1)))
        dtype = DTYPES[self.gated.case.dtype]
        return rounded(low, dtype), rounded(high, dtype)

    def check(self, c: torch.Tensor, rows: Any = slice(None), columns: Any = slice(None)) -> None:
        """Raises AssertionError unless these elements of ``c`` are right, and everything around the output is
        unchanged."""
        case = self.gated.case
        assert c.shape == ((case.m, case.n) if case.batch == 0 else (case.batch, case.m, case.n))
        assert c.dtype is DTYPES[case.dtype]
        low, high = self.bounds(rows, columns)
        got = c[..., rows, :][..., columns]
        bad = ~((low <= got) & (got <= high))
        if bad.any():
            where = [tuple(i) for i in bad.nonzero()[:5].tolist()]
            values = [(i, got[i].item(), low[i].item(), high[i].item()) for i in where]
            raise AssertionError(
                f"{self.gated}: {int(bad.sum())} of {bad.numel()} wrong: (index, got, from, to) {values}"
            )
        if self.room is not None:
            inside = torch.zeros(self.room.shape, dtype=torch.bool, device=self.room.device)
            inside.as_strided(self.out.shape, self.out.stride(), self.out.storage_offset()).fill_(True)
            assert (self.room[~inside] == GUARD).all(), f"{self.gated}: memory around the output was written"


def make(gated: Gated) -> Problem:
    """The operands of a case, always the same."""
    case = replace(gated.case, bias="")
    first = gemm_problems.make(case)
    second = gemm_problems.make(replace(case, seed=case.seed + 1, out="new"))
    alone = first.b, second.b
    if gated.form == "two":
        weights = alone
    elif gated.form == "halves":
        both = gemm_problems.make(replace(case, n=2 * case.n, out="new")).b
        weights = (both,)
        alone = subset(both, slice(None, case.n)), subset(both, slice(case.n, None))
    else:
        second_b = replace(second.b, global_scale=first.b.global_scale)
        weights = (interleave(first.b, second_b),)
        alone = first.b, second_b
    return Problem(gated, first.a, weights, alone, first.alpha, first.out, first.room)


def random_gated(
    generator: np.random.Generator, every: Sequence[Case], arch: str = "sm_100a", **fixed: Any
) -> Gated | None:
    """A problem of any size, with a structure that has room for two products, or with a plan that planning chooses for
    it."""
    case = random_case(generator, every, max_mn=500, max_k=2048, **fixed)
    found = gated_of(generator, case, FORMS[generator.integers(3)])
    return found if not case.workers or fits(found, arch) else None


def gated_of(generator: np.random.Generator, case: Case, form: str) -> Gated:
    """``case`` with a gate, and with values at which gates are curved."""
    wide = (case.a_format, case.b_format)
    alpha = usual_alpha(case.k) if wide[0] == "nvfp4" else 2.0**-8 / math.sqrt(case.k)
    if case.exact:
        alpha = 2.0**-8
    if case.exact and case.dtype == "float16":
        alpha = 2.0**-10
    gate = tuple(GATES)[generator.integers(len(GATES))]
    changes: dict[str, Any] = {"bias": "", "alpha": alpha}
    if form != "two":
        changes |= {"n": 128 * max(1, case.n // 128), "repeat_b": False}
    return Gated(replace(case, **changes), gate, form)


def fits(gated: Gated, arch: str = "sm_100a") -> bool:
    """Whether the case's configuration has room for two products."""
    from cute_nvfp4.kernels.gemm.limits import can_implement
    from cute_nvfp4.target import ARCHITECTURES

    case = gated.case
    sides = (case.b_format, case.a_format) if case.swap else (case.a_format, case.b_format)
    config = replace(
        case.tiling(), a_format=sides[0], b_format=sides[1], out=case.dtype, products=2, gate=gated.gate,
        shared="b" if case.swap else "a", interleaved=gated.form == "interleaved", arch=ARCHITECTURES[arch],
    )  # fmt: skip
    return not can_implement(config)


__all__ = [
    "FORMATS",
    "FORMS",
    "GATES",
    "TEN_SHAPES",
    "Gated",
    "Problem",
    "make",
    "random_gated",
    "subset",
    "usual_alpha",
]
