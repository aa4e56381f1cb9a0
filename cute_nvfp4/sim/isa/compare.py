"""Comparison and selection (PTX ISA, "Comparison and Selection Instructions")."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction, Kernel, Pair
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, opcode
from cute_nvfp4.sim.numerics import half
from cute_nvfp4.sim.numerics.single import flush

_TYPES = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
_ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_LOGIC = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_NAMES = (*_ORDERED, *_UNSIGNED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def comparison(name: str, t: str, ftz: bool, m: Mods):
    """Returns the function of two arrays that computes comparison ``name`` for type ``t``."""
    if t in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2"):
        return _float_comparison(name, t, ftz, m)
    if ftz:
        raise m.refuse(".ftz with an integer comparison")
    table = _ORDERED if t[0] == "s" else {**_ORDERED, **_UNSIGNED}
    if t[0] == "b":
        table = {"eq": np.equal, "ne": np.not_equal}
    if name not in table:
        raise m.refuse(f"comparison .{name} is not for .{t}")
    return table[name]


def _float_comparison(name: str, t: str, ftz: bool, m: Mods):
    if name in _UNSIGNED:
        raise m.refuse(f"comparison .{name} is not for .{t}")

    def prepare(a):
        a = half.widen(a, t)
        return flush(a) if ftz else a

    def decide(a, b):
        a, b = prepare(a), prepare(b)
        unordered = np.isnan(a) | np.isnan(b)
        if name == "num":
            return ~unordered
        if name == "nan":
            return unordered
        if name in _ORDERED:
            return _ORDERED[name](a, b) & ~unordered
        return _ORDERED[name[:2]](a, b) | unordered

    return decide


@opcode("setp")
def _setp(i: Instruction, m: Mods, k: Kernel) -> Op:
    name = m.take(*_NAMES, required=True)
    combine = m.take("and", "or", "xor")
    ftz, t = m.flag("ftz"), m.type(*_TYPES)
    decide = comparison(name, t, ftz, m)
    two, packed = isinstance(i.operands[0], Pair), t.endswith("x2")
    dst = (("pair", "pred", "pred"),) if two else ("pred",)
    src = (t, t, *(("pred",) if combine else ()))
    if packed:
        if not two:
            raise m.refuse("a packed setp has two destinations p|q")

        def halves(a, b, *c):
            both = decide(a, b)
            both = _LOGIC[combine](both, c[0][..., None]) if combine else both
            return both[..., 0], both[..., 1]

        return Op(halves, dst, src, "compare")

    def fn(a, b, *c):
        p = decide(a, b)
        if not two:
            return _LOGIC[combine](p, c[0]) if combine else p
        return (_LOGIC[combine](p, c[0]), _LOGIC[combine](~p, c[0])) if combine else (p, ~p)

    return Op(fn if combine or two else decide, dst, src, "compare")


@opcode("set")
def _set(i: Instruction, m: Mods, k: Kernel) -> Op:
    name = m.take(*_NAMES, required=True)
    combine = m.take("and", "or", "xor")
    ftz, d = m.flag("ftz"), m.type("u32", "s32", "f32", "f16", "bf16", "f16x2", "bf16x2")
    t = m.type(*_TYPES)
    decide = comparison(name, t, ftz, m)
    true = {"u32": 0xFFFFFFFF, "s32": -1, "f32": 1.0, "f16": 1.0, "bf16": 0x3F80}
    if t.endswith("x2"):
        if d != t or combine:
            raise m.refuse("only set with equal packed types is modelled")
        one = 0x3C00 if t == "f16x2" else 0x3F80

        def packed(a, b):
            p = decide(a, b)
            return p[..., 0].astype("u4") * np.uint32(one) | p[..., 1].astype("u4") * np.uint32(one << 16)

        return Op(packed, (d,), (t, t), "compare")
    if d not in true:
        raise m.refuse("a packed result needs packed operands")
    dtype = {"u32": "u4", "s32": "i4", "f32": "f4", "f16": "f2", "bf16": "u2"}[d]

    def fn(a, b, *c):
        p = decide(a, b)
        p = _LOGIC[combine](p, c[0]) if combine else p
        return np.where(p, np.array(true[d], dtype), np.array(0, dtype))

    return Op(fn, (d,), (t, t, *(("pred",) if combine else ())), "compare")


def _choose(a, b, p):
    if p.size == 1:
        return a if p.item() else b
    return np.where(p, a, b)


@opcode("selp")
def _selp(i: Instruction, m: Mods, k: Kernel) -> Op:
    t = m.type("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")
    raw = "b" + t[1:] if not t.startswith("f") else t
    return Op(_choose, (raw,), (raw, raw, "pred"), "compare")


@opcode("slct")
def _slct(i: Instruction, m: Mods, k: Kernel) -> Op:
    ftz = m.flag("ftz")
    t, c = m.type("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64"), m.type("s32", "f32")
    if ftz and c != "f32":
        raise m.refuse(".ftz needs an .f32 selector")
    return Op(lambda a, b, s: np.where((flush(s) if ftz else s) >= 0, a, b), (t,), (t, t, c), "compare")
