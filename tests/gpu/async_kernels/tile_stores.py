"""Tile stores and reductions: cp.async.bulk.tensor and cp.reduce.async.bulk.tensor from shared to global memory.

No coordinate is negative: the H200 executes no such store (see :mod:`refusals`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import text
from .case import Case, Pointer, TensorMap
from .descriptor import KINDS
from .tile_loads import data
from .tile_model import stored

Tile = tuple[tuple[int, ...], int]


def kernel(spec: TensorMap, tiles: list[Tile], span: int, reduction: str = "", read: bool = False) -> str:
    text.restart_labels()
    opcode = f"cp.reduce.async.bulk.tensor.{len(spec.dims)}d.global.shared::cta.{reduction}" if reduction else ""
    opcode = opcode or f"cp.async.bulk.tensor.{len(spec.dims)}d.global.shared::cta"
    lines = []
    for coordinates, source in tiles:
        lines.append(f"add.u32 %r1, %base, {source};")
        lines.append(f"{opcode}.tile.bulk_group [%m0, {{{', '.join(map(str, coordinates))}}}], [%r1];")
        lines.append("cp.async.bulk.commit_group;")
    # each group for itself, so that the reads of one wait and the writes of all are waited for
    lines += [f"cp.async.bulk.wait_group.read {len(tiles) - 1};"] if read else []
    lines.append("cp.async.bulk.wait_group 0;")
    body = [text.bring(0, span), text.PROXY_FENCE, "bar.sync 0;", text.elected(lines)]
    return text.module("\n  ".join(body), 1, 1)


def case(name: str, spec: TensorMap, memory: np.ndarray, shared: np.ndarray, tiles: list[Tile], **options) -> Case:
    combine = options.pop("combine", None)
    known = options.pop("known", True)
    spec = TensorMap(**{**spec.__dict__, "buffer": 1})

    def expected(_: list[np.ndarray]) -> dict[int, np.ndarray]:
        after = memory.copy()
        for coordinates, source in tiles:
            stored(spec, after, coordinates, shared, source, combine)
        return {0: shared, 1: after}

    return Case(
        f"tile_store {name}",
        kernel(spec, tiles, len(shared), **options),
        [shared, memory],
        [Pointer(0), spec],
        block=64,
        smem=len(shared),
        expected=expected if known else None,
    )


def cases() -> Iterator[Case]:
    for swizzle in range(4):
        spec = TensorMap("u16", (70, 20), (160,), (16 << max(swizzle - 1, 0), 8), swizzle=swizzle, offset=32)
        poison = np.full(160 * 20 + 64, 0x5A, np.uint8)
        tiles = [((0, 0), 0), ((64, 3), 1152), ((56, 17), 2304), ((0, 9), 3456), ((80, 0), 0)]
        yield case(f"clipped swizzle {swizzle}", spec, poison, data(4608, 8), tiles, read=True)
    for rank in (1, 2, 3, 4, 5):
        spec = TensorMap(
            "u32",
            (14, 4, 3, 3, 2)[:rank],
            (64, 256, 768, 2304)[: rank - 1],
            (8, 2, 2, 2, 2)[:rank],
            swizzle=int(rank > 2),
        )
        poison = np.full(4608 if rank > 3 else 1024, 0x5A, np.uint8)
        tiles = [((4,) + (1,) * (rank - 1), 0), ((0,) * rank, 1024), ((8,) + (2,) * (rank - 1), 2048)]
        yield case(f"{rank}d", spec, poison, data(3072, 9), tiles[:1] if rank == 1 else tiles[1:])
    spec = TensorMap("u16", (40, 9), (80,), (16, 8), (1, 3))
    yield case("step 3", spec, np.full(720, 0x5A, np.uint8), data(512, 9), [((8, 1), 0)])
    yield from _reductions()


def _reductions() -> Iterator[Case]:
    """Reductions of every type: one tile inside the tensor, one over its edge."""
    integer = {"add": "+", "min": "min", "max": "max", "and": "&", "or": "|", "xor": "^", "inc": "inc", "dec": "dec"}
    for kind, operations in {
        "u32": integer,
        "s32": ("add", "min", "max", "and", "or", "xor"),
        "u64": ("add", "min", "max", "and", "or", "xor"),
        "s64": ("min", "max"),
        "f16": ("add", "min", "max"),
        "bf16": ("add", "min", "max"),
        "f32": ("add",),
    }.items():
        size = KINDS[kind][1] // 8
        for operation in operations:
            spec = TensorMap(kind, (96 // size, 10), (96,), (64 // size, 4), swizzle=2)
            memory, shared = operands(kind, 960 // size, 1), operands(kind, 512 // size, 2)
            # the second tile is clipped on the right and below
            tiles = [((16 // size, 1), 0), ((48 // size, 8), 256)]
            combine = combiner(kind, operation)
            yield case(
                f"reduce {operation} {kind}",
                spec,
                memory,
                shared,
                tiles,
                reduction=operation,
                combine=combine,
                known=combine is not None,
            )


def operands(kind: str, count: int, seed: int) -> np.ndarray:
    """Bytes of ``count`` operands: any integers; floats near one another, and special ones."""
    rng = np.random.default_rng(seed)
    size = KINDS[kind][1] // 8
    bits = rng.integers(0, 1 << (8 * size), count, dtype=np.uint64, endpoint=False) if size < 8 else None
    if bits is None:
        bits = rng.integers(0, np.iinfo(np.uint64).max, count, dtype=np.uint64)
    if kind[0] in "fb":
        near = rng.standard_normal(count).astype(np.float32)
        if kind == "f32":
            close = near.view(np.uint32).astype(np.uint64)
        elif kind == "f16":
            close = near.astype(np.float16).view(np.uint16).astype(np.uint64)
        else:
            close = (near.view(np.uint32) >> 16).astype(np.uint64)
        bits = np.where(rng.integers(0, 4, count) == 0, bits, close)
    else:
        bits[::7] = bits[::7] & np.uint64(3)
    return bits.astype(f"u{size}").view(np.uint8).copy()


def combiner(kind: str, operation: str):
    """The scalar operation on the bytes of an element, None where only the device is asked."""
    signed = kind[0] == "s"
    size = KINDS[kind][1] // 8
    if kind[0] in "fb":
        if (kind, operation) != ("f32", "add"):
            return None
        return lambda a, b: _bytes(_f32_sum(a, b), 4)
    functions = {
        "add": lambda a, b: a + b,
        "min": min,
        "max": max,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "inc": lambda a, b: 0 if a >= b else a + 1,
        "dec": lambda a, b: b if a == 0 or a > b else a - 1,
    }
    function = functions[operation]

    def combine(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        a, b = (int.from_bytes(x.tobytes(), "little", signed=signed) for x in (old, new))
        return _bytes(function(a, b), size)

    return combine


def _f32_sum(old: np.ndarray, new: np.ndarray) -> int:
    """Sums of f32; a NaN result is the canonical one."""
    with np.errstate(all="ignore"):
        value = old.view(np.float32) + new.view(np.float32)
    return 0x7FFFFFFF if np.isnan(value)[0] else int(value.view(np.uint32)[0])


def _bytes(value: int, size: int) -> np.ndarray:
    return np.frombuffer((value & (1 << 8 * size) - 1).to_bytes(size, "little"), np.uint8)
