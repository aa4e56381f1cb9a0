"""Large arrays of zeros of which a launch touches little."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np

_LARGE = 1 << 22
"""The size in bytes from which numpy asks for huge pages: each first touch would then zero two megabytes."""


def zeros(shape: int | tuple[int, ...], dtype: type) -> np.ndarray:
    """Returns an array of zeros that takes memory only where it is touched, in the system's smallest pages."""
    size = math.prod(shape) if isinstance(shape, tuple) else shape
    bytes_ = size * np.dtype(dtype).itemsize
    if bytes_ < _LARGE:
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, bytes_, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # a kernel without huge pages refuses the advice, and does not need it
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)
