"""The cases of ``record_tma.py``: tensor copies at edges and beyond, reductions value by value, tensormap.replace.

A case is a dictionary that goes unchanged into the recording. ``type`` is a CUtensorMapDataType; ``swz``, ``l2`` and
``oob`` are the driver's enumerators; ``estr`` has the element strides, ``coords`` the box's coordinates, ``offs`` the
offsets of im2col, ``off`` the byte offset in shared memory, ``tx`` the bytes that complete_tx must count. ``values``
are the elements that a load finds; ``pairs`` (what memory holds, what is stored) those of a reduction. Other bytes are
noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

SIZE = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)
"""Bytes of an element of each CUtensorMapDataType."""
U8, U16, U32, S32, U64, S64, F16, F32, F64, BF16, F32_FTZ, TF32, TF32_FTZ = range(13)
FLOATS = range(F16, TF32_FTZ + 1)
Case = dict[str, Any]

_SPECIAL = (
    *(0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x00800000, 0x3F800FFF, 0x3F801000, 0x3F801001, 0x3F803000, 0x3F802000),
    *(0x3F802FFF, 0x7F7FFFFF, 0x7F7FF000, 0xFF7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0xFFC12345, 0xFF800000),
    *(0x3F800001, 0xBF801000, 0xBF800FFF, 0x00000FFF, 0x00001000, 0x00001FFF, 0x007FF000, 0x12345678, 0x9ABCDEF0),
    *(0x7FFFFFFF, 0xFFFFFFFF, 0x3FFFFFFF),
)
_F32 = (
    *(0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x00800000, 0x807FFFFF, 0x3F800000, 0xBF800000, 0x33800000, 0x34000001),
    *(0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0x40490FDB, 0x00FFFFFF),
)
_F16 = (
    *(0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x1000, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E01, 0x7C01),
    *(0xFE00, 0x4248, 0x83FF),
)
_BF16 = (
    *(0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x3F80, 0xBF80, 0x3B80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC1, 0x7F81),
    *(0xFFC0, 0x4049, 0x807F),
)
_F64 = (
    *(0, 1 << 63, 1, 1 << 63 | 1, (1 << 52) - 1, 1 << 52, 0x3FF0000000000000, 0xBFF0000000000000, 0x3CB0000000000000),
    *(0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000001, 0x7FF0000000000001),
    *(0x400921FB54442D18, 0x8010000000000000),
)
_I32 = (0, 1, 2, 5, 6, 7, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x80000001, 0x12345678, 0xFFFFFFF0)
_I64 = (0, 1, 5, 0x7FFFFFFFFFFFFFFF, 1 << 63, (1 << 64) - 1, 0x123456789ABCDEF0, 0xFFFFFFFF)

_LINE = {"dims": [64, 20, 3], "strides": [128, 2560]}
_PLANE = {"dims": [64, 12, 10, 3], "strides": [128, 1536, 15360]}
_VOLUME = {"dims": [64, 6, 5, 4, 3], "strides": [128, 768, 3840, 15360]}
_PLAIN = {"kind": "encode", "type": F32, "dims": [100, 50], "strides": [512], "box": [32, 8]}
_FIVE = {"dims": [100, 50, 30, 20, 10], "strides": [512 << s for s in (0, 6, 11, 16)], "box": [32, 4, 3, 2, 5]}
_DEEP = {"dims": [24, 5, 4, 3, 3], "strides": [48, 240, 960, 2880], "box": [8, 3, 2, 2, 2]}
_CUBE = {"dims": [24, 5, 4], "strides": [48, 240], "box": [8, 3, 2]}


def all_cases() -> list[Case]:
    return [*_encodings(), *_loads(), *_windows(), *_stores(), *_reductions(), *_replacements(), *_second()]


def _im2col(lower: list[int], upper: list[int], channels: int, pixels: int) -> dict[str, Any]:
    return {"lower": lower, "upper": upper, "channels": channels, "pixels": pixels}


def _encodings() -> Iterator[Case]:
    for t in range(len(SIZE)):
        yield _PLAIN | {"type": t, "dims": [128, 50], "strides": [1024], "box": [16, 8]}
    for swizzle in range(4):
        yield _PLAIN | {"swz": swizzle, "box": [8, 8]}
    for promotion in range(4):
        yield _PLAIN | {"l2": promotion}
    for fill in range(2):
        yield _PLAIN | {"oob": fill}
    yield _PLAIN | _FIVE | {"estr": [1, 2, 3, 4, 5]}
    yield _PLAIN | {"estr": [8, 8]}
    yield _PLAIN | {"estr": [2, 1]}
    yield _PLAIN | {"dims": [16], "strides": [], "box": [16]}
    for rows in (255, 256, 257, 1024):
        yield _PLAIN | {"dims": [128, rows]}
    yield _PLAIN | {"dims": [1, 1 << 32], "strides": [1 << 39]}
    for stride in (0, 16):
        yield _PLAIN | {"dims": [128, 4], "strides": [stride]}
    yield _PLAIN | {"base": 16}
    for tensor, lower, upper in ((_LINE, [-1], [-2]), (_PLANE, [-1, -3], [-2, 5])):
        yield {"kind": "encode", "type": F16} | tensor | {"im2col": _im2col(lower, upper, 32, 16)}


def _load(t: int, dims: list[int], strides: list[int], box: list[int], coords: list[int], **more: Any) -> Case:
    steps = more.get("estr", [1] * len(dims))
    count = box[0]
    for size, step in zip(box[1:], steps[1:]):
        count *= -(-size // step)
    place = {"kind": "load", "type": t, "dims": dims, "strides": strides, "box": box, "coords": coords}
    return place | {"tx": count * SIZE[t]} | more


def _loads() -> Iterator[Case]:
    for t, z in enumerate(SIZE):
        at = [40 // z + 1, 7], [64], [32 // z, 8], [32 // z - 1, -3]
        yield _load(t, *at)
        if t in FLOATS:
            yield _load(t, *at, oob=1)
    for t in (F32, F32_FTZ, TF32, TF32_FTZ):
        yield _load(t, [64, 4], [256], [32, 4], [0, 0], values=list(_SPECIAL))
    for swizzle, widths in ((1, (32, 16)), (2, (64, 32, 16)), (3, (128, 64, 32, 16))):
        for width, place in itertools.product(widths, (0, 128, 512, 384)):
            yield _load(U8, [128, 64], [128], [width, 24], [0, 1], swz=swizzle, off=place)
    yield _load(U8, [128, 64], [128], [16, 24], [3, 1])
    yield _load(U8, [13, 64], [128], [16, 24], [0, 1])
    yield _load(U8, [13, 64], [128], [16, 4], [-5, -2])
    for steps in ([1, 2], [1, 3], [2, 1], [4, 2]):
        for coords in ([3, 2], [-3, -2]):
            yield _load(F16, [40, 30], [128], [16, 9], coords, estr=steps)
    yield _load(F16, [40, 9], [128], [16, 9], [3, 1], estr=[1, 2])
    for x in (100, 500, -17):
        yield _load(U8, [600], [], [256], [x])
    yield _load(U16, *_DEEP.values(), [20, 3, -1, 2, 1])
    yield _load(U16, *_DEEP.values(), [4, 3, 3, -1, 2], swz=0)
    for coords in ([2**31 - 1, 3, 2], [-(2**31), 3, 2], [0, 2**31 - 1, 2]):
        yield _load(U16, *_CUBE.values(), coords)


def _window(tensor: dict, corners: int, channels: int, pixels: int, coords, offs, **more: Any) -> Case:
    """An im2col load of f16 whose bounding box has ``corners`` in every dimension."""
    spatial = len(tensor["dims"]) - 2
    box = more.pop("im2col", None) or _im2col([corners] * spatial, [corners] * spatial, channels, pixels)
    found = {"kind": "load", "type": F16} | tensor | {"im2col": box, "coords": coords, "offs": offs}
    return found | {"tx": box["channels"] * box["pixels"] * 2} | more


def _windows() -> Iterator[Case]:
    yield _window(_LINE, 0, 8, 32, [0, 0, 0], [0])
    yield _window(_LINE, -1, 8, 50, [8, -1, 0], [0])
    yield _window(_LINE, -1, 8, 32, [60, 3, 1], [2])
    yield _window(_LINE, 0, 0, 0, [0, 15, 1], [1], im2col=_im2col([-2], [1], 8, 40))
    for coords, offs in (([8, 19, 0], [0]), ([8, -3, 0], [0]), ([-3, 3, -1], [1])):
        yield _window(_LINE, -1, 8, 50, coords, offs)
    yield _window(_LINE, -1, 8, 20, [0, -1, 0], [1], estr=[1, 2, 1])
    yield _window(_LINE, -1, 8, 21, [0, 1, 0], [0], estr=[1, 3, 1])
    for coords, offs in (
        *(([0, 0, 0, 0], [0, 0]), ([8, -1, -1, 0], [0, 0]), ([8, -1, -1, 0], [2, 1])),
        *(([16, 9, 7, 1], [1, 2]), ([0, 5, 8, 2], [2, 2])),
    ):
        yield _window(_PLANE, -1, 16, 64, coords, offs)
        yield _window(_PLANE, -1, 16, 40, coords, offs, estr=[1, 2, 2, 1])
        yield _window(_PLANE, -1, 32, 40, coords, offs, swz=2)
    for coords, offs in (
        *(([0, 0, 0, 0, 0], [0, 0, 0]), ([8, -1, 2, -1, 0], [1, 2, 0])),
        ([8, 3, 3, 2, 1], [2, 1, 2]),
    ):
        yield _window(_VOLUME, -1, 16, 64, coords, offs)
        yield _window(_VOLUME, -1, 16, 30, coords, offs, estr=[1, 2, 1, 2, 1], oob=1)


def _store(t: int, dims: list[int], strides: list[int], box: list[int], coords: list[int], **more: Any) -> Case:
    place = {"kind": "store", "type": t, "dims": dims, "strides": strides, "box": box, "coords": coords}
    return place | more


def _columns(coords: list[int], corner: int, pixels: int) -> Case:
    box = _im2col([corner] * 2, [corner] * 2, 16, pixels)
    more = {"mode": "im2col_no_offs", "im2col": box, "gbytes": 49152}
    return _store(F16, *_PLANE.values(), [0], coords, **more)


def _stores() -> Iterator[Case]:
    yield _store(U8, [40, 30], [64], [32, 8], [16, 26])
    yield _store(U8, [40, 30], [64], [32, 8], [-7, -3])
    yield _store(F16, [40, 30], [128], [32, 8], [9, 2], swz=2, off=256)
    yield _store(U8, [128, 30], [128], [128, 8], [0, 2], swz=3, off=128)
    yield _store(U8, [128, 30], [128], [64, 8], [0, 2], swz=3)
    for steps in ([1, 2], [2, 3]):
        yield _store(F16, [40, 30], [128], [16, 9], [3, 2], estr=steps)
    yield _store(U16, *_CUBE.values(), [20, 3, -1])
    for t in (F32_FTZ, TF32, TF32_FTZ):
        yield _store(t, [64, 4], [256], [32, 4], [0, 0], pairs=[[0, v] for v in _SPECIAL])
    for coords in ([8, 3, 2, 1], [8, -1, -1, 0]):
        yield _columns(coords, -1, 40)


def _reductions() -> Iterator[Case]:
    everything = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
    for t, values, operations in (
        *((U32, _I32, everything), (S32, _I32, everything)),
        *((U64, _I64, ("add", "min", "max", "and", "or", "xor", "inc")),),
        *((S64, _I64, ("add", "min", "max", "and", "or", "xor")),),
        *((F16, _F16, ("add", "min", "max", "and")), (F32, _F32, ("add", "min")), (F64, _F64, ("add", "min"))),
        *((BF16, _BF16, ("add", "min", "max")), (F32_FTZ, _F32, ("add",)), (TF32, _F32, ("add",))),
        (U16, _I32, ("add", "and")),
    ):
        row = 64 // SIZE[t]
        pairs = [list(p) for p in itertools.product(values, values)]
        for operation in operations:
            box = [row, min(48, -(-len(pairs) // row))]
            more = {"op": operation, "pairs": pairs, "gbytes": 4096, "total": 4096}
            yield _store(t, [row, 48], [64], box, [0, 0], **more)
    for operation, size, values in (
        *(("add.u32", 4, _I32), ("add.s32", 4, _I32), ("add.u64", 8, _I64), ("add.noftz.f16", 2, _F16)),
        *(("add.noftz.bf16", 2, _BF16), ("add.f32", 4, _F32), ("add.f64", 8, _F64), ("min.u32", 4, _I32)),
        *(("max.s32", 4, _I32), ("min.s32", 4, _I32), ("max.u32", 4, _I32), ("min.s64", 8, _I64)),
        *(("max.u64", 8, _I64), ("min.f16", 2, _F16), ("max.f16", 2, _F16), ("min.bf16", 2, _BF16)),
        *(("max.bf16", 2, _BF16), ("inc.u32", 4, _I32), ("dec.u32", 4, _I32), ("and.b32", 4, _I32)),
        *(("or.b64", 8, _I64), ("xor.b32", 4, _I32)),
    ):
        pairs = [list(p) for p in itertools.product(values, values)]
        yield {"kind": "bulkred", "op": operation, "size": size, "pairs": pairs}


def _replacements() -> Iterator[Case]:
    edits = ["global_address.shared::cta.b1024.b64 [%r4], %rd9"]
    edits += [f"rank.shared::cta.b1024.b32 [%r4], {v}" for v in ("%r9", "0", "2")]
    for d, field, v in itertools.product(range(5), ("box_dim", "global_dim", "element_stride"), ("%r9", "3")):
        edits.append(f"{field}.shared::cta.b1024.b32 [%r4], {d}, {v}")
    for d, v in itertools.product(range(4), ("%rd9", "4096")):
        edits.append(f"global_stride.shared::cta.b1024.b64 [%r4], {d}, {v}")
    for field, count in (("elemtype", 13), ("interleave_layout", 3), ("swizzle_mode", 4), ("fill_mode", 2)):
        edits += [f"{field}.shared::cta.b1024.b32 [%r4], {v}" for v in range(count)]
    for edit in edits:
        yield {"kind": "replace", "type": F16} | _FIVE | {"ins": f"tile.{edit}"}


def _second() -> Iterator[Case]:
    """Yields aligned loads: most loads of the first list are off the grid of 16 bytes and fault."""
    plane, volume = {"kind": "encode", "type": F16} | _PLANE, {"kind": "encode", "type": F16} | _VOLUME
    yield volume | {"im2col": _im2col([-1, -2, -3], [1, 2, 3], 32, 16)}
    yield volume | {"im2col": _im2col([-16, -7, -3], [15, 6, 5], 32, 16)}
    yield plane | {"im2col": _im2col([-128, -77], [127, 66], 32, 1024)}
    yield {"kind": "encode", "type": F16} | _LINE | {"im2col": _im2col([-32768], [32767], 32, 16)}
    yield from _loads_on_grid()
    yield from _stores_on_grid()


def _loads_on_grid() -> Iterator[Case]:
    for t, z in enumerate(SIZE):
        unit = 16 // z
        for coords in ([unit, -3], [-unit, 2], [-2 * unit, 0], [3 * unit, 5]):
            at = [40 // z + 1, 7], [64], [32 // z, 8], coords
            yield _load(t, *at)
            if t in FLOATS:
                yield _load(t, *at, oob=1)
    yield _load(U8, [13, 64], [128], [16, 4], [-16, -2])
    for steps in ([1, 2], [1, 3], [2, 1], [4, 2], [1, 8]):
        for coords in ([8, 2], [-8, -2]):
            yield _load(F16, [40, 30], [128], [16, 9], coords, estr=steps)
    yield _load(F16, [40, 9], [128], [16, 9], [8, 1], estr=[1, 2])
    for x in (96, 496, -32):
        yield _load(U8, [600], [], [256], [x])
    for coords in ([16, 3, -1, 2, 1], [8, 3, 3, -1, 2]):
        yield _load(U16, *_DEEP.values(), coords)
    for coords in ([2**31 - 8, 3, 2], [-(2**31), 3, 2], [0, 2**31 - 1, 2]):
        yield _load(U16, *_CUBE.values(), coords)
    for place in (16, 64, 32):
        yield _load(U8, [128, 64], [128], [32, 8], [0, 0], off=place)
        yield _load(U8, [128, 64], [128], [128, 8], [0, 0], off=place, swz=3)
    for stride in (0, 16):
        yield _load(F32, [100, 6, 4], [stride, 400], [32, 4, 2], [4, 1, 1])
    yield _window(_LINE, -1, 8, 32, [56, 3, 1], [2])
    for coords, offs in (([8, 18, 0], [0]), ([-8, 3, -1], [1])):
        yield _window(_LINE, -1, 8, 50, coords, offs)
    yield _window(_LINE, -1, 16, 50, [56, 3, 2], [1])
    yield _window(_LINE, -1, 16, 5, [56, 3, 5], [1])
    yield _window(_LINE, -1, 16, 50, [0, 3, 1], [1], swz=3)
    for offs in ([2, 255], [200, 1]):
        yield _window(_PLANE, -1, 16, 40, [8, -1, -1, 0], offs)


def _stores_on_grid() -> Iterator[Case]:
    for t, widths, box, left in ((U8, (1, 7, 33, 40, 45), 48, 16), (F16, (1, 17, 21, 23), 24, -8)):
        for width in widths:
            yield _store(t, [width, 5], [64], [box, 6], [0, 1])
            yield _store(t, [width, 5], [64], [box, 4], [left, -1])
    for width in (1, 9, 10, 11):
        yield _store(F32, [width, 5], [64], [12, 6], [0, 1])
    yield _store(F64, [5, 5], [64], [8, 6], [0, 1])
    for t, width, box in ((U32, 9, 12), (F16, 17, 24), (F32, 9, 12)):
        yield _store(t, [width, 5], [64], [box, 6], [0, 1], op="add")
    yield _store(F16, [40, 30], [128], [32, 8], [8, 2], swz=2, off=256)
    for steps in ([1, 2], [2, 3]):
        yield _store(F16, [40, 30], [128], [16, 9], [8, 2], estr=steps)
    yield _store(U16, *_CUBE.values(), [16, 3, -1])
    yield _store(U16, *_DEEP.values(), [16, 3, -1, 2, 1])
    yield _store(F16, [40, 30], [128], [16, 8], [8, 2], swz=2, off=256)
    yield _store(F16, [40, 30], [128], [16, 8], [8, 2], swz=3)
    for coords in ([8, 3, 2, 1], [0, 0, 0, 0]):
        yield _columns(coords, 0, 8)
    for place in (16, 64):
        yield _store(U8, [128, 30], [128], [32, 8], [0, 2], off=place)
