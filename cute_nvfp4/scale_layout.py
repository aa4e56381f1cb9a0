"""The 128×4 scale-factor atom, and the blocked scale layout tiled from it; both are defined here only.

An atom holds the scales of 128 rows and 4 columns (four blocks along K) in 512 bytes. As a CuTe layout of
(row, column) to byte offset it is ``((32, 4), 4) : ((16, 4), 1)``: row r = r0 + 32·r1 lies at 16·r0 + 4·r1, so
that the 16 bytes of one r0 are the four columns of rows r0, r0 + 32, r0 + 64 and r0 + 96. Atoms are laid out
along K first, then along the rows, then along the batch; a matrix is padded with zeros to whole atoms.

This is what cuBLAS, ``torch._scaled_mm`` and tcgen05's block-scaled MMA read (cuBLAS documentation, "1D Block
Scaling Factors Layout"; PTX ISA, "tcgen05 block scaling"). Torch sees the same bytes as a view of shape
(32, 4, rest_m, 4, rest_k, L), whose memory order is (L, rest_m, rest_k, 32, 4, 4).

The torch conversions, the arithmetic in Python and the kernels' layout all derive from the two constants below.
Importing this module does not import the CuTe DSL.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import as_bytes
from cute_nvfp4.tensors import check_dense

ATOM_SHAPE = ((32, 4), 4)
ATOM_STRIDE = ((16, 4), 1)

ATOM_ROWS = ATOM_SHAPE[0][0] * ATOM_SHAPE[0][1]
ATOM_COLS = ATOM_SHAPE[1]
ATOM_BYTES = ATOM_ROWS * ATOM_COLS

# orders the view (r0, r1, rest_m, c, rest_k, l) as (l, rest_m, r1, r0, rest_k, c), which flattens to rows × columns
_VIEW_TO_MATRIX = (5, 2, 1, 0, 4, 3)


def _rest(rows: Any, cols: Any) -> tuple[Any, Any]:
    """The number of atoms along the rows and along the columns, from integers or from the DSL's traced integers."""
    return (rows + (ATOM_ROWS - 1)) // ATOM_ROWS, (cols + (ATOM_COLS - 1)) // ATOM_COLS


def _rest_stride(rest_m: Any, rest_k: Any) -> tuple[Any, Any, Any]:
    """Bytes from one atom to the next along the rows, along the columns and along the batch."""
    return ATOM_BYTES * rest_k, ATOM_BYTES, ATOM_BYTES * rest_k * rest_m


def cute_atom() -> Any:
    """The atom as a ``cute.Layout``, (row, column) to bytes; for traced code."""
    import cutlass.cute as cute

    return cute.make_layout(ATOM_SHAPE, stride=ATOM_STRIDE)


def cute_layout(rows: Any, cols: Any, batch: Any = 1) -> Any:
    """The ``cute.Layout`` of a blocked scale tensor, (row, column, l) to bytes, with its padding; for traced code.

    It is ``(((32, 4), rest_m), (4, rest_k), batch)``, so a plain row and a plain column index it (CuTe splits them
    colexicographically). rows, cols, batch: Python integers or traced ``Int32``.
    """
    return cute_layout_of_atoms(*_rest(rows, cols), batch)


def cute_layout_of_atoms(rest_m: Any, rest_k: Any, batch: Any = 1) -> Any:
    """:func:`cute_layout` for ``rest_m`` × ``rest_k`` atoms."""
    import cutlass.cute as cute

    stride_m, stride_k, stride_l = _rest_stride(rest_m, rest_k)
    return cute.make_layout(
        ((ATOM_SHAPE[0], rest_m), (ATOM_SHAPE[1], rest_k), batch),
        stride=((ATOM_STRIDE[0], stride_m), (ATOM_STRIDE[1], stride_k), stride_l),
    )


def offset(row: int, col: int, rows: int, cols: int, batch_index: int = 0) -> int:
    """The byte of scale (``row``, ``col``) of matrix ``batch_index``, in a blocked tensor of ``rows`` × ``cols``."""
    rest_m, rest_k = _rest(rows, cols)
    if not (0 <= row < rest_m * ATOM_ROWS and 0 <= col < rest_k * ATOM_COLS and batch_index >= 0):
        raise OperandError.of(
            "index of a scale",
            got=f"row {row}, column {col}, batch {batch_index}",
            expected=f"0 <= row < {rest_m * ATOM_ROWS}, 0 <= column < {rest_k * ATOM_COLS} and batch >= 0",
        )
    stride_m, stride_k, stride_l = _rest_stride(rest_m, rest_k)
    r0, r1 = row % ATOM_SHAPE[0][0], row % ATOM_ROWS // ATOM_SHAPE[0][0]
    inside = r0 * ATOM_STRIDE[0][0] + r1 * ATOM_STRIDE[0][1] + col % ATOM_COLS * ATOM_STRIDE[1]
    return inside + row // ATOM_ROWS * stride_m + col // ATOM_COLS * stride_k + batch_index * stride_l


