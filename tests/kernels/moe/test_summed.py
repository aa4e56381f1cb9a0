"""The second product of one token's experts with their sum: against float64, schedules, early starts, mutants."""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
import pytest
import torch
from support import backends
from support.moe_problems import Layer, Problem
from support.mutants import Mutant, Source, at, drop, is_noticed, operand, outcome, traced_with

from cute_nvfp4 import simulating
from cute_nvfp4.kernels.moe.summed_config import SummedConfig, can_sum
from cute_nvfp4.planning.summed import sums_with_product
from cute_nvfp4.sim import Race, adversarial
from cute_nvfp4.target import ARCHITECTURES

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.parametrize("arch", ["sm_90a"], indirect=True)]

GPT_OSS = Layer(
    1, 4, 32, 96, 288, "mxfp4", "clamped_swiglu", biases=True, interleaved=True, elsewhere=2, ids=torch.int32
)
LAYERS = {
    "gpt-oss": GPT_OSS,
    "Qwen3": Layer(1, 8, 40, 160, 96, listed=True),
    "an expert chosen six times": Layer(1, 6, 12, 48, 464, activation="relu2", routing="same", dtype=torch.float16),
    "elsewhere": Layer(1, 3, 200, 32, 32, elsewhere=300, weights=torch.bfloat16),
    "one expert": Layer(1, 1, 1, 32, 1040),
}


def launches(problem: Problem, **options: object) -> tuple[list[str], torch.Tensor]:
    with simulating("sm_90a") as runs:
        out = problem.run(**options)
    return [x.name for x in runs], out


@pytest.mark.parametrize("name", LAYERS)
def test_one_token(name: str, arch: str, poisoned: None) -> None:
    problem = Problem(LAYERS[name])
    out = problem.run(backend=backends.backend())
    assert problem.right(out) and problem.right(problem.run(backend="reference"))
    assert torch.equal(problem.run(backend=backends.backend()), out)


@pytest.mark.sim_only("counts launches")
def test_two_launches(arch: str) -> None:
    """Of experts in 16 bits; more tokens and rows for FP8 take three."""
    layer = LAYERS["Qwen3"]
    assert launches(Problem(layer))[0] == ["stream_groups", "moe_summed"]
    for other in (dataclasses.replace(layer, tokens=2), dataclasses.replace(layer, fp8=True)):
        assert launches(Problem(other))[0] == ["stream_groups", "stream_groups", "moe_combine"]


def test_where_it_pays(arch: str) -> None:
    """Where all weights fit into the registers of as many CTAs as there are multiprocessors: Qwen3's, not gpt-oss's."""
    assert sums_with_product(2048, 96, 132) and not sums_with_product(2048, 97, 132)
    assert not sums_with_product(2880, 96, 132) and not sums_with_product(2048, 96, 127)


def test_a_shared_row_is_one_more_summand(arch: str, poisoned: None) -> None:
    """Of a token that chose nobody here the only one."""
    problem = Problem(GPT_OSS)
    shared = torch.randn_like(problem.x) * 8
    out = problem.run(backend=backends.backend(), shared=shared)
    assert problem.right((out.double() - shared.double()).to(torch.float32), roundings=64)
    problem.ids.fill_(-1)
    assert torch.equal(problem.run(backend=backends.backend(), shared=shared), shared)
    assert not problem.run(backend=backends.backend()).any()


@pytest.mark.sim_only("runs schedules")
@pytest.mark.sweep(4, draws=("index",))
@pytest.mark.parametrize("index", range(20))
def test_any_schedule_gives_the_same_bits(index: int, arch: str) -> None:
    problem = Problem(GPT_OSS)
    out = launches(problem)[1]
    with simulating("sm_90a", schedule=adversarial(20)[index], checks=True):
        assert problem.right(out) and torch.equal(problem.run(), out)


@pytest.mark.sim_only("launches that run at the same time")
def test_it_starts_early_and_waits_for_its_rows(arch: str) -> None:
    problem = Problem(GPT_OSS)
    assert problem.right(problem.run_in_stream_order())
    without = Source(cute.arch, "griddepcontrol_wait", lambda: None)
    with traced_with(without), pytest.raises(Race, match="may still run"):
        problem.run_in_stream_order()


MUTANTS = (
    Mutant("rows not waited for", at("cp.async.wait_group", drop()), "moe_summed", noticed="Race"),
    Mutant("sums of warps not waited for", at("bar.sync", drop(), slice(-1, None)), "moe_summed", noticed="Race"),
    Mutant("each expert another's", at("shfl.sync.idx", operand(2, "0"), slice(-1, None)), "moe_summed", noticed=""),
    Mutant("rows beyond the last of K", at("cp.async.cg", operand(3, "16")), "moe_summed", noticed=""),
)


@pytest.mark.sim_only("changes PTX")
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_noticed(mutant: Mutant, arch: str) -> None:
    problem = Problem(GPT_OSS)
    assert outcome(None, lambda: problem.right(problem.run()), "sm_90a") == ""
    assert is_noticed(outcome(mutant.change, lambda: problem.right(problem.run()), "sm_90a", mutant.case), mutant)


def test_what_no_kernel_is_made_of(arch: str) -> None:
    options = {"ids": "int64", "weights": "float32", "biased": False, "shared": False, "factors": 0}
    good = SummedConfig("bfloat16", "nvfp4", top=8, warps=16, tiles=6, arch=ARCHITECTURES[arch], **options)
    assert can_sum(good) == ""
    for change, words in (
        ({"top": 33}, "1 to 32"),
        ({"packing": "mxfp8"}, "packed ones of 4 bits"),
        ({"warps": 17}, "1 to 16, and 1 to 8"),
    ):
        assert words in can_sum(dataclasses.replace(good, **change))
