"""Arithmetic of bulk reductions (PTX ISA, "cp.reduce.async.bulk", "cp.reduce.async.bulk.tensor").

Verified on an H200: f32 keeps subnormals and only the map type f32.ftz flushes them, inputs and result; an f64 NaN
operand keeps its payload; f16 and bf16 sums are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cute_nvfp4.sim.numerics.atomic import update

Update = Callable[[np.ndarray, np.ndarray], np.ndarray]
_INTEGERS = ("u32", "s32", "u64", "s64")
#: element types of a tensor map for each operation (an H200 raises an illegal instruction for other types)
TENSOR_TYPES = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f32.ftz", "tf32", "tf32.ftz", "f64"),
    "min": (*_INTEGERS, "f16", "bf16"),
    "max": (*_INTEGERS, "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    **dict.fromkeys(("and", "or", "xor"), ("u32", "s32", "u64")),
}
#: PTX types of cp.reduce.async.bulk for each operation, to global memory and to shared memory
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
    """Returns (raw dtype of an element, update) of the operation ``op`` on a type ``t`` of tensor maps or of PTX.

    The new memory is ``update(memory, operand)``, on arrays of the raw dtype.
    """
    # As an atomic in global memory does, .ftz flushes subnormals, and f64 keeps the payload of NaNs.
    space = "global" if t == "f64" or t.endswith(".ftz") else "shared"
    t = t.removesuffix(".ftz").replace("tf32", "f32")
    width = int(t.lstrip("bfusit"))
    return np.dtype(f"u{width // 8}"), update(op, f"b{width}" if op in ("and", "or", "xor") else t, space)
