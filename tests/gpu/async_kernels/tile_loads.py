"""Tile loads of tensor maps: cp.async.bulk.tensor from global to shared memory, the image dumped raw.

The coordinate of dimension 0 is always a multiple of 16 bytes: the H200 executes no other (see :mod:`refusals`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import text
from .case import Case, Pointer, TensorMap
from .descriptor import KINDS
from .tile_model import load, tile_bytes

Load = tuple[tuple[int, ...], int]


def data(size: int, seed: int = 0) -> np.ndarray:
    """Bytes to copy."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def floats(kind: str, count: int) -> np.ndarray:
    """Bytes of floats of every sort: subnormals, infinities, NaNs, values halfway between two tf32 values."""
    rng = np.random.default_rng(count)
    size = KINDS[kind][1] // 8
    bits = rng.integers(0, 1 << (8 * size - 1), count, dtype=np.uint64) << np.uint64(1)
    if size == 4:
        special = [
            0,
            1 << 31,
            1,
            0x1000,
            0x7FFFFF,
            0x800FFF,
            0x7F800000,
            0xFF800000,
            0x7F800001,
            0x7FC00000,
            0xFFFFFFFF,
        ]
        special += [0x3F800000 + d for d in (0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2FFF, 0x3000, 0x3001, 0x7FF000, 0x7FFFFF)]
        special += [0x7F7FFFFF, 0x7F7FF000, 0x7F7FEFFF, 0x00001000, 0x00003000, 0x80001000, 0x807FFFFF]
        bits[: len(special)] = special
    return bits.astype(f"u{size}").view(np.uint8)


