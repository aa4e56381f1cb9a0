"""Broken kernels of rotations, tiles and transposed reads are noticed: each mutant's bits differ, or it is reported."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support import quantize_problems as problems
from support.mutants import BOTH, HOPPER, Mutant, Text, at, constant, f32, is_noticed, outcome, parameters, plan_anew

from cute_nvfp4.planning import quantize as planning
from cute_nvfp4.ptx.encode import HALF_UNIT
from cute_nvfp4.quantization.hadamard import Hadamard

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

# each compiles a kernel of its own; test_quantize_mutations has the same walks
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """What is quantized, and how; ``options``: of ``quantize``, and of the input."""

    options: dict
    rule: str
    global_scale: float | str


def mutant(
    name: str, pattern: str | tuple[int, int], new: str, options: dict, rule: str = "max",
    global_scale: float | str = 5.25 / 1536, archs: tuple[str, ...] = HOPPER, count: int = 1, error: str = "",
) -> Mutant:  # fmt: skip
    """``pattern``: of text, which becomes ``new``; or two constants, of which the second replaces the first."""
    change = at("", constant(*pattern)) if isinstance(pattern, tuple) else Text(pattern, new, count)
    return Mutant(name, change, Case(options, rule, global_scale), archs, error)


MUTANTS = (
    # rotations
    mutant("a sign lost", r"xor\.b32", "or.b32", _ROTATED, archs=BOTH),
    mutant("another product", (f32(0.25), f32(0.25) + 1), "", _ROTATED),
    mutant("a difference for a sum", r"add\.rn\.f32", "sub.rn.f32", _ROTATED),
    mutant("a sum for a difference", r"sub\.rn\.f32", "add.rn.f32", _ROTATED),
    # the first 64 are those of a chunk, before anything is quantized
    mutant("largest of x as it is", r"sub\.rn\.f32", "add.rn.f32", _ROTATED, global_scale="auto", count=64),
    # tiles
    mutant("scales of other lanes", r"shfl\.sync\.bfly\.b32(.*), 1, ", r"shfl.sync.bfly.b32\1, 4, ", _TILE),
    mutant("scales of another tile", r"shfl\.sync\.idx\.b32(?![\s\S]*shfl\.sync\.idx)", "shfl.sync.up.b32", _TILE),
    mutant("scales one row further", r"(st\.global\.v4\.b32 \[%rd\d+)\]", r"\1+16]", _TILE),
    mutant("largest of the last rows", r"max\.NaN\.f32", "min.NaN.f32", _TILE),
    mutant("sums over rows alone", r"add\.rn\.f32(?![\s\S]*add\.rn\.f32)", "min.f32", _TILE, "four_six_mse"),
    mutant("six if four is better", r"setp\.lt\.f32", "setp.gt.f32", _TILE, "four_six_mae", count=0),
    mutant("a row's errors subtracted", r"add\.rn\.f32", "sub.rn.f32", _TILE, "four_six_mse"),
    # 4/6 by sums in any order
    mutant("a decision is always clear", _UNCLEAR, _NEVER, _TILE | _INTEGERS, "four_six_mse", 0.3, count=0),
    mutant("the same of a block", _UNCLEAR, _NEVER, _INTEGERS | _FLOAT32, "four_six_mse", 0.3, count=0),
    mutant("halves not rounded", (HALF_UNIT, 0), "", _TILE, "four_six_mae"),
    # transposed reads
    mutant("halves of another column", (0x5410, 0x7632), "", _TRANSPOSED),
    mutant("codes of other rows", r"(st\.shared\.v2\.b32 \[%r\d+)\]", r"\1+128]", _TRANSPOSED, count=0),
    mutant("pieces not exchanged back", r"xor\.b32(?![\s\S]*xor\.b32)", "or.b32", _TRANSPOSED),
    mutant("scales of other rows", r"(st\.global\.v4\.b32 \[%rd\d+)\]", r"\1+16]", _TRANSPOSED),
    mutant("no barrier before storing", r"bar\.sync\s+0;(?=[\s\S]*bar\.sync)(?![\s\S]*bar\.sync[\s\S]*bar\.sync)", "",
           _TRANSPOSED, error="Race"),
    mutant("no barrier after storing", r"bar\.sync\s+0;(?![\s\S]*bar\.sync)", "",
           _TRANSPOSED | _ONE_BLOCK, error="Race"),
    mutant("largest of half a tile", r"shfl\.sync\.bfly\.b32(.*), 4, ", r"shfl.sync.bfly.b32\1, 0, ", _TILE_TRANSPOSED),
    mutant("largest of other tiles", r"shfl\.sync\.bfly\.b32(.*), 4, ", r"shfl.sync.bfly.b32\1, 8, ", _TILE_TRANSPOSED),
)  # fmt: skip


def _input(rule: str, integers: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    if integers:
        return torch.randint(-9, 10, (160, 512), generator=generator)
    return problems.edges(160, 512) if rule == "max" else torch.randn(160, 512, generator=generator)


def found(mutant: Mutant, changed: bool, arch: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is reported of the kernels with the mutation: "", "wrong", or the name of an error."""
    case = mutant.case
    scale = torch.tensor(case.global_scale) if isinstance(case.global_scale, float) else case.global_scale
    options = dict(case.options)
    x = _input(case.rule, options.pop("integers", False)).to(options.pop("dtype", torch.bfloat16))
    if options.pop("transposed", False):
        x = x.t()[:, :160]
    if options.pop("one_block", False):
        monkeypatch.setattr(planning, "_WAVES", 0)
        plan_anew(monkeypatch)
    return outcome(
        mutant.change if changed else None,
        lambda: not problems.differences(x, "nvfp4", case.rule, global_scale=scale, **options),
        arch,
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mutant,arch", parameters(MUTANTS))
def test_mutant_is_noticed(mutant: Mutant, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(mutant, False, arch, monkeypatch) == ""
    assert is_noticed(found(mutant, True, arch, monkeypatch), mutant)
