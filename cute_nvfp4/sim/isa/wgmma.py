"""Asynchronous warpgroup matrix instructions (PTX ISA, "wgmma.mma_async", "wgmma.fence", "wgmma.commit_group",
"wgmma.wait_group")."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.errors import InvalidLanes, UnsupportedInstruction
from cute_nvfp4.sim.frontend.model import Imm, Instruction, Kernel, Vector
from cute_nvfp4.sim.frontend.opcodes import WARPGROUP, Mods, Op, opcode
from cute_nvfp4.sim.isa.tcgen05_mma import alike, named
from cute_nvfp4.sim.tcgen05.descriptor import start_of
from cute_nvfp4.sim.wgmma import descriptor, fragments
from cute_nvfp4.sim.wgmma.fragments import WARPS
from cute_nvfp4.sim.wgmma.mma import BITS, ROWS, Form, Mma, Operand

_SHAPES = {f"m64n{n}k{k}": (n, k) for n in range(8, 257, 8) for k in (8, 16, 32)}
_INTEGERS = ("s8", "u8")
_NARROW = ("e4m3", "e5m2")


@opcode("wgmma")
def _wgmma(i: Instruction, m: Mods, k: Kernel) -> Op:
    what = m.take("fence", "commit_group", "wait_group", "mma_async", required=True)
    if m.flag("sp"):
        raise m.refuse("sparse wgmma is not modelled")
    m.words("sync", "aligned")
    if what == "mma_async":
        return _mma(i, m)
    if what == "wait_group":
        return _wait(i, m)

    def fn(g, mask):
        warps = warpgroups(g, mask, i).ravel()
        events = g.wave.events
        (events.warpgroup_fenced if what == "fence" else events.warpgroup_committed)(warps, i)

    return Op(fn, (), (), "wgmma", context=True, converge=WARPGROUP)


def _wait(i: Instruction, m: Mods) -> Op:
    count = i.operands[0]
    if not isinstance(count, Imm) or count.kind != "int" or not 0 <= count.value <= 7:
        raise m.refuse("wait_group takes a constant from 0 to 7")

    def fn(g, mask):
        g.wave.events.warpgroup_waited(warpgroups(g, mask, i).ravel(), i, count.value)

    return Op(fn, (), ("static",), "wgmma", context=True, converge=WARPGROUP)


def warpgroups(g, mask, i: Instruction) -> np.ndarray:
    """Returns the group's warps (w, 4) by warpgroup. Raises ``InvalidLanes`` unless whole warpgroups execute the
    instruction."""
    if mask is not None:
        raise InvalidLanes(f"{i.where()}: {g.thread(~mask)} does not take part; all 128 threads of a warpgroup must")
    first = g.warps - g.wave.warp_in_cta[g.warps] % WARPS
    whole = len(first) % WARPS == 0 and (first.reshape(-1, WARPS) == g.warps[::WARPS, None]).all()
    if not whole:
        count = np.bincount(first)[first]
        row = int((count < WARPS).argmax())
        raise InvalidLanes(
            f"{i.where()}: {g.wave.thread(int(g.warps[row]), 0)} executes it with {count[row]} of the four warps of "
            "its warpgroup; the others have exited, or do not exist"
        )
    return g.warps.reshape(-1, WARPS)


def _form(i: Instruction, m: Mods) -> tuple[Form, bool]:
    """Returns the types, shape and constant operands, and whether A is in registers."""
    shape = m.take(*_SHAPES, required=True)
    n, depth = _SHAPES[shape]
    saturate = m.flag("satfinite")
    d, a, b = m.type("f32", "f16", "s32"), m.type(*BITS), m.type(*BITS)
    integer = d == "s32"
    family = next(f for f in (_INTEGERS, _NARROW, ("f16",), ("bf16",), ("tf32",)) if a in f)
    if b not in family or integer != (a in _INTEGERS) or (d == "f16" and a in ("bf16", "tf32")):
        raise m.refuse("this combination of types does not exist")
    if depth != 256 // BITS[a] or (integer and n > 24 and n % 16 and n != 8):
        raise m.refuse(f".{shape} does not exist for .{a}")
    if saturate and not integer:
        raise m.refuse(".satfinite is for integers")
    registers = isinstance(i.operands[1], Vector)
    transposes = (2 - registers) if BITS[a] == 16 else 0
    constants = i.operands[4:]
    if len(constants) != (0 if integer else 2) + transposes or not all(isinstance(c, Imm) for c in constants):
        raise m.refuse(f"{'no' if integer else 2 + transposes} constants are wanted after scale-d")
    values = [c.value for c in constants]
    if any(v not in (1, -1) for v in values[:2]) or any(v not in (0, 1) for v in values[2:]):
        raise m.refuse("imm-scale is 1 or -1, imm-trans is 0 or 1")
    negate = [v < 0 for v in values[:2]] or [False, False]
    major = [bool(v) for v in values[2:]]
    major = [False] * (2 - len(major)) + major
    return Form(a, b, d, n, *negate, *major, saturate), registers


def _mma(i: Instruction, m: Mods) -> Op:
    form, in_registers = _form(i, m)
    count = form.n // (4 if form.d == "f16" else 2)
    acc = ("b32" if form.d == "f16" else form.d,) * count
    # D is both read and written.
    i.operands = (i.operands[0], *i.operands)
    left = ("b32",) * 4 if in_registers else "b64"
    constants = ("static",) * (len(i.operands) - 5)

    def fn(g, mask, d, a, b, enable):
        warps = warpgroups(g, mask, i)
        old = fragments.stacked(d, g.n)
        c = fragments.matrix_d(fragments.unpacked(old) if form.d == "f16" else old)
        b, enable = _uniform(g, i, "matrix descriptor", b), _uniform(g, i, "scale-d", enable)
        if in_registers:
            a = fragments.matrix_a(fragments.stacked(a, g.n), form.a)
            keys = (descriptor.alike(b),)
        else:
            a = _uniform(g, i, "matrix descriptor", a)
            keys = (descriptor.alike(a), descriptor.alike(b))
        sets = list(alike(*keys))
        out = np.empty_like(c)
        for at in sets:
            part = a[at] if in_registers else _operand(i, a[at], form.a_mn_major, ROWS, form.a)
            right = _operand(i, b[at], form.b_mn_major, form.n, form.b)
            one = Mma(i, g.wave, warps[at].ravel(), form, part, right, c[at], enable[at])
            g.wave.engines.perform(one)
            out[at] = one.result
        found = fragments.registers_d(out)
        return tuple(fragments.packed(found) if form.d == "f16" else found)

    return Op(fn, (acc,), (acc, left, "b64", "pred", *constants), "wgmma", context=True, converge=WARPGROUP)


def _uniform(g, i: Instruction, what: str, value: np.ndarray) -> np.ndarray:
    """Returns one value (w,) for each warpgroup. Raises ``InvalidLanes`` unless all its threads have that value."""
    rows = np.broadcast_to(value, (g.n, value.shape[1])).reshape(g.n // WARPS, -1)
    if (rows != rows[:, :1]).any():
        at = int((rows != rows[:, :1]).any(axis=1).argmax())
        raise InvalidLanes(
            f"{i.where()}: threads of the warpgroup of {g.wave.thread(int(g.warps[WARPS * at]), 0)} bring different "
            f"values of {what}"
        )
    return rows[:, 0]


def _operand(i: Instruction, desc: np.ndarray, mn_major: bool, rows: int, t: str) -> Operand:
    matrix = named(i, descriptor.decode, int(desc[0]))
    if mn_major and rows * BITS[t] % 128:
        raise UnsupportedInstruction(f"{i.where()}: {rows} MN-major elements of {t} are not whole 16-byte chunks")
    return Operand(matrix, start_of(desc), mn_major, rows, t)
