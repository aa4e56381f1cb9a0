"""The kernels of the notebook on the asynchronous machine: right as they are, and each planted mistake is found."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "notebooks"))

import async_tools as tools
import cells

from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.reference import gemm_reference
from cute_nvfp4.sim import Schedule, Trace, adversarial
from cute_nvfp4.sim.observe.inspect_memory import Snapshots

Ring, ROWS = tools.machine().Ring, tools.machine().ROWS
tensor_tile = tools.tile()

MISTAKES = {
    "no wait for empty": (Ring(wait_empty=False), {"MbarrierMisuse", "Deadlock", "Race", "CopiesInFlight"}),
    "half of the releases": (Ring(stages=2, released_by=1), {"Race"}),
    "no proxy fence": (Ring(fence=False), {"MissingProxyFence"}),
    "too many bytes expected": (Ring(tx_bytes=2048), {"Deadlock"}),
    "too few bytes expected": (Ring(tx_bytes=512), {"Deadlock", "Race", "MbarrierMisuse"}),
}


def tiles(count: int) -> torch.Tensor:
    """Integers, so that sums are exact."""
    return torch.randint(-99, 99, (count * ROWS, 32), generator=torch.Generator().manual_seed(count)).float()


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_ring_is_right_under_every_schedule(stages: int) -> None:
    """No tile, fewer tiles than buffers, one round, and rounds that do not come out even."""
    for count, schedule in zip((0, 1, stages, 7, 9), adversarial(5, seed=stages)):
        found = tools.outcomes(Ring(stages), tiles(count), [schedule], checks=True)
        assert found == {"right": 1}, (count, schedule, found)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_found_under_every_schedule(name: str) -> None:
    ring, hazards = MISTAKES[name]
    assert set(tools.outcomes(ring, tiles(8), adversarial(6), checks=True)) <= hazards


def test_race_names_both_lines() -> None:
    text = str(tools.caught(lambda: tools.run_ring(Ring(released_by=1), tiles(8), checks=True)))
    source = Path(cells.FOLDER, "async_machine.py").read_text().splitlines()
    for part in ("total += ring[", "cute.copy(load, "):
        (line,) = (number for number, code in enumerate(source, 1) if part in code)
        assert f"async_machine.py:{line})" in text


def test_timeline_counts_what_is_in_flight() -> None:
    for stages in (1, 2, 4):
        trace = Trace()
        tools.run_ring(Ring(stages), tiles(8), schedule=Schedule(tma="lazy"), trace=trace)
        assert tools.statistics(trace)[1:] == (8, stages)
        assert [stage for stage, _ in tools.loads(trace.rows(), stages)] == [i % stages for i in range(8)]


def operand(seed: int) -> BlockScaledTensor:
    """Random elements; scales from 0.5 to 1.875, so that sums are exact in fp32."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (128, 128), generator=generator, dtype=torch.uint8)
    return BlockScaledTensor(data, torch.randint(0x30, 0x40, (128, 16), generator=generator, dtype=torch.uint8))


@pytest.mark.parametrize("schedule", adversarial(4), ids=str)
def test_tensor_tile_is_exact(schedule: Schedule) -> None:
    a, b = operand(1), operand(2)
    expected = gemm_reference(a, b, out_dtype=torch.float32)
    assert torch.equal(tools.run_tile(a, b, schedule=schedule, checks=True), expected)


def test_scales_are_where_the_notebook_says() -> None:
    a, b = operand(3), operand(4)
    seen = Snapshots(before="tcgen05.ld")
    tools.run_tile(a, b, trace=seen)
    tensor = seen.taken[0].tensor
    for at, matrix in ((tensor_tile.SFA, a), (tensor_tile.SFB, b)):
        words = tensor[:, at : at + 16].copy()
        bytes_ = words.view(np.uint8).reshape(128, 16, 4)
        for row in range(128):
            for block in range(16):
                for quarter in range(4):
                    lane, column = 32 * quarter + row % 32, 4 * (block // 4) + row // 32
                    assert bytes_[lane, column, block % 4] == matrix.scale[row, block]
        assert (tools.scales_in_tensor_memory(words) == matrix.scale.numpy()).all()
