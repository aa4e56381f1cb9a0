"""The suite's comparison notices broken quantization kernels: each mutant of their PTX differs or is reported."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import quantize_problems as problems
from support.mutants import (
    BLACKWELL,
    BOTH,
    HOPPER,
    Change,
    Mutant,
    Text,
    at,
    constant,
    f16,
    f32,
    instead,
    is_noticed,
    outcome,
    parameters,
)  # fmt: skip

from cute_nvfp4.kernels.quantize.block.scale_table import NONZERO, ODD

# under some scales there are ties that go down, and under none ties in both directions
LOWERED = 5.21875 / 1536


@dataclass(frozen=True)
class Case:
    """What is quantized, and how."""

    rule: str = "four_six_mse"
    format: str = "nvfp4"
    seed: int | None = None
    global_scale: float | str | None = 5.25 / 1536


def mutant(
    name: str, pattern: str | tuple[int, int], new: str = "", archs: tuple[str, ...] = BOTH, rule: str = "four_six_mse",
    *, count: int = 1, error: str = "", **case: Any,
) -> Mutant:  # fmt: skip
    """``pattern``: of text, which becomes ``new``; or two constants, of which the second replaces the first."""
    change = at("", constant(*pattern)) if isinstance(pattern, tuple) else Text(pattern, new, count)
    return Mutant(name, change, Case(rule, **case), archs, error)


MUTANTS = (
    # rounding
    mutant("rounded where it is cut", r"cvt\.rz\.f16x2", "cvt.rn.f16x2", HOPPER, count=0),
    mutant("half a unit more", (NONZERO, 0x01010101), "", HOPPER),
    mutant("products cut", r"mul\.rn\.f32", "mul.rz.f32", count=0),
    mutant("scale of four too small", (f32(1.5), f32(1.25)), "", BLACKWELL),
    mutant("scale not saturated", r"cvt\.rn\.satfinite\.e4m3x2", "cvt.rn.satfinite.e5m2x2", count=0),
    mutant("sixth not corrected", r"fma\.rn\.f32 (\$?\S+), r, 0f3E2AAAAB, q", r"add.rn.f32 \1, q, q", count=0),
    mutant("a ramp too early", (f32(-2.0), f32(-1.0)), "", HOPPER, rule="max"),
    # places
    mutant("two elements exchanged", (0x7351, 0x3751), "", HOPPER),
    mutant("even and odd exchanged", (0x70707070, 0x07070707), "", HOPPER),
    mutant("signs lost", (0x8E008E00, 0x0E000E00), "", HOPPER),
    mutant("bytes of scales exchanged", (0x6240, 0x6040)),
    mutant("scales of other lanes", r"shfl\.sync\.bfly\.b32(.*), 1, ", r"shfl.sync.bfly.b32\1, 3, ", count=0),
    mutant("data four bytes further", r"(st\.global\.v2\.b32 \[%rd\d+)\]", r"\1+4]", count=0, error="Misaligned"),
    mutant("scales one row further", r"(st\.global\.b32 \[%rd\d+)\]", r"\1+16]", count=0),
    # the table and 4/6
    mutant("entry of another scale", (0xFF0, 0x7E0)),
    mutant("ties not lowered", (f32(2.0**-14 * (1 - 2.0**-22)), f32(2.0**-14)), "", HOPPER, "max",
           global_scale=LOWERED),
    mutant("ties not raised", (ODD, 0), "", HOPPER),
    mutant("ties above zero not raised", (NONZERO, ODD), "selp", HOPPER, global_scale=2.0**-8),
    mutant("a scale that is cut off", (f32(464.0), f32(1e9)), "", HOPPER),
    mutant("a decision is always clear", (f32(2.0**-16 * 1.5), f32(-1.0))),
    mutant("a decision of mae is clear", (f32(2.0**-18), f32(-1.0)), rule="four_six_mae"),
    mutant("a decision of abs_max is clear", (f32(2.0**-18), f32(-1.0)), rule="four_six_abs_max"),
    mutant("not 1 on the diagonal", (f16(-1.0), 0xBB80)),
    mutant("zeros on the diagonal", (f16(-1.0) << 16, 0)),
    mutant("a square is lost", r"fma\.rn\.f32 (%r\d+), (%r\d+), \2, %r\d+", r"mul.rn.f32 \1, \2, \2"),
    mutant("six if four is better", r"setp\.gt\.f32 p, ", "setp.lt.f32 p, ", rule="four_six_mae", count=0),
    mutant("an undecided block's other half", r"shfl\.sync\.bfly\.b32(.*), 8, ", r"shfl.sync.bfly.b32\1, 4, ", count=0),
    mutant("elements alike decide", r"setp\.ne\.f16x2", "setp.eq.f16x2", rule="four_six_abs_max", count=0),
    # order
    mutant("no barrier after the table", r"bar\.sync\s+0;", "", error="Race"),
    mutant("copies not waited for", r"@p bra DONE;\s*bra WAIT;", "", count=0, error="Race"),
    mutant("fewer bytes awaited", r"(expect_tx\.shared::cta\.b64 _, \[%r\d+\]), %r\d+", r"\1, 512"),
    # other formats, the first pass, random numbers
    mutant("exponent one more", r"min\.u32", "max.u32", rule="rceil", format="mxfp4", global_scale=None, count=0),
    mutant("another element", "e4m3x2.f32", "e5m2x2.f32", rule="ceil", format="mxfp8_e4m3", global_scale=None, count=0),
    mutant("half another step", (1 << 19, 1 << 20), rule="even", format="mxfp8_e4m3", global_scale=None),
    mutant("a lane's maximum", r"redux\.sync\.max", "redux.sync.min", global_scale="auto", count=0),
    mutant("another round key", (0x9E3779B9, 12345), rule="max", seed=3),
    mutant("another bit of randomness", (f32(2.0**-24), f32(2.0**-23)), rule="max", seed=3),
)  # fmt: skip


@functools.cache
def _inputs(case: Case) -> list[torch.Tensor]:
    inputs = [problems.edges(128, 512).bfloat16()]
    if case.format == "nvfp4" and isinstance(case.global_scale, float):
        inputs.append(problems.near_ties(torch.bfloat16, case.global_scale))
        inputs.append(torch.randint(-9, 10, (128, 512), generator=torch.Generator().manual_seed(3)).bfloat16())
        if case.rule.startswith("four_six"):
            inputs += [problems.nearly_equal(case.rule, case.global_scale, torch.bfloat16, 64, n) for n in (32, 3)]
    return inputs


def found(case: Case, change: Change | None, arch: str) -> str:
    """What is reported of the kernels with ``change``: "", "wrong", or the name of an error."""
    scale = case.global_scale if not isinstance(case.global_scale, float) else torch.tensor(case.global_scale)
    options = {"global_scale": scale, "seed": case.seed}
    return outcome(
        change,
        lambda: not any(problems.differences(x, case.format, case.rule, **options) for x in _inputs(case)),
        arch,
    )


@functools.cache
def unchanged(case: Case, arch: str) -> str:
    """What is reported of the kernels themselves."""
    return found(case, None, arch)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("mutant,arch", parameters(MUTANTS))
def test_mutant_is_noticed(mutant: Mutant, arch: str) -> None:
    assert unchanged(mutant.case, arch) == ""
    assert is_noticed(found(mutant.case, mutant.change, arch), mutant)


@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize("rule", ["four_six_mse", "four_six_mae", "four_six_abs_max"])
def test_the_largest_scales_need_no_definition(rule: str, arch: str) -> None:
    """Under the global scale of rule ``max`` scales for the 4 are cut off at 448, and many are 448 for both. Kernels
    that never quantize a block by the definition give the same bits."""
    uniform = torch.rand(128, 512, generator=torch.Generator().manual_seed(5)) * 2 - 1
    x, options = uniform.bfloat16(), {"global_scale": torch.tensor(1 / 2690)}
    # errors of abs_max are often equal, but not these blocks'
    x = x.view(-1, 16)[: 1 if rule == "four_six_abs_max" else None].repeat(1 + 4095 * (rule == "four_six_abs_max"), 1)
    never = at("vote.sync.any", instead("setp.ne.u32 {0}, 0, 0;"))
    assert outcome(never, lambda: not problems.differences(x.view(128, 512), "nvfp4", rule, **options), arch) == ""
