"""Block-scaled rows of groups with a stack of weights that nobody packed, or prepared ones: decoded and multiplied."""

from __future__ import annotations

import itertools
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from support import backends
from support.mutants import Source, outcome, traced_with
from support.plain_operands import off, operand

from cute_nvfp4 import BlockScaledTensor, GroupedRows, grouped_gemm_contiguous, prepare_weight, quantize, simulating
from cute_nvfp4.kernels.dequantize import group_rows
from cute_nvfp4.kernels.dequantize.group_rows import DequantizeGroupRows
from cute_nvfp4.kernels.gemm.packed.rows import rows_of_weight
from cute_nvfp4.kernels.gemm.sm90.groups import PackedRows
from cute_nvfp4.ptx.memory import store_global
from cute_nvfp4.runtime.session import simulated_gpu
from cute_nvfp4.scale_layout import blocked_flat
from cute_nvfp4.sim import Race, adversarial

pytestmark = [pytest.mark.kernels("sm_90a"), pytest.mark.usefixtures("hopper")]
OFFSETS = [2, 133, 133, 140]
"""Rows of no group on both sides; a group of more than an atom of 128 rows, and one without rows."""


def stack(count: int, rows: int, k: int) -> BlockScaledTensor:
    parts = [operand(rows, k, 50 + seed) for seed in range(count)]
    scale = torch.cat([blocked_flat(part.blocked_scale()) for part in parts])
    return BlockScaledTensor(torch.stack([part.data for part in parts]), scale, parts[0].global_scale)


def rows_of(offsets: list[int], rows: int, k: int = 256) -> GroupedRows:
    return GroupedRows.of(operand(rows, k, 1), offsets)


def product(a: GroupedRows, b: BlockScaledTensor, **options) -> tuple[torch.Tensor, int]:
    """The result, NaN where nothing is written, and the status."""
    out = torch.full((a.rows, b.rows), float("nan"), device=backends.device())
    status = torch.full((1,), 7, dtype=torch.int32, device=backends.device())
    grouped_gemm_contiguous(a, b, out=out, status=status, **options)
    return out, status.item()


def exact(a: GroupedRows, b: BlockScaledTensor, **options) -> torch.Tensor:
    return grouped_gemm_contiguous(a, b, backend="reference", out_dtype=torch.float32, **options)


def test_a_stack_is_multiplied_as_it_lies() -> None:
    """One call decodes x and multiplies; alpha is one for each group, and the weights lie apart."""
    a, wide = rows_of(OFFSETS, 150), stack(3, 150, 256)
    data = torch.full((3, 160, 144), 0x77, dtype=torch.uint8, device=backends.device())
    data[:, :150, :128] = wide.data
    b = BlockScaledTensor(data[:, :150, :128], wide.scale, wide.global_scale)
    alpha = torch.tensor([0.5, 9.0, -2.0], device=backends.device())
    with simulating("sm_90a") as runs:
        out, status = product(a, b, alpha=alpha)
    assert len(runs) in (0, 2) and all(run.launch.programmatic for run in runs[-1:])
    want = exact(a, wide, alpha=alpha)
    assert status == 0 and off(out[2:140], want[2:140]) < 2.0**-20
    assert out[:2].isnan().all() and out[140:].isnan().all()


def test_many_groups() -> None:
    """More than a warp has lanes: the groups of a row are looked for in two windows."""
    offsets = [0, *itertools.accumulate((i * 5) % 4 for i in range(40))]
    a, b = rows_of(offsets, offsets[-1], 128), stack(40, 16, 128)
    with simulating("sm_90a"):
        out, status = product(a, b)
    assert status == 0 and off(out, exact(a, b)) < 2.0**-20


@pytest.mark.parametrize("offsets, wrong", [([0, 20, 5, 40], 3), ([-3, 20, 20, 41], 1), ([0, 20, 20, 41], 4)])
def test_wrong_offsets(offsets: list[int], wrong: int) -> None:
    """Offsets are used as the kernels of all architectures do, and the first wrong one is told."""
    plain, b = operand(40, 128, 1), stack(3, 24, 128)
    given = backends.place(torch.tensor(offsets, dtype=torch.int32))
    a = GroupedRows.of(plain, given)
    with simulating("sm_90a"):
        out, status = product(a, b)
    assert status == wrong and off(out, exact(a, b)) < 2.0**-20


