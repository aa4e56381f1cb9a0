"""atom and red (PTX ISA, "atom", "red"). Execution is sequentially consistent, so scopes and orders change no value."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction, Kernel, Sink
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, bits, opcode
from cute_nvfp4.sim.isa.bulk import red_async
from cute_nvfp4.sim.isa.memory import SPACES
from cute_nvfp4.sim.machine.access import Access
from cute_nvfp4.sim.machine.atomics import atomic
from cute_nvfp4.sim.numerics.atomic import FLOATS, update

_OPS = ("and", "or", "xor", "exch", "cas", "add", "inc", "dec", "min", "max")
_TYPES = ("b16", "b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
_ALLOWED = {
    **dict.fromkeys(("and", "or", "xor", "exch"), ("b32", "b64")),
    "cas": ("b16", "b32", "b64"),
    "add": ("u32", "s32", "u64", "s64", *FLOATS),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64", *FLOATS[2:])),
}


@opcode("atom", "red")
def _atom(i: Instruction, m: Mods, k: Kernel) -> Op:
    if m.flag("async"):
        return red_async(i, m, k)
    # ptxas accepts these four in any order, and the DSL writes them in different orders.
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
    if count > 1 and (op not in ("add", "min", "max") or t not in FLOATS or t == "f64" or space.startswith("shared")):
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
        old = [atomic(g, a, mask, addr, off + j * a.element, fn, (v,), returns) for j, v in enumerate(values[0])]
        return tuple(old) if returns else None

    element = (raw,) if count == 1 else (tuple([raw] * count),)
    src = ("addr", *element, *((raw,) if op == "cas" else ()), *(("b64",) if hint else ()))
    if i.base == "atom" and not returns:
        return Op(
            lambda *args: (run(*args), np.zeros((1, 1), f"u{a.element}"))[1], element, src, "atomic", context=True
        )
    return Op(run, element if i.base == "atom" else (), src, "atomic", context=True)
