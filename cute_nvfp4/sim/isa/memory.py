"""Loads, stores, moves and address conversion (PTX ISA, "Data Movement and Conversion Instructions")."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.frontend.model import Address, Imm, Instruction, Kernel, Reg, Sink, Special, Symbol, Vector
from cute_nvfp4.sim.frontend.opcodes import WIDE, Mods, Op, bits, opcode
from cute_nvfp4.sim.isa.bulk import st_async
from cute_nvfp4.sim.machine import access
from cute_nvfp4.sim.machine.access import Access
from cute_nvfp4.sim.machine.cluster import RANK_SHIFT
from cute_nvfp4.sim.machine.layout import WINDOW_SHIFT, WINDOWS

SPACES = {
    **{"global": "global", "shared": "shared", "shared::cta": "shared", "shared::cluster": "cluster", "local": "local"},
    **{"param": "param", "const": "global", "param::entry": "param"},
}
"""The simulator's state spaces, by the names of PTX."""
_TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64", "b128")
_EVICT = ("evict_normal", "evict_unchanged", "evict_first", "evict_last")
_LEVELS = (*(f"{level}::{e}" for level in ("L1", "L2") for e in _EVICT), "L1::no_allocate", "L2::cache_hint")
_LOAD_OPERATORS = ("ca", "cg", "cs", "lu", "cv", "nc", "L2::64B", "L2::128B", "L2::256B", "unified")
_STORE_OPERATORS = ("wb", "cg", "cs", "wt")
_SCOPES = ("cta", "cluster", "gpu", "sys")


def _order(m: Mods) -> str:
    """Takes memory order and scope. Execution is sequentially consistent, so only the checks need them."""
    order = m.take("weak", "relaxed", "acquire", "release", "volatile", "mmio")
    if order not in ("relaxed", "acquire", "release", "mmio"):
        return order
    return f"{order}.{m.take(*_SCOPES, required=True)}"


def _order_and_space(m: Mods) -> tuple[str, str]:
    """Takes memory order and state space, which ptxas accepts in either order."""
    order = _order(m)
    space = SPACES.get(m.take(*SPACES), "generic")
    return order or _order(m), space


def _policy(m: Mods, kind: str) -> tuple[str, ...]:
    """Takes cache operators, eviction priorities and prefetch sizes, which only the counters need."""
    out, operators = [], _LOAD_OPERATORS if kind == "load" else _STORE_OPERATORS
    while word := m.take(*operators, *_LEVELS):
        out.append(word)
    return tuple(out)


def _vector(m: Mods, space: str) -> tuple[int, str]:
    count = int(m.take("v2", "v4", "v8", default="v1")[1:])
    t = m.type(*_TYPES)
    if count * bits(t) > (256 if space == "global" else 128) or (count == 8 and bits(t) != 32):
        raise m.refuse(f".v{count}.{t} is wider than an access of .{space} can be")
    return count, t


