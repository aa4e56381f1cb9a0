"""The suite's comparison notices broken kernels of rmsnorm_quantize and silu_mul_quantize."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.fused_problems import check_rmsnorm, check_silu_mul, random
from support.mutants import (
    FIRST,
    LAST,
    Mutant,
    Text,
    at,
    become,
    constant,
    drop,
    f32,
    is_noticed,
    operand,
    outcome,
    parameters,
)

from cute_nvfp4.ops import rmsnorm_quantize as rmsnorm_module
from cute_nvfp4.planning.fused import choose_rmsnorm

RMSNORM, SILU = "rmsnorm_quantize", "silu_mul_quantize"


def mutant(name: str, change: object, case: str = RMSNORM, noticed: str = "wrong") -> Mutant:
    return Mutant(name, change, case, noticed=noticed)


MUTANTS = (
    mutant("another root", at("rsqrt.approx", become("rsqrt", "rcp"))),
    mutant("sums of sixteen lanes", at("shfl.sync.bfly", operand(2, "8"), slice(4, 5))),
    mutant("warps' sums of other lanes", at("shfl.sync.bfly", operand(2, "2"), slice(5, 6))),
    mutant("warps do not wait", at("bar.sync", drop(), LAST), noticed="Race"),
    mutant("one place for all rows' sums", at("xor.b32", operand(2, "0"), FIRST), noticed="Race"),
    mutant("a residual cut", at("cvt.rn.bf16x2", become("rn", "rz"), FIRST)),
    mutant("a value cut", at("cvt.rn.bf16x2", become("rn", "rz"), LAST)),
    mutant("scales of other lanes", at("shfl.sync.bfly", operand(2, "4"), LAST)),
    mutant("codes further", Text(r"(st\.global\.v2\.b32 \[%rd\d+)\]", r"\1+8]"), noticed="OutOfBounds"),
    mutant("not e", at("", constant(f32(-math.log2(math.e)), f32(-1.4))), SILU),
    mutant("e to the other sign", at("", constant(f32(-math.log2(math.e)), f32(math.log2(math.e)))), SILU),
    mutant("one input awaited", Text(r"(expect_tx\S+ _, \[%r\d+\]), %r\d+", r"\1, 1024"), SILU, "MbarrierMisuse"),
    mutant("an activation cut", at("cvt.rn.bf16x2", become("rn", "rz"), FIRST), SILU),
    mutant("copies not waited for", Text(r"@p bra DONE;\s*bra WAIT;", ""), SILU, "Race"),
)  # fmt: skip


def found(case: str, change: object, arch: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is reported of the kernels with ``change``: "", "wrong", or the name of an error."""
    # a CTA takes several rows
    monkeypatch.setattr(rmsnorm_module, "choose_rmsnorm", lambda *args: replace(choose_rmsnorm(*args), ctas=2))
    x, other, scale = random(6, 1024, torch.bfloat16), random(6, 1024, torch.bfloat16, 1), torch.tensor(0.004)

    def right() -> bool:
        try:
            if case == SILU:
                check_silu_mul(x, other, global_scale=scale)
            else:
                check_rmsnorm(x, other[0], other, global_scale=scale, scale_layout="rowmajor")
        except AssertionError:
            return False
        return True

    return outcome(change, right, arch, case)


@pytest.mark.sweep(10)
@pytest.mark.parametrize("mutant,arch", parameters(MUTANTS))
def test_mutant_is_noticed(mutant: Mutant, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(mutant.case, None, arch, monkeypatch) == ""
    assert is_noticed(found(mutant.case, mutant.change, arch, monkeypatch), mutant)
