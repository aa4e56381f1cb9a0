"""What the H200 does not execute, though the ISA does not plainly say so: launches that end in an error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from . import tile_loads, tile_stores
from .case import Case, TensorMap
from .tile_loads import data


def cases() -> Iterator[Case]:
    spec = TensorMap("u16", (70, 20), (160,), (32, 8))
    memory = data(3264)
    for name, coordinates, to in (
        ("load of an inner coordinate of 2 bytes", (1, 0), 0),
        ("load of an inner coordinate of -2 bytes", (-1, 0), 0),
        ("load of an inner coordinate of 8 bytes", (4, 0), 0),
        ("load to 16 bytes of shared memory", (0, 0), 16),
        ("load to 64 bytes of shared memory", (0, 0), 64),
    ):
        yield refused(name, tile_loads.case(name, spec, memory, [(coordinates, to)], 1024))
    shared = data(1024, 9)
    for name, coordinates, source in (
        ("store of an inner coordinate of 8 bytes", (4, 0), 0),
        ("store of a negative inner coordinate", (-8, 0), 0),
        ("store of a negative coordinate", (0, -1), 0),
        ("store from 16 bytes of shared memory", (0, 0), 16),
    ):
        yield refused(name, tile_stores.case(name, spec, memory, shared, [(coordinates, source)]))
    for kind, operation in (
        ("s32", "inc"),
        ("u64", "inc"),
        ("s64", "add"),
        ("s64", "and"),
        ("f16", "and"),
        ("f32", "min"),
        ("u16", "add"),
        ("u8", "or"),
    ):
        name = f"reduction {operation} of {kind}"
        size = {"u8": 1, "u16": 2, "f16": 2, "s32": 4, "f32": 4}.get(kind, 8)
        spec = TensorMap(kind, (96 // size, 10), (96,), (64 // size, 4))
        combine = {"combine": None, "known": False, "reduction": operation}
        yield refused(name, tile_stores.case(name, spec, np.zeros(960, np.uint8), shared, [((0, 0), 0)], **combine))


def refused(name: str, case: Case) -> Case:
    return replace(case, name=f"refused {name}", compare="refused", expected=None)
