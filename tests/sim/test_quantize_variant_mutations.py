"""Broken kernels of rotations, tiles and transposed reads are noticed: each mutant's bits differ, or it is reported."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import quantize_problems as problems
import torch

from cute_nvfp4.errors import SimError
from cute_nvfp4.planning import quantize as planning
from cute_nvfp4.ptx.encode import HALF_UNIT
from cute_nvfp4.quantization.hadamard import Hadamard

_HOPPER, _BLACKWELL = ("sm_90a",), ("sm_100a",)
_ROTATED = {"hadamard": Hadamard.from_seed(1)}
_TILE = {"block_2d": True}
_TRANSPOSED = {"transposed": True}
_TILE_TRANSPOSED = _TILE | _TRANSPOSED
_NEVER = r"setp.ne.s32 \1, 0, 0;"
_UNCLEAR = r"setp\.leu\.f32 *\t?(%p\d+),[^;]*;"
# small ones: errors are often equal, or differ by a rounding
_INTEGERS = {"integers": True}
_FLOAT32 = {"dtype": torch.float32}
# one block of threads does everything
_ONE_BLOCK = {"one_block": True}


@dataclass(frozen=True)
class Mutant:
    """Replaces the first ``count`` (0: all) matches of ``pattern``; ``error``: what reports it, "" the comparison."""

    name: str
    pattern: str
    new: str
    options: dict = field(default_factory=dict)
    rule: str = "max"
    global_scale: float | str = 5.25 / 1536
    archs: tuple[str, ...] = _HOPPER
    count: int = 1
    error: str = ""


MUTANTS = (
    # rotations
    Mutant("a sign lost", r"xor\.b32", "or.b32", _ROTATED, archs=_HOPPER + _BLACKWELL),
    Mutant("another product", "1048576000", "1048576001", _ROTATED, count=0),
    Mutant("a difference for a sum", r"add\.rn\.f32", "sub.rn.f32", _ROTATED),
    Mutant("a sum for a difference", r"sub\.rn\.f32", "add.rn.f32", _ROTATED),
    Mutant("largest of x as it is", r"sub\.rn\.f32", "add.rn.f32", _ROTATED, global_scale="auto"),
    # tiles
    Mutant("scales of other lanes", r"shfl\.sync\.bfly\.b32(.*), 1, ", r"shfl.sync.bfly.b32\1, 4, ", _TILE),
    Mutant("scales of another tile", r"shfl\.sync\.idx\.b32(?![\s\S]*shfl\.sync\.idx)", "shfl.sync.up.b32", _TILE),
    Mutant("scales one row further", r"(st\.global\.v4\.b32 \[%rd\d+)\]", r"\1+16]", _TILE),
    Mutant("largest of the last rows", r"max\.NaN\.f32", "min.NaN.f32", _TILE),
    Mutant("sums over rows alone", r"add\.rn\.f32(?![\s\S]*add\.rn\.f32)", "min.f32", _TILE, "four_six_mse"),
    Mutant("six if four is better", r"setp\.lt\.f32", "setp.gt.f32", _TILE, "four_six_mae", count=0),
    Mutant("a row's errors subtracted", r"add\.rn\.f32", "sub.rn.f32", _TILE, "four_six_mse"),
    # 4/6 by sums in any order
    Mutant("a decision is always clear", _UNCLEAR, _NEVER, _TILE | _INTEGERS, "four_six_mse", 0.3, count=0),
    Mutant("the same of a block", _UNCLEAR, _NEVER, _INTEGERS | _FLOAT32, "four_six_mse", 0.3, count=0),
    Mutant("halves not rounded", str(HALF_UNIT), "0", _TILE, "four_six_mae", count=0),
    # transposed reads
    Mutant("halves of another column", r"\b21520\b", "30258", _TRANSPOSED, count=0),
    Mutant("codes of other rows", r"(st\.shared\.v2\.b32 \[%r\d+)\]", r"\1+128]", _TRANSPOSED, count=0),
    Mutant("pieces not exchanged back", r"xor\.b32(?![\s\S]*xor\.b32)", "or.b32", _TRANSPOSED),
    Mutant("scales of other rows", r"(st\.global\.v4\.b32 \[%rd\d+)\]", r"\1+16]", _TRANSPOSED),
    Mutant("no barrier before storing", r"bar\.sync\s+0;(?=[\s\S]*bar\.sync)(?![\s\S]*bar\.sync[\s\S]*bar\.sync)", "",
           _TRANSPOSED, error="Race"),
    Mutant("no barrier after storing", r"bar\.sync\s+0;(?![\s\S]*bar\.sync)", "",
           _TRANSPOSED | _ONE_BLOCK, error="Race"),
    Mutant("largest of half a tile", r"shfl\.sync\.bfly\.b32(.*), 4, ", r"shfl.sync.bfly.b32\1, 0, ", _TILE_TRANSPOSED),
    Mutant("largest of other tiles", r"shfl\.sync\.bfly\.b32(.*), 4, ", r"shfl.sync.bfly.b32\1, 8, ", _TILE_TRANSPOSED),
)  # fmt: skip


def _input(rule: str, integers: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    if integers:
        return torch.randint(-9, 10, (160, 512), generator=generator)
    return problems.edges(160, 512) if rule == "max" else torch.randn(160, 512, generator=generator)


def run(mutant: Mutant | None, case: Mutant, arch: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is reported of the kernels with the mutation: "", "different", or the name of an error."""
    monkeypatch.setenv("CUTE_NVFP4_ARCH", arch)
    found = problems.mutate(mutant, monkeypatch)
    scale = torch.tensor(case.global_scale) if isinstance(case.global_scale, float) else case.global_scale
    options = dict(case.options)
    x = _input(case.rule, options.pop("integers", False)).to(options.pop("dtype", torch.bfloat16))
    if options.pop("transposed", False):
        x = x.t()[:, :160]
    if options.pop("one_block", False):
        monkeypatch.setattr(planning, "_WAVES", 0)
    try:
        different = problems.differences(x, "nvfp4", case.rule, global_scale=scale, **options)
    except SimError as error:
        return type(error).__name__
    assert mutant is None or sum(found), f"nothing matches {mutant.pattern}"
    return "different" if different else ""


@pytest.mark.parametrize(
    "mutant,arch",
    [pytest.param(m, arch, id=f"{m.name}-{arch}".replace(" ", "_")) for m in MUTANTS for arch in m.archs],
)
def test_mutant_is_noticed(mutant: Mutant, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(None, mutant, arch, monkeypatch) == ""
    outcome = run(mutant, mutant, arch, monkeypatch)
    assert outcome if not mutant.error else mutant.error in outcome
