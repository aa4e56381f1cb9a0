"""The suite's check notices a broken kernel: each mutant of the compiled PTX gives a wrong result or a named error."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import gemv_problems
import pytest
import torch
from gemv_problems import Case, make

from cute_nvfp4.errors import SimError
from cute_nvfp4.ops import gemv as ops
from cute_nvfp4.runtime.compile import CompiledKernel

BLOCKED = Case(70, 528, 2, alignment=8, dtype=torch.float16, alpha=2.0**-14)
FEW = Case(16, 1024, dtype=torch.float16, alpha=2.0**-14)
FULL = Case(128, 1024, dtype=torch.float16, alpha=2.0**-14)
BOTH = ("sm_100a", "sm_90a")


@dataclass(frozen=True)
class Mutant:
    """Replaces the first ``count`` (0: all) matches of ``pattern``; ``error``: what reports it, "" the check."""

    name: str
    pattern: str
    new: str
    archs: tuple[str, ...] = BOTH
    case: Case = BLOCKED
    count: int = 1
    error: str = ""


_R = r"%r\d+"
_FOUR = r"\{(%r\d+), (%r\d+), (%r\d+), (%r\d+)\}"
_MMA = rf"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.s8\.s8\.s32 {_FOUR}, \{{[^}}]*\}}, \{{[^}}]*\}}, {_FOUR}"
_MOVE_C = r"mov.b32 \1, \5; mov.b32 \2, \6; mov.b32 \3, \7; mov.b32 \4, \8"
_BLOCK = rf"fma\.rn\.f32\s+({_R}), ({_R}), ({_R}), ({_R});"
_TWICE = r"fma.rn.f32 \1, \2, \3, \4; fma.rn.f32 \1, \2, \3, \1;"
_SCALES = r"(ld\.global\.L1::no_allocate\.v2\.b32 \{[^}]*\}, \[%rd\d+)\]"
_SCALE_COPY = rf"(cp\.async\.ca\.shared\.global \[{_R}\], \[%rd\d+)\], 8;"
_SIZED_COPY = rf"(cp\.async\.ca\.shared\.global\.L2::cache_hint \[{_R}\], \[%rd\d+\], 8), {_R},"
_ADD = rf"add\.f32\s+({_R}), ({_R}), ({_R});"
_NARROW = rf"(cvt\.rn\.f16\.f32\s+%rs\d+, ({_R});)"
_BARRIER = r"bar\.sync\s+0;"
_BLACKWELL, _HOPPER = ("sm_100a",), ("sm_90a",)
_OUTSIDE = "OutOfBounds"

MUTANTS = (
    # indices
    Mutant("scales of the next rows", _SCALES, r"\1+16]", case=FEW, count=0),
    Mutant("scales of the next rows, to the end", _SCALES, r"\1+16]", _BLACKWELL, FULL, 0, _OUTSIDE),
    Mutant("scales of the next rows, to the end", _SCALE_COPY, r"\1+16], 8;", _HOPPER, FULL, 0, _OUTSIDE),
    Mutant("scale of b one too far", r"(@p ld\.global\.u8 %r\d+, \[%rd\d+)\]", r"\1+1]", count=0),
    Mutant("output one too far", r"(st\.global\.b16\s+\[%rd\d+)\]", r"\1+2]", count=0, error=_OUTSIDE),
    # terms
    Mutant("two products of a lane dropped", rf"fma\.rn\.f16x2 s, d, {_R}, s;", "", _BLACKWELL),
    Mutant("eight products of a lane dropped", _MMA, _MOVE_C, _HOPPER),
    Mutant("a block dropped", _BLOCK, r"mov.b32 \1, \4;"),
    Mutant("a block twice", _BLOCK, _TWICE),
    Mutant("wrong byte decoded", r"cvt\.rn\.f16x2\.e2m1x2 d, x1;", "cvt.rn.f16x2.e2m1x2 d, x0;", _BLACKWELL),
    Mutant("wrong pair of scales", rf"cvt\.rn\.f16x2\.e4m3x2 ({_R}), h", r"cvt.rn.f16x2.e4m3x2 \1, l"),
    # tails
    Mutant("loads without predicate", r"@p ld\.global", "ld.global", _BLACKWELL, count=0, error=_OUTSIDE),
    Mutant("copies without a size", _SIZED_COPY, r"\1,", _HOPPER, count=0, error=_OUTSIDE),
    Mutant("predicate of b's scale", r"@p (ld\.global\.u8)", r"\1", count=0, error=_OUTSIDE),
    Mutant("padding of the scales not masked", rf"selp\.b32\s+({_R}), -1, {_R}, %p\d+;", r"mov.b32 \1, -1;", count=0),
    # constants
    Mutant("table of magnitudes", str(0x03020100), str(0x02020100), _HOPPER, count=0),
    Mutant("signs of four elements", "0x88888888", "0x08888888", _HOPPER, count=0),
    Mutant("scale of the scales", str(0x24002400), str(0x28002800), count=0),
    Mutant("bits of 1.5 · 2²³", str(0x4B400000), str(0x4BC00000), _HOPPER),
    # the end
    Mutant("shuffle over 1 instead of 2 lanes", r"(shfl\.sync\.bfly\.b32.*), 2, ", r"\1, 1, "),
    Mutant("shuffle over 4 instead of 2 lanes", r"(shfl\.sync\.bfly\.b32.*), 2, ", r"\1, 4, "),
    Mutant("sum of a lane dropped", _ADD + r"(?![\s\S]*add\.f32)", r"mov.b32 \1, \2;"),
    Mutant("rows past the last written", r"@%p\d+ bra\s+\$L\w+;(?=[^@]*st\.global)", "", error=_OUTSIDE),
    # rounding
    Mutant("output rounded toward zero", r"cvt\.rn\.f16\.f32", "cvt.rz.f16.f32", count=0),
    Mutant("output rounded by way of bf16", _NARROW, r"and.b32 \2, \2, -65536; \1", count=0),
)

UNORDERED = (
    Mutant("no barrier after b is decoded", _BARRIER, "", case=FULL, error="Race"),
    Mutant("no barrier before the sums meet", _BARRIER + r"(?![\s\S]*bar\.sync)", "", case=FULL, error="Race"),
    Mutant("copies not waited for", r"cp\.async\.wait_group \d+;", "", _HOPPER, FULL, 0, "Race"),
)
"""What the schedule of this run hides, and the checks do not."""

BLIND = (Mutant("lanes of a warp not in step", r"bar\.warp\.sync\s+-1;", "", _HOPPER, FULL, 0),)
"""Not noticed: a warp's cp.async groups are waited for by the warp, and its lanes are not told apart there."""


