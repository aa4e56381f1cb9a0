"""What bulk reductions do to elements (PTX ISA, "cp.reduce.async.bulk", "cp.reduce.async.bulk.tensor").

Verified on an H200: f32 keeps subnormals and only the map type f32.ftz flushes them, inputs and result; an f64 NaN
operand keeps its payload; f16 and bf16 sums are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cute_nvfp4.sim.numerics.atomic import update

Update = Callable[[np.ndarray, np.ndarray], np.ndarray]
_INTEGERS = ("u32", "s32", "u64", "s64")
#: operations of each element type of a tensor map (an H200 raises an illegal instruction for the others)
TENSOR_TYPES = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f32.ftz", "tf32", "tf32.ftz", "f64"),
    "min": (*_INTEGERS, "f16", "bf16"),
    "max": (*_INTEGERS, "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    **dict.fromkeys(("and", "or", "xor"), ("u32", "s32", "u64")),
}
BULK_GLOBAL = {
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16"),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("min", "max"), (*_INTEGERS, "f16", "bf16")),
}
BULK_SHARED = {
    **dict.fromkeys(("and", "or", "xor"), ("b32",)),
    "add": ("u32", "s32", "u64"),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("min", "max"), ("u32", "s32")),
}


def reduction(op: str, t: str) -> tuple[np.dtype, Update]:
    """(raw type of an element, memory = update(memory, operand)) of an operation on a map type or PTX type."""
    flush = t.endswith(".ftz")
    t = t.removesuffix(".ftz").replace("tf32", "f32")
    width = int(t.lstrip("bfusit"))
    raw = np.dtype(f"u{width // 8}")
    fn = update(op, f"b{width}" if op in ("and", "or", "xor") else t)
    if t == "f64":
        fn = _keep_payload
    if flush:
        inner = fn
        fn = lambda old, b: _flush(inner(_flush(old), _flush(b)))  # noqa: E731
    return raw, fn


def _flush(x: np.ndarray) -> np.ndarray:
    """Binary32 subnormals become zeros of their sign."""
    small = x & np.uint32(0x7F800000) == 0
    return np.where(small, x & np.uint32(0x80000000), x)


def _keep_payload(old: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Binary64 sum; a NaN operand comes through as it is, the new one first, and inf - inf is 0xfff8000000000000."""
    x, y = old.view("f8"), b.view("f8")
    total = (x + y).view("u8")
    total = np.where(np.isnan(total.view("f8")), np.uint64(0xFFF8000000000000), total)
    return np.where(np.isnan(y), b, np.where(np.isnan(x), old, total))