def _access(i: Instruction, m: Mods, k: Kernel, kind: str, address: int) -> tuple[Access, str, tuple[str, ...]]:
    """Returns (access, element type, types of the cache-policy operands); ``address`` is the index of the address
    operand."""
    order, space = _order_and_space(m)
    policy = _policy(m, kind)
    count, t = _vector(m, space)
    if (t == "b128" and count > 1) or (kind == "store" and space == "param"):
        what = "vectors of b128" if count > 1 else "stores to parameters"
        raise m.refuse(f"{what} are not modelled")
    operand = i.operands[address]
    if not isinstance(operand, Address):
        raise m.refuse("an address in brackets is wanted")
    if space == "param" and isinstance(operand.base, Symbol) and operand.base.name not in {p.name for p in k.params}:
        raise m.refuse(f"{operand.base.name} is not a kernel parameter")
    element, count = (8, 2) if t == "b128" else (bits(t) // 8, count)
    constant = i.base == "ldu" or "nc" in policy
    if constant and (kind == "store" or space not in ("global", "generic") or order):
        raise m.refuse("ld.nc and ldu are weak loads of global memory")
    a = Access(i, space, element, count, kind, (*([order] if order else []), *policy), constant=constant)
    return a, t, ("b64",) if "L2::cache_hint" in policy else ()


@opcode("ld", "ldu")
def _ld(i: Instruction, m: Mods, k: Kernel) -> Op:
    a, t, hint = _access(i, m, k, "load", 1)
    view = {"f32": "f4", "f64": "f8"}.get(t, t[0].replace("s", "i").replace("b", "u") + str(a.element))

    def fn(g, mask, addr, off, *_):
        out = access.load(g, a, mask, addr, off)
        if t == "b128":
            return _join(out)
        if t[0] in "bu":
            return out
        return tuple(v.view(view) for v in out) if a.count > 1 else out.view(view)

    dst = (t,) if a.count == 1 or t == "b128" else ((t,) * a.count,)
    return Op(fn, dst, ("addr", *hint), f"load.{a.space}", context=True, relaxed=True)


@opcode("st")
def _st(i: Instruction, m: Mods, k: Kernel) -> Op:
    if m.flag("async"):
        return st_async(i, m, k)
    a, t, hint = _access(i, m, k, "store", 0)
    raw = f"b{8 * a.element}"

    def fn(g, mask, addr, off, value, *_):
        if t == "b128":
            value = (value["lo"], value["hi"])
        access.store(g, a, mask, addr, off, value if a.count > 1 else (value,))

    src = (t,) if t == "b128" else (raw,) if a.count == 1 else ((raw,) * a.count,)
    return Op(fn, (), ("addr", *src, *hint), f"store.{a.space}", context=True, relaxed=True)


@opcode("prefetch", "prefetchu", "applypriority", "createpolicy")
def _prefetch(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Builds cache hints, which change no value. Their addresses are not checked (PTX ISA: prefetch never faults)."""
    if i.base == "createpolicy":
        kind = m.take("fractional", "cvt", "range", required=True)
        while m.take("L2", "global", *_LEVELS):
            pass
        m.type("b64")
        if kind == "range":
            return Op(lambda g, mask, *a: np.zeros((1, 1), "u8"), ("b64",), ("addr", "u32", "u32"), "cache", True)
        src = tuple("f32" if kind == "fractional" else "b32" for _ in i.operands[1:])
        return Op(lambda *a: np.zeros((1, 1), "u8"), ("b64",), src, "cache")
    space = m.take("global", "local", "param", "const")
    if not m.flag("tensormap"):
        if space in ("param", "const"):
            raise m.refuse("only tensor maps are prefetched from there")
        m.take("L1", "L2", "L2::evict_last", "L2::evict_normal", required=True)
    size = ("static",) if i.base == "applypriority" else ()
    return Op(lambda g, mask, addr, off: None, (), ("addr", *size), "cache", context=True)


@opcode("mov")
def _mov(i: Instruction, m: Mods, k: Kernel) -> Op:
    t = m.type("pred", "b16", "b32", "b64", "b128", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")
    raw = t if t == "pred" else f"b{bits(t)}"
    if len(i.operands) != 2:
        raise m.refuse("mov takes two operands")
    dst, src = i.operands
    if isinstance(src, Vector):
        return _pack(m, raw, len(src.items))
    if isinstance(dst, Vector):
        return _unpack(m, raw, len(dst.items))
    if isinstance(src, (Reg, Imm, Special, Symbol)) or isinstance(dst, Sink):
        return Op(lambda a: a, (raw,), (raw,), "move")
    raise m.refuse("this form of mov is not modelled")


def _pack(m: Mods, t: str, count: int) -> Op:
    part = bits(t) // count
    if t == "b128" and count == 2:
        return Op(_join, (t,), (("b64", "b64"),), "move")
    if part not in (8, 16, 32) or bits(t) % count:
        raise m.refuse(f"a {t} cannot be packed from {count} elements")
    wide = f"u{bits(t) // 8}"

    def fn(items):
        out = items[0].astype(wide)
        for j, item in enumerate(items[1:], 1):
            out = out | item.astype(wide) << np.array(j * part, wide)
        return out

    return Op(fn, (t,), (tuple([f"b{part}"] * count),), "move")


def _join(items):
    out = np.zeros(np.broadcast_shapes(*(v.shape for v in items)), WIDE)
    out["lo"], out["hi"] = items
    return out


def _unpack(m: Mods, t: str, count: int) -> Op:
    part = bits(t) // count
    if t == "b128" and count == 2:
        return Op(lambda a: (a["lo"].copy(), a["hi"].copy()), (("b64", "b64"),), (t,), "move")
    if part not in (8, 16, 32) or bits(t) % count:
        raise m.refuse(f"a {t} cannot be unpacked into {count} elements")
    wide, narrow = f"u{bits(t) // 8}", f"u{part // 8}"

    def fn(a):
        return tuple((a >> np.array(j * part, wide)).astype(narrow) for j in range(count))

    return Op(fn, (tuple([f"b{part}"] * count),), (t,), "move")


def _window(space: str) -> int:
    """Returns the generic address window of a state space; the shared memory of a cluster is one window."""
    return WINDOWS.get(SPACES[space].replace("cluster", "shared"), 0)


@opcode("cvta")
def _cvta(i: Instruction, m: Mods, k: Kernel) -> Op:
    back = m.flag("to")
    space = m.take(*SPACES, required=True)
    t = m.type("u32", "u64")
    window = _window(space) << WINDOW_SHIFT
    if t == "u32" or not window:
        return Op(lambda a: a, (t,), (t,), "move")
    tag = np.uint64(window)
    return Op((lambda a: a & ~tag) if back else (lambda a: a | tag), (t,), (t,), "move")


@opcode("isspacep")
def _isspacep(i: Instruction, m: Mods, k: Kernel) -> Op:
    space = m.take(*SPACES, required=True)
    window = np.uint64(_window(space))
    if SPACES[space] != "shared":
        return Op(lambda a: a >> np.uint64(WINDOW_SHIFT) == window, ("pred",), ("u64",), "compare")

    def own(g, mask, a):
        """Returns whether addresses are in the shared memory of the executing CTA, which .shared means."""
        rank = g.wave.rank_of_warp[g.warps].astype("u8")[:, None]
        holder = a >> np.uint64(RANK_SHIFT) & np.uint64(0xFF)
        return (a >> np.uint64(WINDOW_SHIFT) == window) & (holder == rank)

    return Op(own, ("pred",), ("u64",), "compare", context=True)