def _pairs(mutants: tuple[Mutant, ...]) -> list:
    return [pytest.param(m, arch, id=f"{m.name}-{arch}".replace(" ", "_")) for m in mutants for arch in m.archs]


def outcome(mutant: Mutant | None, case: Case, arch: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is reported when gemv() runs the mutant: "", "wrong", or the name of an error."""
    compile_config = ops._compile
    found = []

    def mutated(config) -> CompiledKernel:
        kernel = compile_config(config)
        if mutant is None:
            return kernel
        ptx, count = re.subn(mutant.pattern, mutant.new, kernel.ptx, count=mutant.count)
        found.append(count)
        return replace(kernel, ptx=ptx)

    monkeypatch.setenv("CUTE_NVFP4_ARCH", arch)
    monkeypatch.setattr(ops, "_compile", mutated)
    monkeypatch.setattr(ops, "_plan", ops._plan.__wrapped__)  # no plan from before, none kept
    problem = make(case)
    try:
        c = problem.run()
    except SimError as error:
        return type(error).__name__
    finally:
        assert mutant is None or found[0] > 0, f"the kernel no longer has what the mutant changes: {mutant.pattern}"
    try:
        gemv_problems.check(problem, c)
    except AssertionError:
        return "wrong"
    return ""


@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize("case", [BLOCKED, FULL], ids=str)
def test_the_kernel_itself_passes(case: Case, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(None, case, arch, monkeypatch) == ""


@pytest.mark.parametrize("mutant,arch", _pairs(MUTANTS))
def test_mutants_are_noticed(mutant: Mutant, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(mutant, mutant.case, arch, monkeypatch) == (mutant.error or "wrong")


@pytest.mark.parametrize("mutant,arch", _pairs(UNORDERED))
def test_missing_order_is_a_race(mutant: Mutant, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(mutant, mutant.case, arch, monkeypatch) == mutant.error


@pytest.mark.parametrize("mutant,arch", _pairs(BLIND))
def test_mutants_that_are_not_noticed(mutant: Mutant, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(mutant, mutant.case, arch, monkeypatch) == ""
