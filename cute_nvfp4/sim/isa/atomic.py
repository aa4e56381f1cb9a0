"""atom and red (PTX ISA, "atom", "red"): every scope and order is the same here, because execution is sequentially
consistent."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction, Kernel, Sink
from cute_nvfp4.sim.isa.memory import SPACES
from cute_nvfp4.sim.isa.table import Mods, Op, bits, opcode
from cute_nvfp4.sim.machine.access import Access
from cute_nvfp4.sim.machine.atomics import atomic
from cute_nvfp4.sim.numerics import double, half, single

_OPS = ("and", "or", "xor", "exch", "cas", "add", "inc", "dec", "min", "max")
_TYPES = ("b16", "b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
_FLOATS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
_ALLOWED = {
    **{
        "and": ("b32", "b64"),
        "or": ("b32", "b64"),
        "xor": ("b32", "b64"),
        "exch": ("b32", "b64"),
        "cas": ("b16", "b32", "b64"),
    },
    **{"add": ("u32", "s32", "u64", "s64", *_FLOATS), "inc": ("u32",), "dec": ("u32",)},
    **{"min": ("u32", "s32", "u64", "s64", *_FLOATS[2:]), "max": ("u32", "s32", "u64", "s64", *_FLOATS[2:])},
}


def update(op: str, t: str, space: str = "shared"):
    """The function from raw memory and raw operands to raw memory in a state space ("global" differs in NaNs of f64
    and subnormals of f32)."""
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
        return _float_add(t, space) if t in _FLOATS else np.add
    if t in _FLOATS:
        pick = single.minimum if op == "min" else single.maximum
        return lambda old, b: _raw(
            half.narrow(pick(half.widen(_view(old, t), t), half.widen(_view(b, t), t), False), t)
        )
    pick = np.minimum if op == "min" else np.maximum
    view = f"{'i' if t[0] == 's' else 'u'}{bits(t) // 8}"
    return lambda old, b: pick(old.view(view), b.view(view)).view(old.dtype)


def _view(a: np.ndarray, t: str) -> np.ndarray:
    return a.view({"f32": "f4", "f64": "f8", "f16": "f2"}.get(t, a.dtype))


def _raw(a: np.ndarray) -> np.ndarray:
    return a.view(f"u{a.dtype.itemsize}")


def _float_add(t: str, space: str):
    """Sums round to nearest even. In global memory those of f32 flush subnormals, operands and results (PTX ISA,
    "atom"), and those of f64 leave a NaN as it is."""
    everywhere = space == "global"
    if t == "f64":
        total = double.sum_in_global_memory if everywhere else double.sum_in_shared_memory
        return lambda old, b: _raw(total(_view(old, t), _view(b, t)))
    if t == "f32":
        flush = single.flush if everywhere else lambda x: x
        return lambda old, b: _raw(single.canonical(flush(flush(_view(old, t)) + flush(_view(b, t)))))
    return lambda old, b: _raw(half.add_half(half.widen(_view(old, t), t), half.widen(_view(b, t), t), t))


@opcode("atom", "red")
def _atom(i: Instruction, m: Mods, k: Kernel) -> Op:
    if m.flag("async"):
        from cute_nvfp4.sim.isa.bulk import red_async

        return red_async(i, m, k)
    # ptxas takes these four in any order, and the DSL writes them in more than one.
    order, scope, space, op = "", "", "", ""
    for _ in range(4):
        order = order or m.take("relaxed", "acquire", "release", "acq_rel", "sc")
        scope = scope or m.take("cta", "cluster", "gpu", "sys")
        space = space or m.take("global", "shared", "shared::cta", "shared::cluster")
        op = op or m.take(*_OPS)
    if not op:
        raise m.refuse(f"expected one of .{' .'.join(_OPS)}")
    noftz = m.flag("noftz")
    hint = m.flag("L2::cache_hint")
    count = int(m.take("v2", "v4", "v8", default="v1")[1:])
    t = m.type(*_TYPES)
    if t not in _ALLOWED[op] or (i.base == "red" and op in ("exch", "cas")):
        raise m.refuse(f"{i.base}.{op} does not exist for .{t}")
    if (t[:3] in ("f16", "bf1")) != noftz and not (op == "add" and count > 1):
        raise m.refuse(".noftz belongs to f16 and bf16, and they need it")
    if count > 1 and (op not in ("add", "min", "max") or t not in _FLOATS or t == "f64" or space.startswith("shared")):
        raise m.refuse("vectors are for floating-point add, min and max in global memory")
    if count * bits(t) > 128 or (count == 8 and bits(t) != 16):
        raise m.refuse(f".v{count} is not for .{t}")
    raw, returns = f"b{bits(t)}", i.base == "atom" and not isinstance(i.operands[0], Sink)
    a = Access(i, SPACES[space] if space else "generic", bits(t) // 8, 1, "atomic", ("L2::cache_hint",) if hint else ())
    fns = {where: update(op, t, where) for where in ("global", "shared")}

    def fn(where: str):
        return fns["global" if where == "global" else "shared"]

    def run(g, mask, addr, off, *values):
        values = values[:-1] if hint else values
        if count == 1:
            return atomic(g, a, mask, addr, off, fn, values, returns)
        old = [atomic(g, a, mask, addr, off + j * a.unit, fn, (v,), returns) for j, v in enumerate(values[0])]
        return tuple(old) if returns else None

    element = (raw,) if count == 1 else (tuple([raw] * count),)
    src = ("addr", *element, *((raw,) if op == "cas" else ()), *(("b64",) if hint else ()))
    if i.base == "atom" and not returns:
        return Op(lambda *args: (run(*args), np.zeros((1, 1), f"u{a.unit}"))[1], element, src, "atomic", context=True)
    return Op(run, element if i.base == "atom" else (), src, "atomic", context=True)
