"""The 128 bytes of a tensor map, as the driver makes them (the format is not documented), and what is recorded of them.

``encode`` is a formulation apart from the simulator's; the recording compares it with the driver, field by field.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .case import TensorMap

#: name -> (CUtensorMapDataType, bits of an element, code in the descriptor)
KINDS = {
    "u8": (0, 8, 0),
    "u16": (1, 16, 1),
    "u32": (2, 32, 2),
    "s32": (3, 32, 3),
    "u64": (4, 64, 4),
    "s64": (5, 64, 5),
    "f16": (6, 16, 6),
    "f32": (7, 32, 7),
    "f64": (8, 64, 9),
    "bf16": (9, 16, 10),
    "f32_ftz": (10, 32, 8),
    "tf32": (11, 32, 7),
    "tf32_ftz": (12, 32, 8),
    "u4_align8": (13, 4, 11),
    "u4_align16": (14, 4, 12),
    "u6_align16": (15, 6, 13),
}


def tensor_bytes(spec: TensorMap) -> int:
    """From the first byte of the tensor to its last."""
    inner = spec.dims[0] * KINDS[spec.kind][1] // 8
    return inner + sum((n - 1) * s for n, s in zip(spec.dims[1:], spec.strides))


def encode(spec: TensorMap, address: int) -> bytes:
    """The descriptor of a tile-mode map whose tensor begins at ``address``, as driver 580 makes it for sm_90."""
    _, bits, code = KINDS[spec.kind]
    rank = len(spec.dims)
    words = [0] * 16

    def padded(values: tuple[int, ...], less: int, to: int = 5) -> list[int]:
        return [v - less for v in values] + [0] * (to - len(values))

    strides = [s // 16 for s in padded(spec.strides, 0, 4)]
    dims, box, steps = (padded(v, 1) for v in (spec.dims, spec.box, spec.steps))
    flags = rank - 1 << 4 | code << 7 | spec.interleave << 11 | spec.swizzle << 13 | spec.fill << 15
    flags |= ("tf32" in spec.kind) << 16 | spec.l2 << 17
    low, high = [s & 0xFFFFFFFF for s in strides], [s >> 32 for s in strides]
    words[0] = address
    words[1] = flags | low[0] << 32
    words[2] = low[1] | low[2] << 32
    words[3] = low[3] | sum(h << 32 + 4 * i for i, h in enumerate(high))
    words[4] = dims[0] | dims[1] << 32
    words[5] = dims[2] | dims[3] << 32
    words[6] = dims[4] | sum(s << 32 + 3 * i for i, s in enumerate(steps)) | box[0] << 56
    words[7] = box[1] | box[2] << 8 | box[3] << 16 | box[4] << 24
    # what the driver notes for itself: bytes of a box (rounded down by its steps), and of the swizzle's period
    words[8] = int(np.prod([b // s for b, s in zip(spec.box, spec.steps)])) * bits // 8
    words[9] = (16, 256, 512, 1024)[spec.swizzle]
    return np.array(words, np.uint64).tobytes()


def sweep() -> Iterator[tuple[TensorMap, int]]:
    """Parameters that vary one field at a time: (map, address)."""
    base = 0x7123_4560_0000
    plain = TensorMap("f16", (96, 40), (192,), (32, 8))
    yield plain, base
    for bit in range(4, 57, 3):
        yield plain, 1 << bit
    for kind, (_, bits, _) in KINDS.items():
        if bits >= 8:
            yield TensorMap(kind, (96, 40), (96 * bits // 8,), (16, 8)), base
            yield TensorMap(kind, (256,), (), (16,)), base
        else:
            yield TensorMap(kind, (256, 40), (256,), (128, 8), swizzle=3), base
    for swizzle, inner in itertools.product(range(8), (8, 16, 32, 64)):
        yield replace(plain, swizzle=swizzle, box=(inner, 8)), base
    for l2 in range(4):
        yield replace(plain, l2=l2), base
    for fill in range(2):
        yield replace(plain, fill=fill), base
        yield replace(plain, fill=fill, kind="u16"), base
    for rank in range(1, 6):
        dims, strides = (48, 5, 6, 7, 9)[:rank], (96, 480, 2880, 20160)[: rank - 1]
        box, steps = (16, 2, 3, 4, 5)[:rank], (1, 2, 3, 4, 5)[:rank]
        yield TensorMap("u16", dims, strides, box), base
        yield TensorMap("u16", dims, strides, box, steps), base
        for i in range(rank):
            yield TensorMap("u16", dims, strides, tuple(8 if j == i else 1 + 7 * (not j) for j in range(rank))), base
            for step in (2, 3, 8):
                yield (
                    TensorMap(
                        "u16", dims, strides, (16, 4, 9, 3, 4)[:rank], tuple(step if j == i else 1 for j in range(rank))
                    ),
                    base,
                )
        for interleave in (1, 2):
            if rank >= 3:
                yield (
                    TensorMap(
                        "u16", dims, strides, (8, 2, 3, 4, 5)[:rank], interleave=interleave, swizzle=interleave - 1
                    ),
                    base,
                )
    for size in (1, 2, 255, 256, 1 << 16, (1 << 31) + 5, 1 << 32):
        yield TensorMap("u8", (64, size), (64,), (64, min(size, 256))), base
        yield TensorMap("u8", (size, 2), (-(-size // 16) * 16,), (16, 1)), base
    for size in (0x1FFFF, 0x20000, 0x20001, 0x1FFF0):
        yield TensorMap("u8", (size,), (), (16,)), base
        yield TensorMap("u8", (16, -(-size // 16)), (16,), (16, 1)), base
    for stride in (16, 32, 0x10000, 0x123450, (1 << 36) + 16, (1 << 40) - 16):
        yield TensorMap("u8", (16, 3, 3), (stride, stride), (16, 1, 1)), base
    for inner in (16, 32, 64, 128, 256):
        yield TensorMap("u8", (256, 4), (256,), (inner, 1)), base
