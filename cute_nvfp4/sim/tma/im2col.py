"""The pixels of an im2col copy (PTX ISA, "im2col mode").

A copy traverses base pixels, innermost spatial dimension first, inside a bounding box that reaches from the lower
corner to the end of the tensor plus the upper corner. Past the end of a dimension it continues at the lower corner of
the next line, plane or image. The copy reads each pixel at its base position plus the offsets of the instruction, and
fills pixels outside the tensor. Element strides are the steps between base pixels.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.tma.descriptor import TensorMap


def outside_box(m: TensorMap, coords: np.ndarray) -> int | None:
    """Returns the first dimension in which ``coords`` (rank,) lie outside the bounding box, where hardware faults, or
    None."""
    im = m.im2col
    for d, (low, high) in enumerate(zip(im.lower, im.upper), 1):
        if not low <= coords[d] < m.dims[d] + high:
            return d
    return None


def pixels(m: TensorMap, coords: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Returns the coordinates (pixels, rank) of the first channel of every pixel that one copy at ``coords`` (rank,)
    reads with ``offsets`` (rank - 2,)."""
    im, spatial = m.im2col, m.rank - 2
    steps = m.element_strides[1:-1]
    left = np.arange(im.pixels)
    out = np.empty((im.pixels, m.rank), np.int64)
    out[:, 0] = coords[0]
    for d in range(spatial):
        low, end = im.lower[d], m.dims[1 + d] + im.upper[d]
        here = -(-(end - int(coords[1 + d])) // steps[d])
        line = -(-(end - low) // steps[d])
        # The first line begins at the coordinates, all others at the lower corner.
        first = left < here
        wrapped = left - here
        out[:, 1 + d] = np.where(first, coords[1 + d] + left * steps[d], low + wrapped % line * steps[d])
        left = np.where(first, 0, wrapped // line + 1)
    out[:, -1] = coords[-1] + left
    out[:, 1:-1] += offsets
    return out
