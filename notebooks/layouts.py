"""Evaluates CuTe layouts for pictures. CuTe computes them while it traces a function; no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
import numpy as np


def offsets(make: Callable[[], Any], *shape: int) -> tuple[str, np.ndarray]:
    """(the layout in CuTe's notation, its offset at every coordinate of ``shape``) of the static layout ``make()``."""
    found: list = []

    def evaluate() -> None:
        layout = make()
        found.append(str(layout))
        found.append([int(cute.crd2idx(at, layout)) for at in np.ndindex(*shape)])

    @cute.jit
    def trace():
        evaluate()

    trace()
    return found[0], np.array(found[1]).reshape(shape)
