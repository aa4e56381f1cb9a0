"""Makes tensor maps as the CUDA driver does (CUDA driver API, "Tensor Map Object Management",
``cuTensorMapEncodeTiled`` and ``cuTensorMapEncodeIm2col``), with its refusals and its own notes in the 128 bytes.

``tiled`` and ``im2col`` take sequences. ``encode_tiled`` and ``encode_im2col`` take the arguments of the driver's
functions after the first one, with host addresses of arrays.

Common arguments: ``kind``, ``swizzle`` and the other modes are values of the driver's enumerations. ``dims`` has sizes
in elements, innermost first, ``strides`` bytes from dimension 1 on, ``steps`` the element strides. ``sm`` is ten times
the compute capability. ``who`` is the name of the driver's function.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cute_nvfp4.sim.errors import LaunchError
from cute_nvfp4.sim.tma.descriptor import CORNER_BITS, INTERLEAVES, SPAN, SWIZZLES, Im2col, InvalidTensorMap, TensorMap

#: element types in the order of CUtensorMapDataType, which is not the order of ``tensormap.replace``
DATA_TYPES = (
    *("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32.ftz", "tf32", "tf32.ftz"),
    *("b4x16", "b4x16_p64", "b6x16_p32"),
)
_MAX_RANK, _MAX_BOX, _MAX_STEP, _MAX_STRIDE, _MAX_DIM, _MAX_PIXELS = 5, 256, 8, 1 << 40, 1 << 32, 1024
_SUB_BYTE, _ATOMIC = DATA_TYPES.index("b4x16"), 4
"""The first element type and the first swizzle that need compute capability 10.0."""
_TILED, _IM2COL = "cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col"


def tiled(
    kind: int,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    steps: Sequence[int],
    modes: Sequence[int] = (0, 0, 0, 0),
    sm: int = 100,
) -> bytes:
    """Returns the 128 bytes of a tiled map. ``modes`` are interleave, swizzle, L2 promotion and out-of-bounds fill.
    Raises ``LaunchError`` for arguments that the driver refuses, and for what is not modelled."""
    if not 1 <= len(dims) <= _MAX_RANK:
        raise LaunchError(f"{_TILED}: rank {len(dims)} is not within 1 and {_MAX_RANK}")
    common = _common(_TILED, kind, address, dims, strides, steps, modes, sm)
    _within(_TILED, "box dimension", box, 1, _MAX_BOX)
    made = _made(_TILED, TensorMap(box=tuple(box), **common))
    count = math.prod(b // s for b, s in zip(box, steps))
    return _bytes(made, count, modes[2])


def im2col(
    kind: int,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    lower: Sequence[int],
    upper: Sequence[int],
    channels: int,
    pixels: int,
    steps: Sequence[int],
    modes: Sequence[int] = (0, 0, 0, 0),
    sm: int = 100,
) -> bytes:
    """Returns the 128 bytes of an im2col map with the bounding box from ``lower`` to ``upper``, of which one copy reads
    ``channels`` of ``pixels`` pixels. For ``modes`` and errors see ``tiled``."""
    if not 3 <= len(dims) <= _MAX_RANK:
        raise LaunchError(f"{_IM2COL}: rank {len(dims)} is not within 3 and {_MAX_RANK}")
    common = _common(_IM2COL, kind, address, dims, strides, steps, modes, sm)
    _within(_IM2COL, "channels", (channels,), 1, _MAX_BOX)
    _within(_IM2COL, "pixels", (pixels,), 1, _MAX_PIXELS)
    half = 1 << CORNER_BITS[len(dims) - 2] - 1
    _within(_IM2COL, "corner", (*lower, *upper), -half, half - 1)
    for d, (low, high) in enumerate(zip(lower, upper), 1):
        if low >= dims[d] + high:
            raise LaunchError(f"{_IM2COL}: the bounding box from {low} to {dims[d]} {high:+} is empty in dimension {d}")
    box = Im2col(tuple(lower), tuple(upper), channels, pixels)
    made = _made(_IM2COL, TensorMap(box=(channels,), im2col=box, **common))
    return _bytes(made, channels * pixels, modes[2])


def encode_tiled(kind, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill, sm=100) -> bytes:
    """Calls ``tiled`` with the driver's arguments."""
    sizes, bytes_apart = _shape(_TILED, rank, dims, strides)
    boxes, every = _read(ctypes.c_uint32, box, rank), _read(ctypes.c_uint32, steps, rank)
    return tiled(kind, address, sizes, bytes_apart, boxes, every, (interleave, swizzle, promotion, fill), sm)


