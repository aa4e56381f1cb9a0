"""Inputs that are wrong until the clock starts: on a CPU what is changed, on a GPU what that catches (test_cuda.py)."""

from __future__ import annotations

import pytest
import torch

from cute_nvfp4.harness.arena import Layout, Slot, tensor_at
from cute_nvfp4.harness.problem import Buffer, get_problem
from cute_nvfp4.harness.schema import load_task
from cute_nvfp4.harness.spoiled import PLACES, spoil

CALLS = 3


@pytest.mark.parametrize("name", ["nvfp4_gemv", "nvfp4_gemm", "nvfp4_dual_gemm", "nvfp4_group_gemm"])
def test_every_input_of_the_calls_is_wrong_and_then_right(name: str) -> None:
    problem = get_problem(name)
    cases = load_task(problem.folder / "task.yml").tests
    layout = min((Layout.of(problem, case) for case in cases), key=lambda x: x.nbytes)
    block = torch.randint(0, 256, (CALLS * layout.nbytes,), dtype=torch.uint8)
    before, starts = block.clone(), [call * layout.nbytes for call in range(CALLS)]
    spoiled = spoil(block, layout.inputs, starts[1:])
    for call, start in enumerate(starts):
        for slot in layout.buffers:
            first = start + slot.offset
            changed = int((block[first : first + slot.nbytes] != before[first : first + slot.nbytes]).sum())
            # places are drawn, and some may be the same
            least, most = (PLACES // 2, PLACES) if call and not slot.buffer.output else (0, 0)
            assert least <= changed <= most, (call, slot)
    spoiled.mend()
    assert torch.equal(block, before)
    assert not torch.equal(spoiled.places, spoil(block, layout.inputs, starts[1:]).places)


def test_numbers_change_their_signs_and_indices_stay() -> None:
    changes = {"float32": -3, "float16": -3, "bfloat16": -3, "float64": -3, "uint8": 11}
    for dtype in (*changes, "int64", "int32", "bool"):
        x = torch.full((5, 20), 3).to(getattr(torch, dtype))
        slot = Slot(Buffer("x", (5, 20), dtype), 16, x.nbytes)
        block = torch.cat([torch.zeros(16, dtype=torch.uint8), x.view(-1).view(torch.uint8)])
        spoil(block, [slot], [0])
        found = set(tensor_at(block, slot).double().view(-1).tolist())
        assert found == {float(x[0, 0]), float(changes.get(dtype, x[0, 0]))} and not block[:16].any(), dtype
