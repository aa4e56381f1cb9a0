"""The suite's check notices a broken grouped kernel: each mutant gives a wrong result or a named error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Int32, Int64
from grouped_problems import Grouped, make
from mutants import WRONG, Mutant, Source, outcome

from cute_nvfp4.kernels.gemm import grouped_scheduler
from cute_nvfp4.kernels.gemm.sm100 import loader
from cute_nvfp4.kernels.gemm.sm100.output import Output

LIST = Grouped(((80, 128, 256), (129, 72, 544), (5, 264, 96)), tile_n=64, alphas="each", workers=2)
MANY = Grouped(LIST.sizes, maps="workspace", tile_n=64, workers=2)
DEALT = Grouped(tuple((m, 72, 288) for m in (80, 0, 130, 1, 140)), True, tile_n=64, alphas="each", workers=2)

GROUP_OF, SIZES_OF, ENTER = grouped_scheduler.group_of, grouped_scheduler.sizes_of, grouped_scheduler.enter
OUTPUT_OF, ALPHAS_OF, ORIGINS = grouped_scheduler.output_of, grouped_scheduler.alphas_of, loader.origins
LOCATE, SUMS_TO, TILES = grouped_scheduler.locate, grouped_scheduler.sums_to, grouped_scheduler.tiles


@cute.jit
def group_before(config: cutlass.Constexpr, table: Int32, unit: Int32):
    group = GROUP_OF(config, table, unit)
    return cutlass.max(group - 1, Int32(0))


@cute.jit
def group_one_unit_late(config: cutlass.Constexpr, table: Int32, unit: Int32):
    return GROUP_OF(config, table, cutlass.max(unit - 1, Int32(0)))


@cute.jit
def index_of_all_units(config: cutlass.Constexpr, groups: Any, unit: Int32):
    group, _, rest_m, rest_n, steps = LOCATE(config, groups, unit)
    return group, unit, rest_m, rest_n, steps


@cute.jit
def steps_of_the_first(config: cutlass.Constexpr, groups: Any, unit: Int32):
    group, index, rest_m, rest_n, _ = LOCATE(config, groups, unit)
    return group, index, rest_m, rest_n, SIZES_OF(config, groups, 0)[2]


@cute.jit
def tiles_swapped(config: cutlass.Constexpr, groups: Any, unit: Int32):
    group, index, rest_m, rest_n, steps = LOCATE(config, groups, unit)
    return group, index, rest_n, rest_m, steps


@cute.jit
def own_value(value: Int32):
    return value


def output_of_the_first(config: Any, groups: Any, group: Any, out: Output) -> Output:
    return OUTPUT_OF(config, groups, Int32(0), out)


def output_without_end(config: Any, groups: Any, group: Any, out: Output) -> Output:
    right = OUTPUT_OF(config, groups, group, out)
    return Output(right.pointer, right.m + 1, right.n, right.stride, Int64(0))


def alphas_of_the_first(config: Any, alpha: Any, factors: tuple, group: Any) -> list:
    return ALPHAS_OF(config, alpha, factors, Int32(0))


def data_of_the_first(config: Any, work: Any, batch: Any) -> tuple:
    (a, b), (wrong, _) = ORIGINS(config, work, batch), ORIGINS(config, work, Int32(0))
    a.maps = (wrong.maps[0], a.maps[1])
    return a, b


def scales_of_the_first(config: Any, work: Any, batch: Any) -> tuple:
    (a, b), (_, wrong) = ORIGINS(config, work, batch), ORIGINS(config, work, Int32(0))
    b.maps = (b.maps[0], wrong.maps[1])
    return a, b


def rows_from_zero(config: Any, work: Any, batch: Any) -> tuple:
    a, b = ORIGINS(config, work, batch)
    a.row = None
    return a, b


def scales_without_padding(config: Any, work: Any, batch: Any) -> tuple:
    a, b = ORIGINS(config, work, batch)
    a.atom = a.row // 128
    return a, b


def matrix_of_the_first(config: Any, work: Any, batch: Any) -> tuple:
    a, b = ORIGINS(config, work, batch)
    b.batch = Int32(0)
    return a, b


@cute.jit
def no_fence(config: cutlass.Constexpr, work: Any, group: Int32, unit: Int32):
    pass


_S = grouped_scheduler


def _mutant(name: str, module: Any, attribute: str, value: Callable, case: Grouped, noticed: str = WRONG) -> Mutant:
    return Mutant(name, Source(module, attribute, value), case, noticed=noticed)


MUTANTS = (
    _mutant("group before", _S, "group_of", group_before, LIST),
    _mutant("a group one unit late", _S, "group_of", group_one_unit_late, LIST),
    _mutant("a group one unit late, dealt", _S, "group_of", group_one_unit_late, DEALT),
    _mutant("index not from the group's start", _S, "locate", index_of_all_units, LIST),
    _mutant("steps of the first group", _S, "locate", steps_of_the_first, LIST),
    _mutant("tiles along M and N", _S, "locate", tiles_swapped, LIST),
    _mutant("units not summed", _S, "sums_to", own_value, LIST),
    _mutant("units not summed, dealt", _S, "sums_to", own_value, DEALT),
    _mutant("output of the first group", _S, "output_of", output_of_the_first, LIST, "Race"),
    _mutant("one row too many", _S, "output_of", output_without_end, LIST, "OutOfBounds"),
    _mutant("one row too many, dealt", _S, "output_of", output_without_end, DEALT, "Race"),
    _mutant("alpha of the first group", _S, "alphas_of", alphas_of_the_first, LIST),
    _mutant("alpha of the first group, dealt", _S, "alphas_of", alphas_of_the_first, DEALT),
    _mutant("data of the first group", loader, "origins", data_of_the_first, LIST),
    _mutant("scales of the first group", loader, "origins", scales_of_the_first, LIST),
    _mutant("data of the first group, workspace", loader, "origins", data_of_the_first, MANY),
    _mutant("rows from the first", loader, "origins", rows_from_zero, DEALT),
    _mutant("scales where the rows are", loader, "origins", scales_without_padding, DEALT),
    _mutant("the stack's first matrix", loader, "origins", matrix_of_the_first, DEALT),
)

BLIND = (
    # the simulator runs one kernel after the other, and asks for a fence only after changes of the same launch
    _mutant("no fence", loader, "acquire", no_fence, MANY, ""),
)


def found(change: Source | None, grouped: Grouped) -> str:
    """What is reported: "", "wrong", or the name of an error."""
    problem = make(grouped)

    def right() -> bool:
        results = problem.run()
        try:
            problem.check(results)
        except AssertionError:
            return False
        return True

    return outcome(change, right)


@pytest.mark.parametrize("grouped", [LIST, MANY, DEALT], ids=["list", "workspace", "contiguous"])
def test_the_kernel_itself_passes(grouped: Grouped) -> None:
    assert found(None, grouped) == ""


@pytest.mark.sweep(3)
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutants_are_noticed(mutant: Mutant) -> None:
    assert found(mutant.change, mutant.case) == mutant.noticed


@pytest.mark.parametrize("mutant", BLIND, ids=str)
def test_mutants_that_are_not_noticed(mutant: Mutant) -> None:
    assert found(mutant.change, mutant.case) == ""
