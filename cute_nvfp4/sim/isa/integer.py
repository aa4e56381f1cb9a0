"""Integer arithmetic (PTX ISA, "Integer Arithmetic Instructions" and "Extended-Precision Integer Arithmetic
Instructions")."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction, Kernel, Reg
from cute_nvfp4.sim.frontend.opcodes import VIEW, Mods, Op, opcode, plain
from cute_nvfp4.sim.numerics import integer as num

INTS = ("u16", "u32", "u64", "s16", "s32", "s64")
CARRY = "%cc"
_NO_CARRY = np.zeros((1, 1), bool)

plain({"div": num.div, "rem": num.rem}, INTS, ("", ""))
plain({"neg": np.negative, "abs": np.abs}, ("s16", "s32", "s64"))
plain({"sad": lambda a, b, c: c + np.where(a < b, b - a, a - b)}, INTS, ("", "", ""))


def _carry(i: Instruction, k: Kernel, reads: bool, writes: bool) -> tuple[tuple, tuple]:
    """Makes the condition-code register an operand where the instruction ``reads`` or ``writes`` it. Returns the types
    that this adds to the destinations and to the sources."""
    k.regs.setdefault(CARRY, "pred")
    if not any(isinstance(o, Reg) and o.name == CARRY for o in i.operands):
        head, *tail = i.operands
        i.operands = (head, *([Reg(CARRY)] if writes else []), *tail, *([Reg(CARRY)] if reads else []))
    return (("pred",) if writes else ()), (("pred",) if reads else ())


def _add_carry(a, b, c, subtract: bool):
    """Returns a + b + c, or a - b - c, and its carry or borrow."""
    one = c.astype(a.dtype)
    if subtract:
        return a - b - one, (a < b) | ((a == b) & c)
    total = a + b
    return total + one, (total < a) | ((total + one) < total)


@opcode("add", "sub", "addc", "subc")
def _add(i: Instruction, m: Mods, k: Kernel) -> Op:
    base, subtract = i.base, i.base.startswith("sub")
    carry_out, saturate, carry_in = m.flag("cc"), m.flag("sat"), base.endswith("c")
    t = m.type(*INTS, "u16x2", "s16x2")
    if t.endswith("x2"):
        return Op(_packed(t, np.subtract if subtract else np.add), ("b32",), ("b32", "b32"))
    if carry_out or carry_in:
        extra_dst, extra_src = _carry(i, k, carry_in, carry_out)
        t = "u" + t[1:]

        def fn(a, b, c=_NO_CARRY):
            total, carry = _add_carry(a, b, c, subtract)
            return (total, carry) if carry_out else total

        return Op(fn, (t, *extra_dst), (t, t, *extra_src))
    if saturate:
        if t != "s32":
            raise m.refuse(".sat is only for .s32")
        sign = -1 if subtract else 1
        return Op(
            lambda a, b: num.saturated(a.astype("i8") + sign * b.astype("i8"), np.dtype("i4")), ("s32",), ("s32", "s32")
        )
    t = "u" + t[1:]
    return Op(np.subtract if subtract else np.add, (t,), (t, t))


def _packed(t: str, fn):
    """Returns a function that applies ``fn`` to the 16-bit halves of 32-bit values."""
    dtype = np.dtype("i2" if t[0] == "s" else "u2")

    def both(*args):
        halves = [np.ascontiguousarray(a).view(dtype).reshape(*a.shape, 2) for a in args]
        return np.ascontiguousarray(fn(*halves)).view("u4")[..., 0]

    return both


def _product(t: str, mode: str):
    """Returns (function, result type) of a product of two values of type ``t``; the function is None if the product
    does not exist."""
    if mode == "wide":
        if t.endswith("64"):
            return None, t
        return num.mul_wide, t[0] + str(2 * int(t[1:]))
    return (num.mul_hi if mode == "hi" else np.multiply), t


@opcode("mul", "mad", "madc")
def _mul(i: Instruction, m: Mods, k: Kernel) -> Op:
    mode = m.take("lo", "hi", "wide", required=True)
    carry_out, saturate = m.flag("cc"), m.flag("sat")
    t = m.type(*INTS)
    fn, result = _product(t, mode)
    if fn is None:
        raise m.refuse("64-bit factors have no wide product")
    if i.base == "mul":
        return Op(fn, (result,), (t, t))
    if carry_out or i.base == "madc":
        extra_dst, extra_src = _carry(i, k, i.base == "madc", carry_out)

        def with_carry(a, b, c, cc=_NO_CARRY):
            unsigned = f"u{c.dtype.itemsize}"
            total, carry = _add_carry(fn(a, b).view(unsigned), c.view(unsigned), cc, False)
            return (total.view(c.dtype), carry) if carry_out else total.view(c.dtype)

        return Op(with_carry, (result, *extra_dst), (t, t, result, *extra_src))
    if saturate:
        if (t, mode) != ("s32", "hi"):
            raise m.refuse(".sat is only for mad.hi.s32")
        return Op(
            lambda a, b, c: num.saturated(num.mul_hi(a, b).astype("i8") + c, np.dtype("i4")), ("s32",), ("s32",) * 3
        )
    return Op(lambda a, b, c: fn(a, b) + c, (result,), (t, t, result))


@opcode("mul24", "mad24")
def _mul24(i: Instruction, m: Mods, k: Kernel) -> Op:
    mode, t = m.take("lo", "hi", required=True), m.type("u32", "s32")
    wide = np.dtype("i8" if t == "s32" else "u8")

    def product(a, b):
        a, b = (x.astype(wide) << wide.type(40) >> wide.type(40) for x in (a, b))
        return (a * b >> wide.type(16 if mode == "hi" else 0)).astype(VIEW[t])

    if i.base == "mul24":
        return Op(product, (t,), (t, t))
    return Op(lambda a, b, c: product(a, b) + c, (t,), (t, t, t))


@opcode("min", "max")
def _min_max(i: Instruction, m: Mods, k: Kernel) -> Op:
    relu = m.flag("relu")
    t = m.type(*INTS, "u16x2", "s16x2")
    fn = np.minimum if i.base == "min" else np.maximum
    if relu:
        if t not in ("s16x2", "s32"):
            raise m.refuse(".relu is only for .s16x2 and .s32")
        plain = fn

        def fn(a, b):
            return np.maximum(plain(a, b), a.dtype.type(0))

    if t.endswith("x2"):
        return Op(_packed(t, fn), ("b32",), ("b32", "b32"))
    return Op(fn, (t,), (t, t))


@opcode("dp4a")
def _dp4a(i: Instruction, m: Mods, k: Kernel) -> Op:
    a, b = m.type("u32", "s32"), m.type("u32", "s32")
    return Op(lambda x, y, c: num.dot_bytes(x, y, c, a == "s32", b == "s32"), ("b32",), ("b32",) * 3)


@opcode("dp2a")
def _dp2a(i: Instruction, m: Mods, k: Kernel) -> Op:
    high = m.take("lo", "hi", required=True) == "hi"
    a, b = m.type("u32", "s32"), m.type("u32", "s32")
    return Op(lambda x, y, c: num.dot_halves(x, y, c, a == "s32", b == "s32", high), ("b32",), ("b32",) * 3)