def test_scales_that_are_not_there() -> None:
    """They are zeros, and the status says that they are missing."""
    a, b = rows_of([0, 30, 50], 50, 128), stack(2, 24, 128)
    short = GroupedRows(a.data, a.scale[: a.atom_bytes], a.offsets, a.global_scale)
    with simulating("sm_90a"):
        out, status = product(short, b)
    assert status == -1 and off(out[:30], exact(a, b)[:30]) < 2.0**-20 and not out[30:].any()


@pytest.mark.parametrize("x, weight", [("nvfp4", "nvfp4"), ("mxfp8", "mxfp4"), ("mxfp4", "mxfp8_e5m2")])
def test_prepared_weights(x: str, weight: str) -> None:
    """Rows are decoded by one launch, and the product starts meanwhile."""
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float16 if weight == "nvfp4" else torch.bfloat16
    a = quantize(backends.place(torch.randn(150, 160, generator=generator)), x, backend="reference")
    rows = GroupedRows.of(a, OFFSETS)
    b = prepare_weight(
        quantize(backends.place(torch.randn(3, 40, 160, generator=generator)), weight, backend="reference"), dtype=dtype
    )
    with simulating("sm_90a") as runs:
        out, status = product(rows, b)
    assert len(runs) in (0, 2) and status == 0
    assert off(out[2:140], exact(rows, b)[2:140]) < 2.0**-20


@pytest.mark.sim_only("runs schedules")
@pytest.mark.sweep(5)
@pytest.mark.parametrize("schedule", adversarial(20), ids=str)
def test_any_schedule_gives_the_same_bits(schedule) -> None:
    a, b = rows_of([0, 30, 31, 60], 60), stack(3, 40, 256)
    with simulating("sm_90a"):
        found, _ = product(a, b)
    with simulating("sm_90a", schedule=schedule, checks=True):
        assert torch.equal(product(a, b)[0], found)


def unordered(host: DequantizeGroupRows, group: Any, column: Any, words: list) -> None:
    store_global(group + 2 * column, words)


MUTANTS = (
    ("atoms of groups before not counted", Source(group_rows, "sums_to", lambda value: value)),
    ("rows of other quarters of an atom", Source(group_rows, "_CHUNK", 8)),
    ("groups of 64 rows have an atom", Source(group_rows, "ATOM_ROWS", 64)),
    ("x in the order of columns", Source(DequantizeGroupRows, "store_in_order", unordered)),
    ("another weight of the stack", Source(PackedRows, "rows", lambda self, group: of_first(self, group))),
)


def of_first(groups: PackedRows, group: Any) -> Any:
    return rows_of_weight(groups.config, groups.arguments.one.weight, group * 0)


@pytest.mark.sim_only("changes the source")
@pytest.mark.sweep(2)
@pytest.mark.parametrize("name, change", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_noticed(name: str, change: Source) -> None:
    a, b = rows_of([0, 140, 170, 182], 182, 128), stack(3, 40, 128)
    want = exact(a, b)
    assert outcome(change, lambda: off(product(a, b)[0], want) < 2.0**-20, "sm_90a") == "wrong"


@pytest.mark.sim_only("changes the source")
def test_the_product_waits_for_its_x() -> None:
    """It starts while the launch before it decodes x; if it did not wait, it would read what may not be there."""
    a, b = rows_of([0, 20, 40], 40, 128), stack(2, 40, 128)

    def found() -> torch.Tensor:
        with simulated_gpu("sm_90a", checks=True):
            offsets = a.offsets.cuda()
            there = GroupedRows(a.data.cuda(), a.scale.cuda(), offsets)
            weight = BlockScaledTensor(b.data.cuda(), b.scale.cuda(), None)
            return grouped_gemm_contiguous(there, weight, alpha=0.75**2, out_dtype=torch.float32).cpu()

    assert off(found(), exact(a, b)) < 2.0**-20
    with (
        traced_with(Source(cute.arch, "griddepcontrol_wait", lambda: None)),
        pytest.raises(Race, match="may still run"),
    ):
        found()
