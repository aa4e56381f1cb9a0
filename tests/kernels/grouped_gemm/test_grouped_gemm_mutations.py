"""The suite's check notices a broken grouped kernel: each mutant gives a wrong result or a named error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import pytest
from cutlass import Int32
from support.grouped_problems import Grouped, make
from support.mutants import WRONG, Mutant, Source, outcome

from cute_nvfp4.kernels.gemm import group_source, grouped_scheduler
from cute_nvfp4.kernels.gemm.group_source import ContiguousRows, GroupSource, WorkspaceMaps
from cute_nvfp4.kernels.gemm.grouped_scheduler import GroupedScheduler, TilesOfGroup
from cute_nvfp4.kernels.gemm.sm100 import output

LIST = Grouped(((80, 128, 256), (129, 72, 544), (5, 264, 96)), tile_n=64, alphas="each", workers=2)
MANY = Grouped(LIST.sizes, maps="workspace", tile_n=64, workers=2)
DEALT = Grouped(tuple((m, 72, 288) for m in (80, 0, 130, 1, 140)), True, tile_n=64, alphas="each", workers=2)

GROUP_OF, LOCATE, SUMS_TO = grouped_scheduler.group_of, GroupedScheduler.locate, group_source.sums_to


def group_before(table: Any, cursor: Int32) -> Int32:
    return cutlass.max(GROUP_OF(table, cursor) - 1, Int32(0))


def group_one_tile_late(table: Any, cursor: Int32) -> Int32:
    return GROUP_OF(table, cutlass.max(cursor - 1, Int32(0)))


def index_of_all_tiles(self: Any, cursor: Int32) -> Any:
    return LOCATE(self, cursor)._replace(index=cursor)


def k_tiles_of_the_first(self: Any, cursor: Int32) -> Any:
    return LOCATE(self, cursor)._replace(k_tiles=self.source.sizes(0).k_tiles)


def tiles_swapped(self: Any, cursor: Int32) -> Any:
    found = LOCATE(self, cursor)
    return found._replace(tiles=TilesOfGroup(found.tiles.rest_n, found.tiles.rest_m))


def own_value(value: Int32) -> Int32:
    return value


def output_of_the_first(right: Callable) -> Callable:
    return lambda self, group: right(self, Int32(0))


def output_without_end(right: Callable) -> Callable:
    def output(self: Any, group: Int32) -> Any:
        found = right(self, group)
        return found._replace(m=found.m + 1)

    return output


def factor_of_the_first(right: Callable) -> Callable:
    return lambda alpha, factors, group: right(alpha, factors, Int32(0))


def data_of_the_first(right: Callable) -> Callable:
    def origins(self: Any, group: Int32) -> Any:
        found = right(self, group)
        return found._replace(a=found.a._replace(data_map=right(self, Int32(0)).a.data_map))

    return origins


def scales_of_the_first(right: Callable) -> Callable:
    def origins(self: Any, group: Int32) -> Any:
        found = right(self, group)
        return found._replace(b=found.b._replace(scale_map=right(self, Int32(0)).b.scale_map))

    return origins


def changed_origin(side: str, **change: Any) -> Callable:
    """``change``: fields of the origin of A or B, as functions of it."""

    def mutant(right: Callable) -> Callable:
        def origins(self: Any, group: Int32) -> Any:
            found = right(self, group)
            one = getattr(found, side)
            return found._replace(**{side: one._replace(**{name: new(one) for name, new in change.items()})})

        return origins

    return mutant


rows_from_zero = changed_origin("a", row=lambda a: None)
scales_without_padding = changed_origin("a", atom=lambda a: a.row // 128)
matrix_of_the_first = changed_origin("b", batch=lambda b: Int32(0))


def no_fence(self: Any, group: Int32, cursor: Int32, workers: Int32) -> None:
    pass


def no_wait(self: Any) -> None:
    pass


def mutant(name: str, place: Any, attribute: str, value: Callable, case: Grouped, noticed: str = WRONG) -> Mutant:
    return Mutant(name, Source(place, attribute, value), case, noticed=noticed)


def made(name: str, place: Any, attribute: str, make: Callable, case: Grouped, noticed: str = WRONG) -> Mutant:
    """A mutant that is made of what it replaces."""
    return mutant(name, place, attribute, make(getattr(place, attribute)), case, noticed)


MUTANTS = (
    mutant("group before", grouped_scheduler, "group_of", group_before, LIST),
    mutant("a group one tile late", grouped_scheduler, "group_of", group_one_tile_late, LIST),
    mutant("a group one tile late, dealt", grouped_scheduler, "group_of", group_one_tile_late, DEALT),
    mutant("halves of rows not exchanged", output, "exchanged", lambda left, right, odd: (left, right), LIST),
    mutant("index not from the group's start", GroupedScheduler, "locate", index_of_all_tiles, LIST),
    mutant("k-tiles of the first group", GroupedScheduler, "locate", k_tiles_of_the_first, LIST),
    mutant("tiles along M and N", GroupedScheduler, "locate", tiles_swapped, LIST),
    mutant("tiles not summed", group_source, "sums_to", own_value, LIST),
    mutant("tiles not summed, dealt", group_source, "sums_to", own_value, DEALT),
    made("output of the first group", GroupSource, "output", output_of_the_first, LIST, "Race"),
    made("one row too many", GroupSource, "output", output_without_end, LIST, "OutOfBounds"),
    made("one row too many, dealt", ContiguousRows, "output", output_without_end, DEALT, "Race"),
    made("alpha of the first group", group_source, "group_factor", factor_of_the_first, LIST),
    made("alpha of the first group, dealt", group_source, "group_factor", factor_of_the_first, DEALT),
    made("data of the first group", GroupSource, "origins", data_of_the_first, LIST),
    made("scales of the first group", GroupSource, "origins", scales_of_the_first, LIST),
    made("data of the first group, workspace", GroupSource, "origins", data_of_the_first, MANY),
    made("rows from the first", ContiguousRows, "origins", rows_from_zero, DEALT),
    made("scales where the rows are", ContiguousRows, "origins", scales_without_padding, DEALT),
    made("the stack's first matrix", ContiguousRows, "origins", matrix_of_the_first, DEALT),
)

OVERLAPPING = (
    # the kernel that writes the maps may still run
    mutant("no fence", WorkspaceMaps, "acquire", no_fence, MANY, "MissingProxyFence"),
    mutant("maps not waited for", WorkspaceMaps, "wait", no_wait, MANY, "Race"),
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


@pytest.mark.sweep(6)
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutants_are_noticed(mutant: Mutant) -> None:
    assert found(mutant.change, mutant.case) == mutant.noticed


@pytest.mark.parametrize("mutant", OVERLAPPING, ids=str)
def test_mutants_of_the_order_of_launches_are_noticed(mutant: Mutant) -> None:
    assert found(mutant.change, mutant.case) == mutant.noticed
