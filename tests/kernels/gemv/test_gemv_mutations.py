"""The suite's check notices a broken kernel: each mutant of the compiled PTX gives a wrong result or a named error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import gemv_problems
from support.gemv_problems import Case, make
from support.mutants import (
    BLACKWELL,
    BOTH,
    FIRST,
    HOPPER,
    LAST,
    Edit,
    Instruction,
    Mutant,
    Ptx,
    at,
    become,
    constant,
    drop,
    f16,
    f32,
    guarded,
    instead,
    number,
    offset,
    operand,
    outcome,
    parameters,
    twice,
    unguarded,
    where,
    without,
)  # fmt: skip

BLOCKED = Case(70, 528, 2, alignment=8, dtype=torch.float16, alpha=2.0**-14)
FEW = Case(16, 1024, dtype=torch.float16, alpha=2.0**-14)
FULL = Case(128, 1024, dtype=torch.float16, alpha=2.0**-14)
PAIRS = Case(70, 1024, dtype=torch.float16, alpha=2.0**-14, cluster=2)
_OUTSIDE = "OutOfBounds"
WIDE = ("sm_120a",)
"""Where stages of A lie in registers."""
_MMA, _COPY, _COPY_OF_DATA = "mma.sync.aligned.m16n8k32", "cp.async.ca", "cp.async.ca.shared.global.L2::cache_hint"
_BYTE_OF_B = "ld.global.u8"
_SCALES = at("ld.global.L1::no_allocate.v2.b32", offset(16))
_SCALE_COPIES = at(_COPY, where(lambda x: len(x.operands) == 3, offset(16)))


def mutant(
    name: str, change: Ptx, archs: tuple[str, ...] = BOTH, case: Case = BLOCKED, noticed: str = "wrong"
) -> Mutant:
    return Mutant(name, change, case, archs, noticed)


def has(index: int, text: str) -> object:
    return lambda x: len(x.operands) > index and x.operands[index] == text


def sums_as_they_were(x: Instruction) -> str:
    """The accumulators of a matrix instruction, without what it adds."""
    new, old = (text.strip("{}").split(", ") for text in (x.operands[0], x.operands[3]))
    return " ".join(f"mov.b32 {d}, {c};" for d, c in zip(new, old))


def mask_of_ones(x: Instruction) -> str:
    return f"mov.b32 {x.operands[0]}, -1;"


_IS_GUARDED_BRANCH: Edit = where(lambda x: x.guard.startswith("@%"), drop())

MUTANTS = (
    # indices
    mutant("scales of the next rows", _SCALES, case=FEW),
    mutant("scales of the next rows, to the end", _SCALES, WIDE, FULL, _OUTSIDE),
    mutant("scales of the next rows, to the end", _SCALE_COPIES, case=FULL, noticed=_OUTSIDE),
    mutant("scale of b one too far", at(_BYTE_OF_B, where(guarded, offset(1)))),
    mutant("output one too far", at("st.global.b16", offset(2)), noticed=_OUTSIDE),
    # terms
    mutant("two products of a lane dropped", at("fma.rn.f16x2", where(has(0, "s"), drop()), FIRST), BLACKWELL),
    mutant("eight products of a lane dropped", at(_MMA, sums_as_they_were, FIRST), HOPPER),
    mutant("a block dropped", at("fma.rn.f32", instead("mov.b32 {0}, {3};"), FIRST)),
    mutant("a block twice", at("fma.rn.f32", instead("{this} fma.rn.f32 {0}, {1}, {2}, {0};"), FIRST)),
    mutant("wrong byte decoded", at("cvt.rn.f16x2.e2m1x2", where(has(1, "x1"), operand(1, "x0")), FIRST), BLACKWELL),
    mutant("wrong pair of scales", at("cvt.rn.f16x2.e4m3x2", where(has(1, "h"), operand(1, "l")), FIRST)),
    # tails
    mutant("loads without predicate", at("ld.global", unguarded()), WIDE, noticed=_OUTSIDE),
    mutant("copies without a size", at(_COPY_OF_DATA, where(lambda x: len(x.operands) == 5, without(3))),
           noticed=_OUTSIDE),
    mutant("predicate of b's scale", at(_BYTE_OF_B, unguarded()), noticed=_OUTSIDE),
    mutant("padding of the scales not masked", at("selp.b32", where(has(1, "-1"), mask_of_ones))),
    # constants
    mutant("table of magnitudes", at("", constant(0x03020100, 0x02020100)), HOPPER),
    mutant("signs of four elements", at("", constant(0x88888888, 0x08888888)), HOPPER),
    mutant("scale of the scales", at("", constant(twice(f16(2.0**-6)), twice(f16(2.0**-5))))),
    mutant("bits of 1.5 · 2²³", at("", constant(f32(1.5 * 2**23), f32(1.5 * 2**24)), FIRST), HOPPER),
    # the end
    mutant("shuffle over 1 instead of 2 lanes", at("shfl.sync.bfly.b32", number(2, 2, 1), FIRST)),
    mutant("shuffle over 4 instead of 2 lanes", at("shfl.sync.bfly.b32", number(2, 2, 4), FIRST)),
    mutant("sum of a lane dropped", at("add.f32", instead("mov.b32 {0}, {1};"), LAST)),
    mutant("rows past the last written", at("bra", _IS_GUARDED_BRANCH, LAST, before="st.global"), noticed=_OUTSIDE),
    # clusters
    mutant("sums of the other CTA not added", at("ld.shared", drop(), LAST), case=PAIRS),
    mutant("sums of the other CTA one row on", at("st.async", offset(4)), case=PAIRS, noticed="MbarrierMisuse"),
    mutant("sums of the other CTA not waited for", at("mbarrier.try_wait", instead("setp.eq.u32 p, 0, 0;")),
           case=PAIRS, noticed="Race"),
    mutant("bytes of too few rows announced", at("mbarrier.arrive.expect_tx", operand(2, "64")), case=PAIRS,
           noticed="Deadlock"),
    mutant("the other CTA may not run yet", at("barrier.cluster.wait", drop()), case=PAIRS, noticed="Race"),
    # rounding
    mutant("output rounded toward zero", at("cvt.rn.f16.f32", become("rn", "rz"))),
    mutant("output rounded by way of bf16", at("cvt.rn.f16.f32", instead("and.b32 {1}, {1}, -65536; {this}"))),
    # what the schedule of this run hides, and the checks do not
    mutant("no barrier after b is decoded", at("bar.sync", drop(), FIRST), case=FULL, noticed="Race"),
    mutant("no barrier before the sums meet", at("bar.sync", drop(), LAST), case=FULL, noticed="Race"),
    mutant("copies not waited for", at("cp.async.wait_group", drop()), case=FULL, noticed="Race"),
)  # fmt: skip
BLIND = (mutant("lanes of a warp not in step", at("bar.warp.sync", drop()), case=FULL, noticed=""),)
"""Not noticed: a warp's cp.async groups are waited for by the warp, and its lanes are not told apart there."""


def found(mutant: Mutant, arch: str) -> str:
    """What is reported when gemv() runs the mutant: "", "wrong", or the name of an error."""
    problem = make(mutant.case)
    return outcome(mutant.change, lambda: not gemv_problems.wrong(problem, problem.run()).any(), arch)


@pytest.mark.parametrize("arch", (*BOTH, *WIDE))
@pytest.mark.parametrize("case", [BLOCKED, FULL], ids=str)
def test_the_kernel_itself_passes(case: Case, arch: str) -> None:
    assert found(Mutant("none", None, case), arch) == ""


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mutant,arch", parameters(MUTANTS))
def test_mutants_are_noticed(mutant: Mutant, arch: str) -> None:
    assert found(mutant, arch) == mutant.noticed


@pytest.mark.parametrize("mutant,arch", parameters(BLIND))
def test_mutants_that_are_not_noticed(mutant: Mutant, arch: str) -> None:
    assert found(mutant, arch) == ""


def test_a_mutant_without_a_site_is_none() -> None:
    """A kernel that no longer has what is changed must not pass for one whose mutant is noticed."""
    with pytest.raises(AssertionError, match="no longer has what the mutant changes"):
        found(replace(MUTANTS[0], change=at("no.such.instruction", drop())), "sm_90a")
