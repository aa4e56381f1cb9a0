"""The suite's comparison notices broken quantization kernels: each mutant of their PTX differs or is reported."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import quantize_problems as problems
import torch

from cute_nvfp4.errors import SimError

_HOPPER, _BLACKWELL = ("sm_90a",), ("sm_100a",)
_R = r"%r\d+"
_F = r"%f\d+"


# under some scales there are ties that go down, and under none ties in both directions
LOWERED = 5.21875 / 1536


@dataclass(frozen=True)
class Mutant:
    """Replaces the first ``count`` (0: all) matches of ``pattern``; ``error``: what reports it, "" the comparison."""

    name: str
    pattern: str
    new: str
    archs: tuple[str, ...] = _HOPPER + _BLACKWELL
    rule: str = "four_six_mse"
    format: str = "nvfp4"
    seed: int | None = None
    global_scale: float | str | None = 5.25 / 1536
    count: int = 1
    error: str = ""


MUTANTS = (
    # rounding
    Mutant("rounded where it is cut", r"cvt\.rz\.f16x2", "cvt.rn.f16x2", _HOPPER, count=0),
    Mutant("half a unit more", str(0x01000100), str(0x01010101), _HOPPER, count=0),
    Mutant("products cut", r"mul\.rn\.f32", "mul.rz.f32", count=0),
    Mutant("scale of four too small", r"\b1069547520\b", "1067450368", _BLACKWELL, count=0),
    Mutant("scale not saturated", r"cvt\.rn\.satfinite\.e4m3x2", "cvt.rn.satfinite.e5m2x2", count=0),
    Mutant("sixth not corrected", r"fma\.rn\.f32 (\$?\S+), r, 0f3E2AAAAB, q", r"add.rn.f32 \1, q, q", count=0),
    Mutant("a ramp too early", "0fC0000000", "0fBF800000", _HOPPER, rule="max", count=0),
    # places
    Mutant("two elements exchanged", "0x7351", "0x3751", _HOPPER, count=0),
    Mutant("even and odd exchanged", "0x70707070", "0x07070707", _HOPPER, count=0),
    Mutant("signs lost", str(0x8E008E00 - (1 << 32)), str(0x0E000E00), _HOPPER, count=0),
    Mutant("bytes of scales exchanged", r"\b25152\b", "24640", count=0),
    Mutant("scales of other lanes", r"shfl\.sync\.bfly\.b32(.*), 1, ", r"shfl.sync.bfly.b32\1, 3, ", count=0),
    Mutant("data four bytes further", r"(st\.global\.v2\.b32 \[%rd\d+)\]", r"\1+4]", count=0, error="Misaligned"),
    Mutant("scales one row further", r"(st\.global\.b32 \[%rd\d+)\]", r"\1+16]", count=0),
    # the table and 4/6
    Mutant("entry of another scale", r"\b4080\b", "2016", count=0),
    Mutant("ties not lowered", "0f387FFFFC", "0f38800000", _HOPPER, "max", global_scale=LOWERED, count=0),
    Mutant("ties not raised", r"\b65537\b", "0", _HOPPER, count=0),
    Mutant("ties above zero not raised", r"\b16777472\b", "0", _HOPPER, global_scale=2.0**-8, count=0),
    Mutant("a decision is always clear", r"\b935329792\b", "-1082130432", count=0),
    Mutant("a decision of mae is clear", r"\b914358272\b", "-1082130432", rule="four_six_mae", count=0),
    Mutant("a decision of abs_max is clear", r"\b914358272\b", "-1082130432", rule="four_six_abs_max", count=0),
    Mutant("not 1 on the diagonal", r"\b48128\b", "48000", count=0),
    Mutant("zeros on the diagonal", r"-1140850688", "0", count=0),
    Mutant("a square is lost", r"fma\.rn\.f32 (%r\d+), (%r\d+), \2, %r\d+", r"mul.rn.f32 \1, \2, \2"),
    Mutant("six if four is better", r"setp\.gt\.f32 p, ", "setp.lt.f32 p, ", rule="four_six_mae", count=0),
    Mutant("a doubtful block's other half", r"shfl\.sync\.bfly\.b32(.*), 8, ", r"shfl.sync.bfly.b32\1, 4, ", count=0),
    Mutant("elements alike decide", r"setp\.ne\.f16x2", "setp.eq.f16x2", rule="four_six_abs_max", count=0),
    # order
    Mutant("no barrier after the table", r"bar\.sync\s+0;", "", error="Race"),
    Mutant("copies not waited for", r"@p bra DONE;\s*bra WAIT;", "", count=0, error="Race"),
    Mutant("fewer bytes awaited", r"(expect_tx\.shared::cta\.b64 _, \[%r\d+\]), %r\d+", r"\1, 512"),
    # other formats, the first pass, random numbers
    Mutant("exponent one more", r"min\.u32", "max.u32", rule="rceil", format="mxfp4", global_scale=None, count=0),
    Mutant("another element", "e4m3x2.f32", "e5m2x2.f32", rule="ceil", format="mxfp8_e4m3", global_scale=None, count=0),
    Mutant("half another step", r"\b524288\b", "1048576", rule="even", format="mxfp8_e4m3", global_scale=None, count=0),
    Mutant("a lane's maximum", r"redux\.sync\.max", "redux.sync.min", global_scale="auto", count=0),
    Mutant("another round key", str(0x9E3779B9 - (1 << 32)), "12345", rule="max", seed=3, count=0),
    Mutant("another bit of randomness", str(0x33800000), str(0x34000000), rule="max", seed=3, count=0),
)  # fmt: skip


def run(mutant: Mutant | None, case: Mutant, arch: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is reported of the kernels with the mutation: "", "different", or the name of an error."""
    monkeypatch.setenv("CUTE_NVFP4_ARCH", arch)
    found = problems.mutate(mutant, monkeypatch)
    scale = case.global_scale if not isinstance(case.global_scale, float) else torch.tensor(case.global_scale)
    options = {"global_scale": scale, "seed": case.seed}
    inputs = [problems.edges(128, 512).bfloat16()]
    if case.format == "nvfp4" and isinstance(case.global_scale, float):
        inputs.append(problems.near_ties(torch.bfloat16, case.global_scale))
        inputs.append(torch.randint(-9, 10, (128, 512), generator=torch.Generator().manual_seed(3)).bfloat16())
        if case.rule.startswith("four_six"):
            inputs += [problems.nearly_equal(case.rule, case.global_scale, torch.bfloat16, 64, n) for n in (32, 3)]
    try:
        different = any(problems.differences(x, case.format, case.rule, **options) for x in inputs)
    except SimError as error:
        return type(error).__name__
    assert mutant is None or sum(found), f"nothing matches {mutant.pattern}"
    return "different" if different else ""


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "mutant,arch",
    [pytest.param(m, arch, id=f"{m.name}-{arch}".replace(" ", "_")) for m in MUTANTS for arch in m.archs],
)
def test_mutant_is_noticed(mutant: Mutant, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(None, mutant, arch, monkeypatch) == ""
    outcome = run(mutant, mutant, arch, monkeypatch)
    assert outcome if not mutant.error else mutant.error in outcome
