"""The suite's check notices a broken kernel: each mutant of the compiled PTX gives a wrong result or a named error.

Not noticed, because the simulator cannot see them yet: a dropped ``cp.async.wait_group`` (copies are done at once)
and dropped barriers (the warps of a block, and the lanes of a warp, run in step as long as they agree). ``BLIND`` keeps them here, so that this comment is
corrected when the simulator learns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import gemv_problems
import pytest
import torch
from gemv_problems import Case, make

from cute_nvfp4 import ops
from cute_nvfp4.compile import CompiledKernel
from cute_nvfp4.errors import SimError

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


_REGISTERS = r"\{(%r\d+), (%r\d+), (%r\d+), (%r\d+)\}"
_MMA = r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.s8\.s8\.s32 " + _REGISTERS + r", \{[^}]*\}, \{[^}]*\}, " + _REGISTERS
_TERM = r"fma\.rn\.f16x2 s, d, %r\d+, s;"

MUTANTS = (
    # indices
    Mutant("scales of the next rows", r"(ld\.global\.L1::no_allocate\.v2\.b32 \{[^}]*\}, \[%rd\d+)\]", r"\1+16]", case=FEW, count=0),
    Mutant("scales of the next rows, to the end", r"(ld\.global\.L1::no_allocate\.v2\.b32 \{[^}]*\}, \[%rd\d+)\]", r"\1+16]", ("sm_100a",), FULL, 0, "OutOfBounds"),
    Mutant("scales of the next rows, to the end", r"(cp\.async\.ca\.shared\.global \[%r\d+\], \[%rd\d+)\], 8;", r"\1+16], 8;", ("sm_90a",), FULL, 0, "OutOfBounds"),
    Mutant("scale of b one too far", r"(@p ld\.global\.u8 %r\d+, \[%rd\d+)\]", r"\1+1]", count=0),
    Mutant("output one too far", r"(st\.global\.b16 +\t?\[%rd\d+)\]", r"\1+2]", count=0, error="OutOfBounds"),
    # terms
    Mutant("two products of a lane dropped", _TERM, "", ("sm_100a",)),
    Mutant("eight products of a lane dropped", _MMA, "mov.b32 \\1, \\5; mov.b32 \\2, \\6; mov.b32 \\3, \\7; mov.b32 \\4, \\8", ("sm_90a",)),
    Mutant("a block dropped", r"fma\.rn\.f32 *\t?(%r\d+), %r\d+, %r\d+, (%r\d+);", r"mov.b32 \1, \2;"),
    Mutant("a block twice", r"fma\.rn\.f32 *\t?(%r\d+), (%r\d+), (%r\d+), (%r\d+);", r"fma.rn.f32 \1, \2, \3, \4; fma.rn.f32 \1, \2, \3, \1;"),
    Mutant("wrong byte decoded", r"cvt\.rn\.f16x2\.e2m1x2 d, x1;", "cvt.rn.f16x2.e2m1x2 d, x0;", ("sm_100a",)),
    Mutant("wrong pair of scales", r"cvt\.rn\.f16x2\.e4m3x2 (%r\d+), h", r"cvt.rn.f16x2.e4m3x2 \1, l"),
    # tails
    Mutant("loads without predicate", r"@p ld\.global", "ld.global", ("sm_100a",), count=0, error="OutOfBounds"),
    Mutant("copies without a size", r"(cp\.async\.ca\.shared\.global\.L2::cache_hint \[%r\d+\], \[%rd\d+\], 8), %r\d+,", r"\1,", ("sm_90a",), count=0, error="OutOfBounds"),
    Mutant("predicate of b's scale", r"@p (ld\.global\.u8)", r"\1", count=0, error="OutOfBounds"),
    Mutant("padding of the scales not masked", r"selp\.b32 *\t?(%r\d+), -1, %r\d+, %p\d+;", r"mov.b32 \1, -1;", count=0),
    # constants
    Mutant("table of magnitudes", str(0x03020100), str(0x02020100), ("sm_90a",), count=0),
    Mutant("signs of four elements", "0x88888888", "0x08888888", ("sm_90a",), count=0),
    Mutant("scale of the scales", str(0x24002400), str(0x28002800), count=0),
    Mutant("bits of 1.5 · 2²³", str(0x4B400000), str(0x4B400001), ("sm_90a",)),
    # the end
    Mutant("sum of a lane dropped", r"add\.f32 *\t?(%r\d+), (%r\d+), (%r\d+);(?![\s\S]*add\.f32)", r"mov.b32 \1, \2;"),
    Mutant("rows past the last written", r"@%p\d+ bra *\t?\$L\w+;(?=[^@]*st\.global)", "", error="OutOfBounds"),
    # rounding
    Mutant("output rounded toward zero", r"cvt\.rn\.f16\.f32", "cvt.rz.f16.f32", count=0),
    Mutant("output rounded by way of bf16", r"(cvt\.rn\.f16\.f32 *\t?%rs\d+, (%r\d+);)", r"and.b32 \2, \2, -65536; \1", count=0),
)  # fmt: skip

BLIND = (
    Mutant("no barrier after b is decoded", r"bar\.sync *\t?0;", "", case=FULL),
    Mutant("no barrier before the sums meet", r"bar\.sync *\t?0;(?![\s\S]*bar\.sync)", "", case=FULL),
    Mutant("copies not waited for", r"cp\.async\.wait_group \d+;", "", ("sm_90a",), FULL, 0),
    Mutant("lanes of a warp not in step", r"bar\.warp\.sync *\t?-1;", "", ("sm_90a",), FULL, 0),
)


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


@pytest.mark.parametrize("mutant,arch", _pairs(BLIND))
def test_mutants_the_simulator_cannot_see(mutant: Mutant, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(mutant, mutant.case, arch, monkeypatch) == ""