def _geometry(rows: int, cols: int, batch: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, stride and bytes of the six-dimensional view."""
    # torch.compile warns of a cache that it traces through; symbolic sizes cannot be looked up
    numbers = type(rows) is type(cols) is type(batch) is int
    return (_cached_geometry if numbers and not torch.compiler.is_compiling() else _new_geometry)(rows, cols, batch)


def _new_geometry(rows: int, cols: int, batch: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    if rows < 1 or cols < 1 or batch < 1:
        raise OperandError.of(
            "scale matrix", got=f"{rows} rows, {cols} columns, batch {batch}", expected="positive sizes"
        )
    rest_m, rest_k = _rest(rows, cols)
    stride_m, stride_k, stride_l = _rest_stride(rest_m, rest_k)
    shape = (*ATOM_SHAPE[0], rest_m, ATOM_SHAPE[1], rest_k, batch)
    stride = (*ATOM_STRIDE[0], stride_m, ATOM_STRIDE[1], stride_k, stride_l)
    return shape, stride, stride_l * batch


_cached_geometry = lru_cache(maxsize=1024)(_new_geometry)


def blocked_shape(rows: int, cols: int, batch: int = 1) -> tuple[int, ...]:
    """(32, 4, rest_m, 4, rest_k, L): the shape of the blocked view of ``rows`` × ``cols`` scales."""
    return _geometry(rows, cols, batch)[0]


def blocked_stride(rows: int, cols: int, batch: int = 1) -> tuple[int, ...]:
    """The strides of the blocked view, in bytes."""
    return _geometry(rows, cols, batch)[1]


def blocked_bytes(rows: int, cols: int, batch: int = 1) -> int:
    """Bytes of a blocked scale tensor, padding included."""
    return _geometry(rows, cols, batch)[2]


def is_blocked(scale: torch.Tensor, rows: int, cols: int, batch: int = 1) -> bool:
    """Whether ``scale`` is the blocked view of ``rows`` × ``cols`` scales, in shape and in memory order."""
    shape, stride, _ = _geometry(rows, cols, batch)
    if scale.shape != shape:
        return False
    if scale.stride() == stride:
        return True
    # the stride of a mode of size 1 addresses nothing, and torch may change it
    return all(size == 1 or got == want for size, got, want in zip(shape, scale.stride(), stride))


def blocked_view(flat: torch.Tensor, rows: int, cols: int, batch: int = 1) -> torch.Tensor:
    """The (32, 4, rest_m, 4, rest_k, L) view of a contiguous blocked buffer of one-byte codes, without a copy.

    ``flat`` may have any shape (cuBLAS and torch take one dimension), but must be contiguous and have exactly
    ``blocked_bytes(rows, cols, batch)`` elements.
    """
    shape, stride, size = _geometry(rows, cols, batch)
    if flat.element_size() != 1 or flat.numel() != size or not flat.is_contiguous():
        kind = "contiguous" if flat.is_contiguous() else "non-contiguous"
        raise OperandError.of(
            f"blocked scales of {rows} rows, {cols} columns and batch {batch}",
            got=f"{flat.numel()} {kind} elements of {flat.element_size()} byte(s)",
            expected=f"{size} contiguous bytes",
            hint="Rows are padded to 128 and columns to 4.",
        )
    return flat.as_strided(shape, stride)


def blocked_flat(blocked: torch.Tensor) -> torch.Tensor:
    """The bytes of the (32, 4, rest_m, 4, rest_k, L) view in one dimension; a copy unless they lie in that order."""
    return blocked.permute(5, 2, 4, 0, 1, 3).reshape(-1)


def _check_bytes(what: str, scale: torch.Tensor) -> None:
    check_dense(what, scale)
    if scale.dtype.itemsize != 1 or scale.dtype is torch.bool:
        raise OperandTypeError.of(what, got=scale.dtype, expected="a dtype of one byte, torch.uint8 for instance")


def to_blocked(scale: torch.Tensor) -> torch.Tensor:
    """Copies row-major scales (MN, KS) or (L, MN, KS) to the blocked layout, padded with zeros.

    Takes any one-byte dtype, which it keeps, and any strides. Returns the (32, 4, rest_m, 4, rest_k, L) view of memory
    ordered (L, rest_m, rest_k, 32, 4, 4); L is 1 for a matrix.
    """
    _check_bytes("row-major scales", scale)
    if scale.ndim not in (2, 3):
        raise OperandError.of("row-major scales", got=f"shape {tuple(scale.shape)}", expected="(MN, KS) or (L, MN, KS)")
    matrices = as_bytes(scale if scale.ndim == 3 else scale.unsqueeze(0))
    batch, rows, cols = matrices.shape
    shape, stride, size = _geometry(rows, cols, batch)
    rest_m, rest_k = shape[2], shape[4]
    padded = torch.nn.functional.pad(matrices, (0, rest_k * ATOM_COLS - cols, 0, rest_m * ATOM_ROWS - rows))
    blocked = torch.empty(size, dtype=torch.uint8, device=scale.device).as_strided(shape, stride)
    target = blocked.permute(_VIEW_TO_MATRIX)
    target.copy_(padded.reshape(target.shape))
    return blocked.view(scale.dtype)


def from_blocked(blocked: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Copies blocked scales to row-major ones, (L, ``rows``, ``cols``), without the padding. The dtype is kept.

    ``blocked`` is the six-dimensional view, of any strides, or the bytes in one dimension, whose length determines L.
    """
    _check_bytes("blocked scales", blocked)
    if blocked.ndim == 1:
        matrix_bytes = blocked_bytes(rows, cols)
        blocked = blocked_view(blocked, rows, cols, max(1, blocked.shape[0] // matrix_bytes))
    batch = blocked.shape[-1] if blocked.ndim == 6 else 1
    shape = blocked_shape(rows, cols, batch)
    if blocked.shape != shape:
        raise OperandError.of(
            f"blocked scales of {rows} rows, {cols} columns", got=f"shape {tuple(blocked.shape)}", expected=shape
        )
    matrix = as_bytes(blocked).permute(_VIEW_TO_MATRIX).reshape(batch, shape[2] * ATOM_ROWS, shape[4] * ATOM_COLS)
    return matrix[:, :rows, :cols].contiguous().view(blocked.dtype)
