"""The suite's checks notice a broken gated kernel: mutants of what it adds to the GEMM, in the compiled PTX."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.gated_gemm_problems import Gated, Problem, make, usual_alpha
from support.gemm_problems import Case
from support.mutants import BLACKWELL, Change, Mutant, Text, at, constant, f32, outcome

from cute_nvfp4.formats import as_bytes
from cute_nvfp4.kernels.gemm.config import GemmConfig
from cute_nvfp4.kernels.gemm.shared_plan import StagePlan
from cute_nvfp4.ops.quantize import quantize

PLAIN = Gated(Case(m=140, n=136, k=544, alpha=usual_alpha(544), dtype="float32"))
SWAPPED = replace(PLAIN, case=replace(PLAIN.case, swap=True))
WHOLE = replace(PLAIN, case=replace(PLAIN.case, n=256), form="interleaved")
BLOCKS = Gated(Case(m=140, n=144, k=544, alpha=2.0**-8, exact=True, batch=1, out="new"))
GELU = Gated(replace(PLAIN.case, exact=True, alpha=2.0**-9), "gelu_erf")
STAGE = StagePlan(GemmConfig(products=2, gate="silu"))
_B1, _B2 = (offset // 16 for offset in STAGE.offsets.b)
(_SFA,), (_SFB1, _SFB2) = STAGE.offsets.sfa, STAGE.offsets.sfb
_R, _D = r"%r\d+", r"%rd\d+"


def _mutant(name: str, pattern: str, new: str, gated: Gated = PLAIN, count: int = 0, noticed: str = "wrong") -> Mutant:
    return Mutant(name, Text(pattern, new, count), gated, BLACKWELL, noticed)


def _of_blocks(name: str, pattern: str, new: str, count: int = 0, noticed: str = "wrong") -> Mutant:
    return _mutant(name, pattern, new, BLOCKS, count, noticed)


def _constant(name: str, old: float, new: float, gated: Gated = PLAIN) -> Mutant:
    return Mutant(name, at("", constant(f32(old), f32(new))), gated, BLACKWELL)


MUTANTS = (
    # two products of one A
    _mutant("B1 for B2", rf"add\.s64 b, ({_D}), {_B2};", rf"add.s64 b, \1, {_B1};"),
    _mutant("B1 for B2, one block of K", rf"add\.s64 b, ({_D}), {_B2 + 2};", rf"add.s64 b, \1, {_B1 + 2};"),
    _mutant("scales of B1 for B2", rf"d, ({_D}), {(_SFB2 - _SFA) // 16};", rf"d, \1, {(_SFB1 - _SFA) // 16};"),
    _mutant("A from B1", rf"add\.s64 a, ({_D}), 0; (add\.s64 b, {_D}, {_B2};)", rf"add.s64 a, \1, {_B1}; \2"),
    _mutant("A of the first weight for the second", rf"add\.s64 a, ({_D}), {_B1};", r"add.s64 a, \1, 0;", SWAPPED),
    _mutant(
        "the second product adds to nothing",
        rf"setp\.ne\.b32 p, ({_R}), 0; (add\.s64 a, {_D}, 0; add\.s64 b, {_D}, {_B2};)",
        r"setp.eq.b32 p, \1, \1; \2",
        noticed="UninitializedRead",
    ),
    _mutant("an MMA of the second product left out", rf"(add\.s64 b, {_D}, {_B2 + 2};[^;]*;) [^;]*;", r"\1"),
    # the gate
    _constant("exp(x) for exp(−x)", -math.log2(math.e), math.log2(math.e)),
    _mutant("2 for 1 + …", rf"(add\.f32\s+{_R}, {_R}), 0f3F800000", r"\1, 0f40000000", count=1),
    _mutant("a quotient left out", rf"rcp\.approx\.ftz\.f32\s+({_R}), ({_R});", r"mov.b32 \1, \2;", count=1),
    _mutant("an exponential left out", rf"ex2\.approx\.ftz\.f32\s+({_R}), ({_R});", r"mov.b32 \1, \2;", count=1),
    _mutant("one coefficient of erfc", "0f3F20F42B", "0f3F20E000", GELU),
    _mutant("an element's sign", rf"(mul\.f32\s+{_R}, {_R}, {_R};\s+)(mul\.f32\s+)({_R})(, {_R}, {_R};)",
           r"\1\2\3\4 neg.f32 \3, \3;", count=1),
    # blocks of a quantized result
    _of_blocks("an element unused", rf"max\.NaN\.f32 ({_R}), x, y;", r"max.NaN.f32 \1, x, x;", 1),
    _of_blocks("seventh for sixth", "0fC0C00000", "0fC0E00000"),
    _of_blocks("nibbles exchanged", r"(cvt\.rn\.satfinite\.e2m1x2\.f32 b0), y, x;", r"\1, x, y;", 1),
    _of_blocks("the second scale of a pair", rf"cvt\.rn\.satfinite\.e4m3x2\.f32 ({_R}|%rs\d+), ({_R}), ({_R});",
               r"cvt.rn.satfinite.e4m3x2.f32 \1, \3, \2;", 1),
    _of_blocks("data eight bytes on", r"(st\.global\.v2\.b32 \[%rd\d+)\]", r"\1+8]", 0, "OutOfBounds"),
    _of_blocks("scales two bytes on", r"(st\.global\.b16\s+\[%rd\d+)\]", r"\1+2]", 0, "OutOfBounds"),
    _of_blocks("half a store", r"st\.global\.v2\.b32 \[%rd\d+\], \{[^}]*\};", ""),
)  # fmt: skip


def found(change: Change | None, gated: Gated) -> str:
    """What is reported when gated_gemm() runs the mutant: "", "wrong", or the name of an error."""
    problem, quantized = make(gated), gated is BLOCKS
    unfused = problem.run(out_dtype=torch.float32) if quantized else None

    def right() -> bool:
        if not quantized:
            return not _differs(problem)
        c = problem.run(out_global_scale=0.37)
        want = quantize(unfused, "nvfp4", "max", global_scale=0.37, backend="reference")
        return as_bytes(c.data).equal(want.data) and as_bytes(c.blocked_scale()).equal(want.blocked_scale())

    return outcome(change, right, kernel="gated_gemm")


def _differs(problem: Problem) -> bool:
    c = problem.run()
    try:
        problem.check(c)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("gated", [PLAIN, SWAPPED, WHOLE, GELU], ids=str)
def test_the_kernel_itself_passes(gated: Gated) -> None:
    assert found(None, gated) == ""


def test_the_quantizing_kernel_itself_passes() -> None:
    assert found(None, BLOCKS) == ""


@pytest.mark.sweep(6)
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutants_are_noticed(mutant: Mutant) -> None:
    assert found(mutant.change, mutant.case) == mutant.noticed


def test_halves_exchanged_are_noticed() -> None:
    """B2 given as B1: silu(x) · y is not silu(y) · x."""
    problem = make(PLAIN)
    with pytest.raises(AssertionError, match="wrong"):
        problem.check(replace(problem, weights=problem.weights[::-1]).run())


def test_the_other_form_is_noticed() -> None:
    problem = make(WHOLE)
    with pytest.raises(AssertionError, match="wrong"):
        problem.check(problem.run(interleaved=False))
