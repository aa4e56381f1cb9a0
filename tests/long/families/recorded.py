"""Launches that an H200 recorded, bit for bit (``tests/data``; without it there are none)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support.recordings import Recording, replay

from tests.long.depends import PACKED
from tests.long.family import Family, Once

_TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(_TESTS / "gpu"))
_GEMV, _PRODUCTS = "h200_gemv.npz", "h200_products.npz"
_ASYNC, _MATRIX = "h200_async.npz", "h200_wgmma.npz"


@dataclass(frozen=True)
class Recorded:
    """Launch ``number`` of a file."""

    file: str
    number: int


@cache
def _load(name: str) -> Any:
    path = _TESTS / "data" / name
    if name == _GEMV:
        return Recording(path)
    if name == _PRODUCTS:
        from gpu.record_products import Recorded as Products

        return Products(path)
    from async_kernels.recording import Recording as Async

    return Async(path)


def _files(arch: str) -> tuple[str, ...]:
    return tuple(name for name in (_GEMV, _PRODUCTS, _ASYNC, _MATRIX) if (_TESTS / "data" / name).exists())


def _every(arch: str, file: str) -> list[Recorded]:
    found = _load(file)
    count = len(found.entries if file == _GEMV else found.problems if file == _PRODUCTS else found.cases)
    return [Recorded(file, i) for i in range(count)]


def _prepare(case: Recorded) -> Once:
    found = _load(case.file)
    if case.file == _GEMV:
        entry = found.entries[case.number]
        return lambda: _same(int((replay(found, entry) != found.after(entry)).sum()))
    if case.file == _PRODUCTS:
        return lambda: _same(found.check(case.number).error)
    from tests.simulator import test_recorded_async as recorded

    check = recorded.check_matrix if case.file == _MATRIX else recorded.check
    return lambda: check(found, case.number)


def _same(different: object) -> None:
    assert not different, f"differs from the GPU: {different}"


FAMILIES = (
    Family("recorded", Recorded, _prepare, every=_every, parts=_files, archs=("sm_90a",), weight=2, rooms=PACKED),
)
