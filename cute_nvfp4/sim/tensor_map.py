"""What ``cuTensorMapEncodeTiled`` does (CUDA driver API, "Tensor Map Object Management"): host code calls it to make a
tensor map; the driver checks the arguments and packs them."""

from __future__ import annotations

import ctypes
from typing import Any

from cute_nvfp4.sim.errors import LaunchError

#: CUtensorMapDataType, CUtensorMapInterleave and CUtensorMapSwizzle in the order of their values
_TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32.ftz", "tf32", "tf32.ftz", "b4x16")
_INTERLEAVES = ("none", "16B", "32B")
_SWIZZLES = ("none", "32B", "64B", "128B")
_MAX_RANK, _MAX_BOX, _MAX_STEP, _MAX_STRIDE, _MAX_DIM = 5, 256, 8, 1 << 40, 1 << 32


def encode_tiled(
    kind: int,
    rank: int,
    address: int,
    dims: int,
    strides: int,
    box: int,
    steps: int,
    interleave: int,
    swizzle: int,
    fill: int,
) -> bytes:
    """The 128 bytes of the map; ``dims`` … ``steps`` are host addresses of arrays, innermost dimension first.

    Raises ``LaunchError`` for what the driver refuses, and for what is not modelled.
    """
    # the package of the copy engine reads this file's launches, so it is imported when it is needed
    from cute_nvfp4.sim.tma.descriptor import InvalidTensorMap, TensorMap

    if not 1 <= rank <= _MAX_RANK:
        raise LaunchError(f"cuTensorMapEncodeTiled: rank {rank} is not within 1 and {_MAX_RANK}")
    sizes = _read(ctypes.c_uint64, dims, rank)
    bytes_apart = _read(ctypes.c_uint64, strides, rank - 1)
    boxes, every = _read(ctypes.c_uint32, box, rank), _read(ctypes.c_uint32, steps, rank)
    _within("dimension", sizes, 1, _MAX_DIM)
    _within("box dimension", boxes, 1, _MAX_BOX)
    _within("element stride", every, 1, _MAX_STEP)
    _within("stride", bytes_apart, 0, _MAX_STRIDE - 1)
    odd = [s for s in bytes_apart if s % 16]
    if odd:
        raise LaunchError(f"cuTensorMapEncodeTiled: a stride of {odd[0]} bytes is not a multiple of 16")
    try:
        raw = TensorMap(
            address=address,
            type=_name("data type", _TYPES, kind),
            dims=sizes,
            strides=bytes_apart,
            box=boxes,
            element_strides=every,
            swizzle=_name("swizzle", _SWIZZLES, swizzle),
            interleave=_name("interleave", _INTERLEAVES, interleave),
            nan_fill=bool(fill),
        ).encode()
        TensorMap.decode(raw)
    except InvalidTensorMap as error:
        raise LaunchError(f"cuTensorMapEncodeTiled: {error}") from None
    return raw


def _read(kind: Any, address: int, count: int) -> tuple[int, ...]:
    return tuple((kind * count).from_address(address)) if count else ()


def _within(what: str, values: tuple[int, ...], low: int, high: int) -> None:
    for i, value in enumerate(values):
        if not low <= value <= high:
            raise LaunchError(f"cuTensorMapEncodeTiled: {what} {i} is {value}, not within {low} and {high}")


def _name(what: str, names: tuple[str, ...], value: int) -> str:
    if not 0 <= value < len(names):
        raise LaunchError(f"cuTensorMapEncodeTiled: {what} {value} is not modelled")
    return names[value]