def encode_im2col(kind, rank, address, dims, strides, lower, upper, channels, pixels, steps, *modes, sm=100) -> bytes:
    """Calls ``im2col`` with the driver's arguments, of which ``modes`` are the last four."""
    sizes, bytes_apart = _shape(_IM2COL, rank, dims, strides)
    corners = (_read(ctypes.c_int, at, rank - 2) for at in (lower, upper))
    every = _read(ctypes.c_uint32, steps, rank)
    return im2col(kind, address, sizes, bytes_apart, *corners, channels, pixels, every, modes, sm)


def _common(who: str, kind: int, address: int, dims, strides, steps, modes, sm: int) -> dict[str, Any]:
    """Checks the arguments that all maps have, and returns their fields of ``TensorMap``."""
    interleave, swizzle, promotion, fill = modes
    _within(who, "dimension", dims, 1, _MAX_DIM)
    _within(who, "element stride", steps, 1, _MAX_STEP)
    _within(who, "stride", strides, 0, _MAX_STRIDE - 1)
    ends = {"data type": len(DATA_TYPES), "swizzle": 7, "interleave": 3, "L2 promotion": 4, "fill": 2}
    for (what, end), value in zip(ends.items(), (kind, swizzle, interleave, promotion, fill)):
        _within(who, what, (value,), 0, end - 1)
    if sm < 100 and (kind >= _SUB_BYTE or swizzle >= _ATOMIC):
        raise LaunchError(f"{who}: data type {kind} or swizzle {swizzle} needs compute capability 10.0")
    if swizzle >= len(SWIZZLES):
        raise LaunchError(f"{who}: swizzle {swizzle} is not modelled")
    align = 32 if interleave == 2 else 16
    odd = [v for v in (address, *strides) if v % align]
    if odd:
        raise LaunchError(f"{who}: an address or stride of {odd[0]:#x} bytes is not a multiple of {align}")
    if interleave and len(dims) < 3:
        raise LaunchError(f"{who}: interleave {INTERLEAVES[interleave]} needs 3 dimensions, not {len(dims)}")
    if interleave == 2 and SWIZZLES[swizzle] != "32B":
        raise LaunchError(f"{who}: interleave 32B needs a swizzle of 32B, not {SWIZZLES[swizzle]}")
    return {
        **{"address": address, "type": DATA_TYPES[kind], "dims": tuple(dims), "strides": tuple(strides)},
        **{"element_strides": tuple(steps), "swizzle": SWIZZLES[swizzle], "interleave": INTERLEAVES[interleave]},
        "nan_fill": bool(fill),
    }


def _made(who: str, m: TensorMap) -> TensorMap:
    """Returns the map if the copy engine can use it, or if it is interleaved: such a map is refused when a kernel uses
    it."""
    if m.interleave != "none":
        if m.box[0] * m.bits % 128:
            raise LaunchError(f"{who}: a box row of {m.box[0] * m.bits} bits is not a multiple of 16 bytes")
        return m
    try:
        return TensorMap.decode(m.encode())
    except InvalidTensorMap as error:
        raise LaunchError(f"{who}: {error}") from None


def _bytes(m: TensorMap, count: int, promotion: int) -> bytes:
    """Returns the 128 bytes with L2 promotion and the driver's notes: the bytes of a copy of ``count`` elements, and
    the bytes after which the swizzle repeats."""
    words = np.frombuffer(m.encode(), np.uint64).copy()
    words[1] |= np.uint64(promotion << 17)
    words[8] = count * m.bits // 8
    words[9] = 16 if m.swizzle == "none" else 8 * SPAN[m.swizzle]
    return words.tobytes()


def _shape(who: str, rank: int, dims: int, strides: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not 1 <= rank <= _MAX_RANK:
        raise LaunchError(f"{who}: rank {rank} is not within 1 and {_MAX_RANK}")
    return _read(ctypes.c_uint64, dims, rank), _read(ctypes.c_uint64, strides, rank - 1)


def _read(kind: Any, address: int, count: int) -> tuple[int, ...]:
    return tuple((kind * count).from_address(address)) if count > 0 else ()


def _within(who: str, what: str, values: Sequence[int], low: int, high: int) -> None:
    for i, value in enumerate(values):
        if not low <= value <= high:
            raise LaunchError(f"{who}: {what} {i} is {value}, not within {low} and {high}")