def kernel(spec: TensorMap, loads: list[Load], span: int, form: str = "shared::cluster", hint: bool = False) -> str:
    """Fills shared memory with a pattern, loads the tiles on one mbarrier, and dumps ``span`` bytes."""
    text.restart_labels()
    rank = len(spec.dims)
    lines = [f"mbarrier.arrive.expect_tx.shared::cta.b64 _, {text.at(span)}, {len(loads) * tile_bytes(spec)};"]
    cache = ".L2::cache_hint" if hint else ""
    if hint:
        lines.append("createpolicy.fractional.L2::evict_last.b64 %d10, 1.0;")
        lines.append("prefetch.tensormap [%m0];")
    for coordinates, to in loads:
        where = ", ".join(map(str, coordinates))
        if hint:
            lines.append(f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile [%m0, {{{where}}}];")
        lines.append(f"add.u32 %r1, %base, {to};")
        lines.append(
            f"cp.async.bulk.tensor.{rank}d.{form}.global.tile.mbarrier::complete_tx::bytes{cache} "
            f"[%r1], [%m0, {{{where}}}], {text.at(span)}{', %d10' if hint else ''};"
        )
    body = [text.fill(0, span), text.elected([text.init(span), text.INIT_FENCE]), text.PROXY_FENCE, "bar.sync 0;"]
    body += [text.elected(lines), text.wait(span), text.dump(0, span)]
    return text.module("\n  ".join(body), 1, 1)


def case(name: str, spec: TensorMap, memory: np.ndarray, loads: list[Load], span: int, **options) -> Case:
    """``memory`` is buffer 1; buffer 0 gets the image of shared memory."""
    known = options.pop("known", True)
    spec = TensorMap(**{**spec.__dict__, "buffer": 1})

    def expected(buffers: list[np.ndarray]) -> dict[int, np.ndarray]:
        image = np.full(span, text.POISON, np.uint8)
        for coordinates, to in loads:
            load(spec, memory, coordinates, image, to)
        return {0: image, 1: memory}

    return Case(
        f"tile_load {name}",
        kernel(spec, loads, span, **options),
        [np.zeros(span, np.uint8), memory],
        [Pointer(0), spec],
        block=64,
        smem=span + 16,
        expected=expected if known else None,
        notes={"loads": loads},
    )


_SPAN = {0: 64, 1: 32, 2: 64, 3: 128}


def cases() -> Iterator[Case]:
    yield from _swizzles()
    yield from _types()
    yield from _ranks()
    yield from _forms()


def _swizzles() -> Iterator[Case]:
    """Every swizzle: bounds on all sides, tiles at every 128 bytes of the pattern, rows narrower than the span."""
    memory = data(160 * 20 + 64)
    for swizzle in range(4):
        box = (_SPAN[swizzle] // 2, 8)
        spec = TensorMap("u16", (70, 20), (160,), box, swizzle=swizzle, offset=32)
        corners = [((0, 0), 0), ((-8, -3), 1024), ((56, 15), 2048), ((-72, 4), 3072), ((8, 19), 4096)]
        yield case(f"bounds swizzle {swizzle}", spec, memory, corners, 5120)
        step = 128 + 8 * _SPAN[swizzle]
        places = [((8 * k, k), step * k) for k in range(8 if swizzle == 3 else 5)]
        yield case(f"places swizzle {swizzle}", spec, memory, places, -(-(places[-1][1] + 1024) // 128) * 128)
        if swizzle > 1:
            narrow = TensorMap("u16", (70, 20), (160,), (box[0] // 2, 8), swizzle=swizzle, offset=32)
            yield case(f"narrow rows swizzle {swizzle}", narrow, memory, [((16, 1), 0), ((32, -4), 1024)], 2048)
            narrow = TensorMap("u8", (140, 20), (160,), (48, 8), swizzle=swizzle, offset=32)
            yield case(f"rows of 48 swizzle {swizzle}", narrow, memory, [((16, 1), 0), ((32, -4), 1024)], 2048)
    for inner in (16, 48, 80, 112, 256):
        spec = TensorMap("u8", (140, 20), (160,), (inner, 4), offset=32)
        yield case(f"rows of {inner}", spec, memory, [((0, 0), 0), ((-16, 18), 1152)], 2304)


def _types() -> Iterator[Case]:
    """Every element type, with zeros and with NaNs for what is out of bounds."""
    for kind, (_, bits, _) in KINDS.items():
        if bits < 8:
            continue
        size = bits // 8
        real = kind[0] in "fbt"
        memory = floats(kind, 48 * 8) if real else data(48 * 8 * size, size)
        for fill in (0, 1) if real else (0,):
            for swizzle in (0, 2):
                spec = TensorMap(kind, (45, 7), (48 * size,), (64 // size, 4), swizzle=swizzle, fill=fill)
                q = 16 // size
                loads = [((4 * k * q, 0), 256 * k) for k in range(6)]
                loads += [((-q, -2), 2048), ((2 * q, 5), 2304), ((5 * q, 2), 2560)]
                known = "tf32" not in kind and "ftz" not in kind
                yield case(f"{kind} fill {fill} swizzle {swizzle}", spec, memory, loads, 2816, known=known)


def _ranks() -> Iterator[Case]:
    """One to five dimensions, steps between elements, strides that overlap."""
    memory = data(8192, 5)
    dims, strides = (24, 5, 4, 3, 3), (48, 240, 1008, 2096)
    for rank in range(1, 6):
        box = ((16,), (16, 3), (16, 3, 2), (16, 2, 3, 2), (16, 2, 2, 2, 2))[rank - 1]
        for swizzle in (0, 1):
            spec = TensorMap("u16", dims[:rank], strides[: rank - 1], box, swizzle=swizzle)
            loads = [((0,) * rank, 0), ((-8,) + (-1,) * (rank - 1), 512), ((16,) + (2,) * (rank - 1), 1024)]
            loads.append(((8, 1, 3, 0, 1)[:rank], 1536))
            yield case(f"{rank}d swizzle {swizzle}", spec, memory, loads, 2048)
        steps = (1, 2, 3, 2, 2)[:rank]
        for i in range(1, rank):
            wide = tuple(b if j != i else 5 for j, b in enumerate(box))
            spec = TensorMap(
                "u16", dims[:rank], strides[: rank - 1], wide, tuple(2 if j == i else 1 for j in range(rank))
            )
            loads = [((0,) * rank, 0), ((-8,) + (-1,) * (rank - 1), 1024)]
            yield case(f"{rank}d step 2 of dimension {i}", spec, memory, loads, 2048)
        if rank > 1:
            spec = TensorMap("u16", dims[:rank], strides[: rank - 1], tuple(min(16, b * 2) for b in box), steps)
            yield case(
                f"{rank}d steps {steps}",
                spec,
                memory,
                [((8,) + (1,) * (rank - 1), 0), ((-8,) + (-2,) * (rank - 1), 2048)],
                4096,
            )
    spec = TensorMap("u16", (96,), (), (32,), (2,))
    yield case("1d step 2 of dimension 0", spec, memory, [((8,), 0), ((80,), 512)], 1024)
    spec = TensorMap("u32", (20, 16), (16,), (8, 8), swizzle=1)
    yield case("strides that overlap", spec, memory, [((0, 0), 0), ((16, 12), 1024)], 2048)
    for swizzle, box in ((2, (32, 4, 2)), (3, (64, 2, 2, 2)), (3, (64, 2, 2, 1, 2))):
        rank = len(box)
        spec = TensorMap("bf16", (90, 4, 3, 2, 2)[:rank], (192, 768, 2304, 4608)[: rank - 1], box, swizzle=swizzle)
        loads = [((0,) * rank, 0), ((-8,) + (-1,) * (rank - 1), 1024), ((48,) + (1,) * (rank - 1), 2048)]
        yield case(f"{rank}d bf16 swizzle {swizzle}", spec, data(9216, 6), loads, 3072)


def _forms() -> Iterator[Case]:
    """What must not change the result: L2 promotion, cache hints, prefetches, the state space as written."""
    memory = data(160 * 20 + 64)
    loads = [((8, 2), 0), ((-8, -3), 1024)]
    for l2 in (1, 2, 3):
        spec = TensorMap("f16", (70, 20), (160,), (64, 8), swizzle=3, l2=l2)
        yield case(f"l2 promotion {l2}", spec, memory, loads, 2048)
    spec = TensorMap("f16", (70, 20), (160,), (64, 8), swizzle=3)
    yield case("shared::cta", spec, memory, loads, 2048, form="shared::cta")
    yield case("hint and prefetch", spec, memory, loads, 2048, hint=True)
