"""Launches of a layer of experts that start while the launch before them still runs."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from support.moe_problems import Layer, Problem
from support.mutants import Source, traced_with

from cute_nvfp4 import simulating
from cute_nvfp4.kernels.gemm.packed.grouped_stream_config import GroupedStreamConfig
from cute_nvfp4.ops.moe import layer
from cute_nvfp4.ops.prepared_weight.rows import STREAM_GROUPS, fetched_by
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


def test_first_products_of_few_slots_ask_for_weights_of_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """If L2 has room for them. The simulator refuses to ask for bytes beyond a tensor's end."""
    problem, asked, product = Problem(LAYERS["few"]), [], layer.expert_product

    def noted(*given: Any, **options: Any) -> torch.Tensor:
        asked.append(options.get("fetched"))
        return product(*given, **options)

    monkeypatch.setattr(layer, "expert_product", noted)
    packed = problem.experts.down.packed
    for room, want in ((32 * packed[0].numel(), packed), (32 * packed[0].numel() - 1, None)):
        monkeypatch.setattr(layer, "FETCHED_BYTES", room)
        asked.clear()
        with simulating("sm_90a"):
            assert problem.right(problem.run())
        assert asked[0] is want and asked[1] is None
    for fetches in (False, True):
        assert ("prefetch.L2" in STREAM_GROUPS.compile(GroupedStreamConfig(fetches=fetches)).ptx) is fetches


@pytest.mark.parametrize("rows, num_bytes", [(200, 3 * 80), (64, 16), (130, 4096), (640, 4096 + 16)])
def test_all_tiles_of_rows_together_ask_for_a_whole_matrix(rows: int, num_bytes: int) -> None:
    config, packed = GroupedStreamConfig(slabs=4, warps_m=2), torch.empty(5, num_bytes, dtype=torch.uint8)
    found, tiles = fetched_by(SimpleNamespace(fetched=packed, b=SimpleNamespace(rows=rows)), config), -(-rows // 64)
    assert found.num_bytes == num_bytes and found.share % 16 == 0
    assert (found.share - 16) * tiles < num_bytes <= found.share * tiles
    # a lane's part: as the kernel computes it
    assert 32 * (found.share // 512 + 1) * 16 >= found.share
