"""Products that start while the launch before them still runs, and ask L2 for their weights meanwhile."""

from __future__ import annotations

from dataclasses import replace

import cutlass.cute as cute
import pytest
import torch
from support.mutants import Source, traced_with
from support.packed_problems import operand

from cute_nvfp4 import gated_gemm, gemm, prepare_weight, quantize, simulating
from cute_nvfp4.kernels.gemm.packed.grouped_stream_config import GroupedStreamConfig
from cute_nvfp4.kernels.gemm.packed.grouped_stream_config import can_implement_groups as can_stream_groups
from cute_nvfp4.kernels.gemm.packed.stream_config import StreamConfig
from cute_nvfp4.kernels.gemm.sm90.config import WgmmaConfig
from cute_nvfp4.kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig, can_implement_groups
from cute_nvfp4.kernels.gemm.sm90.schedules import OverlappedSums, SharedTiles, WholeTiles
from cute_nvfp4.planning.packed import PackedPlan
from cute_nvfp4.runtime.session import simulated_gpu
from cute_nvfp4.sim import Race

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.sim_only("launches that run at the same time")]

HALF = {"slabs": 4, "warps_m": 2, "warps_k": 2, "stages": 8, "programmatic": "weights"}
EARLY = {"programmatic": "weights"}
PLANS = {
    "wgmma": (20, PackedPlan(WgmmaConfig(tile_n=32, schedule=WholeTiles(), **EARLY), 2)),
    "wgmma, split along K": (20, PackedPlan(WgmmaConfig(tile_n=32, schedule=SharedTiles(split_k=2), **EARLY), 4)),
    "wgmma, overlapped": (
        20,
        PackedPlan(WgmmaConfig(tile_n=64, schedule=OverlappedSums(), stage_tiles=1, **EARLY), 4),
    ),
    "wgmma, cut tiles": (20, PackedPlan(WgmmaConfig(tile_n=32, **EARLY), 3)),
    "stream": (3, PackedPlan(StreamConfig(**HALF), 4)),
    "stream, cut tiles": (3, PackedPlan(StreamConfig(**HALF), 3)),
}
SIZE = 512


def chain(name: str, count: int = 3) -> torch.Tensor:
    """|difference| / |wanted| of ``count`` products, one after the other, each of what the one before gave."""
    rows, plan = PLANS[name]
    generator = torch.Generator().manual_seed(3)
    weights = [operand((SIZE, SIZE), generator, 2.0**-11) for _ in range(count)]
    x = torch.randn(rows, SIZE, generator=generator).bfloat16()
    want = x
    for weight in weights:
        want = (want.double() @ weight.dequantize(torch.float64).T).bfloat16()
    with simulated_gpu("sm_90a", checks=True):
        prepared = [prepare_weight(replace(w, **moved(w))) for w in weights]
        y = x.cuda()
        for weight in prepared:
            y = gemm(y, weight, config=plan)
        y = y.cpu()
    return (y.double() - want.double()).norm() / want.double().norm()


def moved(weight) -> dict[str, torch.Tensor]:
    return {name: getattr(weight, name).cuda() for name in ("data", "scale", "global_scale")}


@pytest.mark.parametrize("name", PLANS)
def test_a_chain_gives_what_its_products_give(name: str) -> None:
    """No product reads what the one before writes before it may, nor writes what that reads."""
    assert chain(name) < 2.0**-7


@pytest.mark.parametrize("name", ["wgmma", "wgmma, overlapped", "stream"])
def test_one_that_does_not_wait_is_a_race(name: str) -> None:
    with (
        traced_with(Source(cute.arch, "griddepcontrol_wait", lambda: None)),
        pytest.raises(Race, match="may still run"),
    ):
        chain(name)


@pytest.mark.parametrize("name, tiling", [("half tiles", {"warpgroups": 3}), ("packed", {})])
def test_no_more_is_asked_for_than_is_copied(name: str, tiling: dict) -> None:
    """Bytes that are asked for beyond a weight's end would be an error of the simulator."""
    plan = PackedPlan(WgmmaConfig(tile_n=32, stage_tiles=1, schedule=WholeTiles(), programmatic="weights", **tiling), 2)
    generator = torch.Generator().manual_seed(7)
    x, weight = torch.randn(20, 176, generator=generator).bfloat16(), operand((136, 176), generator, 2.0**-11)
    want = gemm(x, prepare_weight(weight), backend="reference")
    with simulating("sm_90a", checks=True):
        y = gemm(x, prepare_weight(weight), config=plan)
    assert (y.double() - want.double()).norm() < 2.0**-7 * want.double().norm()


def test_gate_and_up() -> None:
    generator = torch.Generator().manual_seed(4)
    gate, up = (operand((SIZE, SIZE), generator, 2.0**-11) for _ in range(2))
    x = torch.randn(20, SIZE, generator=generator).bfloat16()
    want = gated_gemm(x, prepare_weight(gate, up), backend="reference")
    with simulated_gpu("sm_90a", checks=True):
        weight = prepare_weight(replace(gate, **moved(gate)), replace(up, **moved(up)))
        y = gated_gemm(x.cuda() * 1, weight, config=PLANS["wgmma"][1]).cpu()
    assert (y.double() - want.double()).norm() < 2.0**-7 * want.double().norm()


def test_kernels_of_groups_have_other_ways() -> None:
    config = GroupedWgmmaConfig(tile_n=64, programmatic="weights")
    for reason in (can_implement_groups(config), can_stream_groups(GroupedStreamConfig(programmatic="weights"))):
        assert "programmatic: got 'weights'" in reason


@pytest.mark.parametrize("format, dtype", [("nvfp4", torch.float16), ("mxfp8", torch.bfloat16)])
def test_block_scaled_rows_are_decoded_meanwhile(format: str, dtype: torch.dtype) -> None:
    """More rows than are streamed: a launch before decodes them, and the product waits for that where it reads them."""
    generator = torch.Generator().manual_seed(5)
    x = quantize(torch.randn(33, 256, generator=generator), format, global_scale=None, backend="reference")
    w = quantize(torch.randn(72, 256, generator=generator), "nvfp4", global_scale=None, backend="reference")
    want = gemm(x, prepare_weight(w, dtype=dtype), backend="reference", out_dtype=torch.float32)

    def found() -> torch.Tensor:
        with simulated_gpu("sm_90a", checks=True):
            there = [replace(one, data=one.data.cuda(), scale=one.scale.cuda()) for one in (x, w)]
            return gemm(there[0], prepare_weight(there[1], dtype=dtype), out_dtype=torch.float32).cpu()

    assert (found() - want).norm() < want.norm() * 2.0**-20
    with (
        traced_with(Source(cute.arch, "griddepcontrol_wait", lambda: None)),
        pytest.raises(Race, match="may still run"),
    ):
        found()
