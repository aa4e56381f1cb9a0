"""Kernels written by hand whose results on a GPU are recorded: what sm_90a shares with the asynchronous machine."""

from __future__ import annotations

from importlib import import_module

from .case import Case

_TENSORS = ("tile_loads", "tile_stores", "im2col", "map_edits", "bulk", "clusters", "mbarriers", "copies")
_PARTS = (*_TENSORS, "barriers", "atomics", "arithmetic", "refusals")


def all_cases() -> list[Case]:
    """Every case of the recording, in its order."""
    return _named(_PARTS)


def matrix_cases() -> list[Case]:
    """Warpgroup matrix instructions, recorded apart."""
    return _named(("wgmma",))


def _named(parts: tuple[str, ...]) -> list[Case]:
    cases = [case for part in parts for case in import_module(f".{part}", __name__).cases()]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "case names are not unique"
    return cases
