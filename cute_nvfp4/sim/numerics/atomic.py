"""The arithmetic of atomic operations (PTX ISA, "atom", "red")."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.numerics import double, half, single

FLOATS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")


def update(op: str, t: str, space: str = "shared"):
    """Returns the function of an atomic operation, which computes the new raw memory words from the old ones and the
    raw operands. State space "global" differs from the others in the NaNs of f64 and the subnormals of f32."""
    if op in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op]
    if op == "exch":
        return lambda old, b: b
    if op == "cas":
        return lambda old, b, c: np.where(old == b, c, old)
    if op == "inc":
        return lambda old, b: np.where(old >= b, np.uint32(0), old + np.uint32(1))
    if op == "dec":
        return lambda old, b: np.where((old == 0) | (old > b), b, old - np.uint32(1))
    if op == "add":
        return _float_add(t, space) if t in FLOATS else np.add
    if t in FLOATS:
        pick = single.minimum if op == "min" else single.maximum
        return lambda old, b: _raw(
            half.narrow(pick(half.widen(_view(old, t), t), half.widen(_view(b, t), t), False), t)
        )
    pick = np.minimum if op == "min" else np.maximum
    view = f"{'i' if t[0] == 's' else 'u'}{int(t[1:]) // 8}"
    return lambda old, b: pick(old.view(view), b.view(view)).view(old.dtype)


def _view(a: np.ndarray, t: str) -> np.ndarray:
    return a.view({"f32": "f4", "f64": "f8", "f16": "f2"}.get(t, a.dtype))


def _raw(a: np.ndarray) -> np.ndarray:
    return a.view(f"u{a.dtype.itemsize}")


def _float_add(t: str, space: str):
    """Returns the function of a floating-point addition, which rounds to nearest even. In global memory, f32 flushes
    subnormal operands and results (PTX ISA, "atom"), and f64 does not quiet NaNs."""
    everywhere = space == "global"
    if t == "f64":
        total = double.sum_in_global_memory if everywhere else double.sum_in_shared_memory
        return lambda old, b: _raw(total(_view(old, t), _view(b, t)))
    if t == "f32":
        flush = single.flush if everywhere else lambda x: x
        return lambda old, b: _raw(single.canonical(flush(flush(_view(old, t)) + flush(_view(b, t)))))
    return lambda old, b: _raw(half.add_half(half.widen(_view(old, t), t), half.widen(_view(b, t), t), t))
