"""Logic, shifts and bit fields (PTX ISA, "Logic and Shift Instructions" and the bit instructions of the integer
chapter)."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.frontend.model import Imm, Instruction, Kernel, Pair
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, opcode, plain
from cute_nvfp4.sim.numerics import integer as num

_WORDS = ("b16", "b32", "b64")

plain({"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}, ("pred", *_WORDS), ("", ""), klass="logic")
plain({"not": np.invert}, ("pred", *_WORDS), klass="logic")
plain({"cnot": lambda a: (a == 0).astype(a.dtype)}, _WORDS, klass="logic")
plain({"shl": num.shl}, _WORDS, ("", "u32"), klass="logic")
plain({"shr": num.shr}, (*_WORDS, "u16", "u32", "u64", "s16", "s32", "s64"), ("", "u32"), klass="logic")
plain({"bfe": num.bfe}, ("u32", "u64", "s32", "s64"), ("", "u32", "u32"))
plain({"bfi": num.bfi}, ("b32", "b64"), ("", "", "u32", "u32"))
plain({"popc": num.popc, "clz": num.clz}, ("b32", "b64"), dst="u32")
plain({"brev": num.brev}, ("b32", "b64"))


@opcode("lop3")
def _lop3(i: Instruction, m: Mods, k: Kernel) -> Op:
    combine = m.take("or", "and")
    t = m.type("b32")
    table = i.operands[4] if len(i.operands) > 4 else None
    if not isinstance(table, Imm) or not 0 <= table.value < 256:
        raise m.refuse("the table of lop3 must be a constant from 0 to 255")
    if not combine:
        return Op(lambda a, b, c: num.lop3(a, b, c, table.value), (t,), (t, t, t, "static"), "logic")

    def with_predicate(a, b, c, q):
        d = num.lop3(a, b, c, table.value)
        return d, (d != 0) | q if combine == "or" else (d != 0) & q

    if not isinstance(i.operands[0], Pair):
        raise m.refuse("lop3 with a boolean operation needs a destination d|p")
    return Op(with_predicate, (("pair", t, "pred"),), (t, t, t, "static", "pred"), "logic")


@opcode("shf")
def _funnel(i: Instruction, m: Mods, k: Kernel) -> Op:
    left = m.take("l", "r", required=True) == "l"
    wrap = m.take("clamp", "wrap", required=True) == "wrap"
    t = m.type("b32")
    return Op(lambda a, b, n: num.funnel(a, b, n, left, wrap), (t,), (t, t, "u32"), "logic")


@opcode("bmsk")
def _bmsk(i: Instruction, m: Mods, k: Kernel) -> Op:
    wrap = m.take("clamp", "wrap", required=True) == "wrap"
    t = m.type("b32")

    def fn(a, b):
        if wrap:
            a, b = a & np.uint32(31), b & np.uint32(31)
        return num.shl(num.ones(b.astype("i8"), "u4"), a)

    return Op(fn, (t,), ("u32", "u32"))


@opcode("bfind")
def _bfind(i: Instruction, m: Mods, k: Kernel) -> Op:
    amount = m.flag("shiftamt")
    t = m.type("u32", "u64", "s32", "s64")

    def fn(a):
        x = np.where(a < 0, ~a, a) if a.dtype.kind == "i" else a
        x = x.view(f"u{a.dtype.itemsize}")
        zeros = num.clz(x)
        top = np.uint32(a.dtype.itemsize * 8 - 1)
        return np.where(x == 0, np.uint32(0xFFFFFFFF), zeros if amount else top - zeros)

    return Op(fn, ("u32",), (t,))


@opcode("prmt")
def _prmt(i: Instruction, m: Mods, k: Kernel) -> Op:
    t = m.type("b32")
    mode = m.take("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    return Op(lambda a, b, c: num.prmt(a, b, c, mode), (t,), (t, t, t), "logic")


@opcode("fns")
def _fns(i: Instruction, m: Mods, k: Kernel) -> Op:
    t = m.type("b32")

    def fn(mask, base, offset):
        mask, base, offset = np.broadcast_arrays(mask, base, offset.view("i4"))
        out = np.full(mask.shape, 0xFFFFFFFF, "u4")
        for at in np.ndindex(mask.shape):
            bits, start, want = int(mask[at]), int(base[at]), int(offset[at])
            if want == 0:
                found = [start] if start < 32 and bits >> start & 1 else []
            elif want > 0:
                found = [b for b in range(start, 32) if bits >> b & 1][want - 1 : want]
            else:
                found = [b for b in range(start, -1, -1) if bits >> b & 1][-want - 1 : -want]
            if found:
                out[at] = found[0]
        return out

    return Op(fn, (t,), (t, "b32", "s32"))
