"""Launches of a layer of experts that start while the launch before them still runs."""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
import pytest
import torch
from support.moe_problems import Layer, Problem
from support.mutants import Source, traced_with

from cute_nvfp4 import simulating
from cute_nvfp4.sim import Race

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.sim_only("launches that run at the same time")]

GPT_OSS = Layer(
    30, 4, 6, 96, 160, "mxfp4", "clamped_swiglu", biases=True, interleaved=True, elsewhere=2, ids=torch.int32
)
LAYERS = {
    "experts of gpt-oss": GPT_OSS,
    "for FP8": dataclasses.replace(GPT_OSS, fp8=True),
    "few": dataclasses.replace(GPT_OSS, tokens=8, experts=40),
}


@pytest.mark.parametrize("name", LAYERS)
def test_launches_that_start_early_wait_for_what_they_read(name: str) -> None:
    """All but the maps may start while the launch before them runs, and but rows quantized between the products."""
    problem = Problem(LAYERS[name])
    with simulating("sm_90a") as runs:
        problem.run()
    assert [i for i, x in enumerate(runs) if not x.launch.programmatic] == ([0, 3] if name == "for FP8" else [0])
    assert problem.right(problem.run_in_stream_order())


def test_one_that_does_not_wait_is_a_race() -> None:
    problem = Problem(GPT_OSS)
    without = Source(cute.arch, "griddepcontrol_wait", lambda: None)
    with traced_with(without), pytest.raises(Race, match="may still run"):
        problem.run_in_stream_order()
