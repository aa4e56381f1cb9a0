"""The variants of the fused quantization kernels: which x they read as it lies, and how many threads they take."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kernels.quantize.config import ROW_STEP, WARP, WARP_ROWS, QuantizeConfig
from ..scale_layout import ATOM_ROWS

# bytes that a lane takes together where elements are rotated
_RUN = 64


class Variant(NamedTuple):
    """rotation: elements that are rotated together, 0 for none; tile: square tiles; transposed: K is strided."""

    rotation: int = 0
    tile: bool = False
    transposed: bool = False

    @property
    def reads_rows(self) -> bool:
        """Whether :class:`kernels.quantize.row.Quantize` does it, row after row."""
        return not (self.tile or self.transposed)


PLAIN = Variant()


def lies_transposed(x: torch.Tensor, tile: bool, choice: str) -> bool:
    """Whether ``x`` (L, MN, K) is read where it lies, K strided: MN contiguous, rows of words, whole and aligned.

    4/6 of tiles is not: its sums have an order that lanes would have to wait for. Nor are searches.
    """
    size = x.element_size()
    if x.stride(2) == 1 or x.stride(1) != 1 or x.shape[1] == 1 or (tile and choice) or choice == "optimal":
        return False
    places = [x.data_ptr(), x.shape[1] * size, x.stride(2) * size, x.stride(0) * size if x.shape[0] > 1 else 0]
    return x.stride(2) > 0 and x.shape[1] * size < 2**31 and not any(place % 4 for place in places)


def threads(config: QuantizeConfig, rows: int, columns: int) -> tuple[int, int, int]:
    """What ``steps`` of the kernel begins with, and how many blocks of threads have work, for a matrix."""
    atoms = -(-rows // ATOM_ROWS)
    if config.transposed:
        tasks = atoms * -(-columns // config.blocks_along_k)
        return atoms, tasks, tasks
    chunks = -(-columns // (WARP // WARP_ROWS))
    units = chunks * atoms * (ROW_STEP // config.block)
    return chunks, units, -(-units // config.warps)


def resident(config: QuantizeConfig) -> int:
    """Blocks of threads that are to fit on a multiprocessor: as registers allow."""
    if config.stochastic:
        return 2
    if config.transposed:
        return 4 if config.block == 16 else 3
    return 4 if config.has_usual_way and not config.choice else 3


def walk(x: torch.Tensor, config: QuantizeConfig, alignment: int) -> tuple[torch.Tensor, QuantizeConfig, int, int, int]:
    """How the kernel of the first pass goes through ``x``.

    Returns what it is to be told of (rows and their strides are those of memory), its configuration, the number of
    rows, their bytes, and the pieces of a row. ``alignment``: of the rows of memory.
    """
    transposed = config.transposed and config.hadamard > 0
    view = x.transpose(1, 2) if config.transposed else x
    row_bytes = view.shape[2] * x.element_size()
    width = min(alignment, row_bytes & -row_bytes, 16)
    found = QuantizeConfig(
        arch=config.arch,
        dtype=config.dtype,
        hadamard=config.hadamard,
        transposed=transposed,
        vector_bytes=4 if transposed else width,
        warps=8,
    )
    if transposed:
        return view, found, view.shape[1] // config.block, row_bytes, -(-row_bytes // (4 * WARP))
    piece = WARP * (_RUN if config.hadamard else 4 * width)
    return view, found, view.shape[1], row_bytes, -(-row_bytes // piece)
