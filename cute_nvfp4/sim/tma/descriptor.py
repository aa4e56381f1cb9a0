"""The tensor map: 128 bytes that describe a tensor in global memory to the copy engine (PTX ISA, "Tensors").

The ISA does not document the bytes. The positions below were found in tensor maps that the CUDA driver encodes, that
``tensormap.replace`` leaves on an H200, and that compiled CuTe DSL host code builds for sm_100a.

========  ==========  =======================================================================================
word      bits        field
========  ==========  =======================================================================================
0         all         global address
1         3:0         form: 0 or 2 tiled, 1 im2col
1         6:4         rank - 1
1         10:7        element type (``_CODES``), with bit 16 for tf32
1         12:11       interleave: 0 none, 1 16 bytes, 2 32 bytes
1         14:13       swizzle: 0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes
1         15          elements out of bounds become NaN, not zero
1         18:17       promotion of L2 sectors; no effect on values
1         20:19       swizzle atomicity: 0 16 bytes, 1 32 bytes, 2 32 bytes with 8-byte flip, 3 64 bytes
1         63:32       stride of dimension 1 / 16, low 32 bits
2         all         strides of dimensions 2 and 3 / 16, low 32 bits
3         31:0        stride of dimension 4 / 16, low 32 bits
3         47:32       high four bits of the four strides
4, 5      all         sizes of dimensions 0 to 3, less 1
6         31:0        size of dimension 4, less 1
6         46:32       five element strides of three bits, less 1
6         63:56       box size of dimension 0 (im2col: channels), less 1
7         31:0        tiled: box sizes of dimensions 1 to 4, less 1, a byte each; im2col: corners of the bounding box
7         41:32       im2col: pixels of a column, less 1
========  ==========  =======================================================================================

A word has 64 bits. Words 8 and 9 hold notes of the driver (``encode``) that the engine does not need.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cute_nvfp4.sim.errors import Hazard

BYTES = 128
"""Bytes of a tensor map."""


class InvalidTensorMap(Hazard):
    """A tensor map that no copy engine can use, or that uses a feature which is not modelled."""


#: element type codes: bits 10:7 of word 1, plus 16 for its bit 16
_CODES = {
    **{"u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f32.ftz": 8, "f64": 9},
    **{"bf16": 10, "tf32": 7 + 16, "tf32.ftz": 8 + 16, "b4x16": 11, "b4x16_p64": 12, "b6x16_p32": 13},
}
_NAMES = {v: k for k, v in _CODES.items()}


def code_of(type_name: str) -> int:
    """Returns the code of an element type: bits 10:7 of word 1, plus 16 for its bit 16."""
    return _CODES[type_name]


#: bits of one element in global memory
ELEMENT_BITS = {
    **{"u8": 8, "u16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64, "f16": 16, "f32": 32, "f32.ftz": 32},
    **{"f64": 64, "bf16": 16, "tf32": 32, "tf32.ftz": 32, "b4x16": 4, "b4x16_p64": 4, "b6x16_p32": 6},
}
PADDED = ("b4x16_p64", "b6x16_p32")
"""Types whose 16 elements take 16 bytes of shared memory: first the packed elements, then padding."""
PADDED_BOX = 128
"""The only box size of dimension 0 for padded types."""
FLOATS = ("f16", "f32", "f32.ftz", "f64", "bf16", "tf32", "tf32.ftz")
#: element types in the order of ``tensormap.replace.elemtype`` (PTX ISA, "tensormap.replace")
ELEMTYPES = (
    *("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32.ftz", "f64", "bf16", "tf32", "tf32.ftz"),
    *("b4x16", "b4x16_p64", "b6x16_p32"),
)
#: swizzles in the order of CUtensorMapSwizzle: four modes, then mode 3 with swizzle atomicity 1
SWIZZLES = ("none", "32B", "64B", "128B", "128B_ATOM_32B")
CORNER_BITS = {1: 16, 2: 8, 3: 5}
"""Bits of a corner coordinate, by the number of spatial dimensions: the coordinates of a corner share 16 bits."""
INTERLEAVES = ("none", "16B", "32B")
SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128, "128B_ATOM_32B": 128}
"""Bytes of a swizzle span, within which the swizzle permutes chunks, and which a box row may not exceed."""


@dataclass(frozen=True)
class Im2col:
    """The part of an im2col map that replaces the box. Corners have a coordinate for each spatial dimension, innermost
    first."""

    lower: tuple[int, ...]  #: the lower corner of the bounding box of base pixels
    upper: tuple[int, ...]  #: the upper corner, relative to the end of each dimension
    channels: int  #: channels of each pixel that one copy reads
    pixels: int  #: pixels that one copy reads


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map; tuples have an entry for each dimension, innermost first."""

    address: int  #: host address of the tensor
    type: str  #: a key of ``ELEMENT_BITS``
    dims: tuple[int, ...]  #: sizes of the tensor in elements
    strides: tuple[int, ...]  #: strides in bytes, from dimension 1 on
    box: tuple[int, ...]  #: sizes of the box in elements; of an im2col map, only its channels
    element_strides: tuple[int, ...]  #: steps between the elements of a box
    swizzle: str = "none"  #: one of ``SWIZZLES``
    interleave: str = "none"  #: one of ``INTERLEAVES``
    nan_fill: bool = False  #: whether elements out of bounds become NaN, not zero
    im2col: Im2col | None = None  #: None for a tiled map

    def __hash__(self) -> int:
        # Maps are keys of caches, so the hash is kept; maps decoded from equal bytes are one object.
        held = self.__dict__.get("_hash")
        if held is None:
            held = hash((self.address, self.type, self.dims, self.strides, self.box, self.element_strides))
            self.__dict__["_hash"] = held
        return held

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def bits(self) -> int:
        return ELEMENT_BITS[self.type]

    @property
    def padded(self) -> bool:
        return self.type in PADDED

    @property
    def row_chunks(self) -> int:
        """The 16-byte chunks of a box row in shared memory."""
        return self.box[0] * (8 if self.padded else self.bits) // 128

    @staticmethod
    def decode(raw: bytes) -> TensorMap:
        """Decodes 128 bytes; raises ``InvalidTensorMap``, which names the field that is invalid or not modelled."""
        return _decode(bytes(raw))

    def encode(self) -> bytes:
        """Returns the 128 bytes, without L2 promotion and the driver's notes."""
        code = _CODES[self.type]
        w = [0] * 16
        w[0] = self.address
        w[1] = (1 if self.im2col else 0) | self.rank - 1 << 4 | (code & 15) << 7 | (code >> 4) << 16
        w[1] |= INTERLEAVES.index(self.interleave) << 11 | self.nan_fill << 15
        w[1] |= min(SWIZZLES.index(self.swizzle), 3) << 13 | max(SWIZZLES.index(self.swizzle) - 3, 0) << 19
        for j, stride in enumerate(self.strides):
            word, shift = ((1, 32), (2, 0), (2, 32), (3, 0))[j]
            w[word] |= (stride >> 4 & 0xFFFFFFFF) << shift
            w[3] |= (stride >> 36 & 15) << 32 + 4 * j
        for j, size in enumerate(self.dims):
            w[4 + j // 2] |= (size - 1) << 32 * (j % 2)
        for j, step in enumerate(self.element_strides):
            w[6] |= (step - 1) << 32 + 3 * j
        if self.im2col is None:
            w[6] |= self.box[0] - 1 << 56
            for j, size in enumerate(self.box[1:]):
                w[7] |= size - 1 << 8 * j
        else:
            w[6] |= self.im2col.channels - 1 << 56
            w[7] = _corners(self.im2col) | self.im2col.pixels - 1 << 32
        return np.array(w, np.uint64).tobytes()


def _corners(im: Im2col) -> int:
    width = CORNER_BITS[len(im.lower)]
    out = 0
    for j, (low, high) in enumerate(zip(im.lower, im.upper)):
        out |= (low & (1 << width) - 1) << width * j
        out |= (high & (1 << width) - 1) << 16 + width * j
    return out


def _signed(value: int, width: int) -> int:
    return value - (1 << width) if value >> width - 1 else value


@lru_cache(maxsize=4096)
def _decode(raw: bytes) -> TensorMap:
    if len(raw) != BYTES:
        raise InvalidTensorMap(f"a tensor map has {BYTES} bytes, not {len(raw)}")
    w = [int(v) for v in np.frombuffer(raw, np.uint64)]
    form, rank = w[1] & 15, (w[1] >> 4 & 7) + 1
    if form > 2 or rank > 5:
        raise InvalidTensorMap(f"this is no tensor map: its form is {form} and its rank {rank}")
    code = (w[1] >> 7 & 15) | (w[1] >> 16 & 1) << 4
    if code not in _NAMES:
        raise InvalidTensorMap(f"the tensor map has element type code {code & 15:#x}, which is not modelled")
    if w[1] >> 11 & 3 == 3:
        raise InvalidTensorMap("the tensor map has interleave layout 3, which does not exist")
    mode, atomicity = w[1] >> 13 & 3, w[1] >> 19 & 3
    if atomicity > 1:
        raise InvalidTensorMap(f"the tensor map has swizzle atomicity {atomicity}, which is not modelled")
    if atomicity and mode != 3:
        raise InvalidTensorMap(f"swizzle atomicity {atomicity} goes with a swizzle of 128B, not {SWIZZLES[mode]}")
    strides = [w[1] >> 32, w[2] & 0xFFFFFFFF, w[2] >> 32, w[3] & 0xFFFFFFFF]
    strides = [(s | (w[3] >> 32 + 4 * j & 15) << 32) << 4 for j, s in enumerate(strides)]
    sizes = [w[4] & 0xFFFFFFFF, w[4] >> 32, w[5] & 0xFFFFFFFF, w[5] >> 32, w[6] & 0xFFFFFFFF]
    box = [(w[6] >> 56) + 1, *((w[7] >> 8 * j & 255) + 1 for j in range(4))]
    im2col = None
    if form == 1:
        if not 3 <= rank <= 5:
            raise InvalidTensorMap(f"an im2col tensor map has 3 to 5 dimensions, not {rank}")
        width = CORNER_BITS[rank - 2]
        fields = [w[7] >> first + width * j & (1 << width) - 1 for first in (0, 16) for j in range(rank - 2)]
        corners = [_signed(f, width) for f in fields]
        im2col = Im2col(tuple(corners[: rank - 2]), tuple(corners[rank - 2 :]), box[0], (w[7] >> 32 & 1023) + 1)
        box = [box[0]]
    return _checked(
        TensorMap(
            address=w[0],
            type=_NAMES[code],
            dims=tuple(s + 1 for s in sizes[:rank]),
            strides=tuple(strides[: rank - 1]),
            box=tuple(box[:rank]),
            element_strides=tuple((w[6] >> 32 + 3 * j & 7) + 1 for j in range(rank)),
            swizzle=SWIZZLES[mode + atomicity],
            interleave=INTERLEAVES[w[1] >> 11 & 3],
            nan_fill=bool(w[1] >> 15 & 1),
            im2col=im2col,
        )
    )


def _checked(m: TensorMap) -> TensorMap:
    """Returns the map, unless the driver would refuse to encode it (CUDA driver API, ``cuTensorMapEncodeTiled``) or it
    is not modelled: then it raises ``InvalidTensorMap``."""
    if m.interleave != "none":
        raise InvalidTensorMap(f"interleave layout {m.interleave} of a tensor map is not modelled")
    if m.address % 16:
        raise InvalidTensorMap(f"the tensor map's address {m.address:#x} is not a multiple of 16")
    if m.nan_fill and m.type not in FLOATS:
        raise InvalidTensorMap(f"out-of-bounds fill with NaN is for floating-point types, not {m.type}")
    if m.padded:
        return _checked_padded(m)
    row = m.box[0] * m.bits
    if row % 128:
        raise InvalidTensorMap(f"a box row of {m.box[0]} elements of {m.bits} bits is not a multiple of 16 bytes")
    if m.swizzle != "none" and row > 8 * SPAN[m.swizzle]:
        raise InvalidTensorMap(f"a box row of {row // 8} bytes does not fit into a swizzle of {m.swizzle}")
    if m.type == "b4x16" and m.dims[0] % 2:
        raise InvalidTensorMap("a tensor of packed 4-bit elements needs an even size in dimension 0")
    return m


def _checked_padded(m: TensorMap) -> TensorMap:
    """Returns the map of a padded type, unless it breaks "Restriction on Tensor Copy instructions" of the PTX ISA."""
    odd = [v for v in (m.address, *m.strides) if v % 32]
    if odd:
        raise InvalidTensorMap(f"address and strides of {m.type} are multiples of 32 bytes, not {odd[0]:#x}")
    if m.box[0] != PADDED_BOX or m.dims[0] % PADDED_BOX:
        text = f"dimension 0 of {m.type} has boxes of {PADDED_BOX} and a multiple of that as its size"
        raise InvalidTensorMap(f"{text}, not {m.box[0]} and {m.dims[0]}")
    if m.swizzle in ("32B", "64B"):
        raise InvalidTensorMap(f"{m.type} has no swizzle of {m.swizzle}")
    return m
