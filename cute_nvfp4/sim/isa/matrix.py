"""Warp-level matrix instructions (PTX ISA, "mma", "ldmatrix", "stmatrix").

The ISA leaves the order of summation of floating-point mma open. Here the products are exact, their sum with C is
made in binary64 and rounded once to the type of D: within K + 1 roundings of f32 of any order of summation, and equal
to it whenever the sums are exact.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim import access
from cute_nvfp4.sim.access import Access
from cute_nvfp4.sim.errors import InvalidLanes
from cute_nvfp4.sim.isa.table import Mods, Op, opcode
from cute_nvfp4.sim.model import Instruction, Kernel
from cute_nvfp4.sim.numerics import fragments, half, single

_ELEMENTS = {"f16": 2, "bf16": 2, "tf32": 1, "e4m3": 4, "e5m2": 4, "s8": 4, "u8": 4}
_SHAPES = {f"m16n8k{k}": k for k in (4, 8, 16, 32)}


def _whole_warp(g, mask, i: Instruction) -> None:
    if mask is not None:
        row, lane = np.argwhere(~np.broadcast_to(mask, (g.n, 32)))[0]
        raise InvalidLanes(
            f"{i.where()}: {g.wave.thread(int(g.warps[row]), int(lane))} does not take part; all 32 lanes must"
        )


def _wide(g, registers) -> list[np.ndarray]:
    """Registers with one row a warp (or one for all when no register differs between warps) and 32 lanes."""
    n = max(r.shape[0] for r in registers)
    return [np.broadcast_to(r, (n, 32)) for r in registers]


@opcode("mma")
def _mma(i: Instruction, m: Mods, k: Kernel) -> Op:
    if m.take("sp", "sp::ordered_metadata"):
        raise m.refuse("sparse mma is not modelled")
    m.take("sync", required=True)
    m.take("aligned", required=True)
    shape = m.take(*_SHAPES, required=True)
    m.take("row", required=True)
    m.take("col", required=True)
    m.take("kind::f8f6f4")
    saturate = m.flag("satfinite")
    d, a = m.type("f32", "f16", "s32"), m.type(*_ELEMENTS)
    b, c = m.type(*_ELEMENTS), m.type("f32", "f16", "s32")
    integer = d == "s32"
    if (
        (a in ("s8", "u8")) != integer
        or _ELEMENTS[a] != _ELEMENTS[b]
        or c != d
        or (d == "f16" and a not in ("f16", "e4m3", "e5m2"))
    ):
        raise m.refuse("this combination of types does not exist or is not modelled")
    if saturate and not integer:
        raise m.refuse(".satfinite is for integer mma")
    count = _SHAPES[shape] // (4 * _ELEMENTS[a])
    if count not in (1, 2) or _SHAPES[shape] % (4 * _ELEMENTS[a]):
        raise m.refuse(f".{shape} does not exist for .{a}")
    acc = ("f16x2", "f16x2") if d == "f16" else (d,) * 4

    def fn(g, mask, ra, rb, rc):
        _whole_warp(g, mask, i)
        every = _wide(g, [*ra, *rb, *rc])
        ra, rb, rc = every[: 2 * count], every[2 * count : 3 * count], every[3 * count :]
        product = np.matmul(fragments.matrix_a(ra, a), fragments.matrix_b(rb, b))
        if integer:
            total = product.astype("i8") + fragments.accumulator(rc)
            info = np.iinfo("i4")
            return tuple(fragments.spread((np.clip(total, info.min, info.max) if saturate else total).astype("i4")))
        if d == "f16":
            rc = [half.widen(x, "f16x2")[..., j] for x in rc for j in (0, 1)]
        total = product + fragments.accumulator(rc)
        if d == "f32":
            return tuple(fragments.spread(single.canonical(total.astype("f4"))))
        out = [x.view("u2").astype("u4") for x in fragments.spread(half.to_half(total))]
        return tuple(out[h] | out[h + 1] << np.uint32(16) for h in (0, 2))

    return Op(fn, (acc,), (("b32",) * (2 * count), ("b32",) * count, acc), "matrix", context=True, converge=-1)


@opcode("ldmatrix", "stmatrix")
def _ldmatrix(i: Instruction, m: Mods, k: Kernel) -> Op:
    m.take("sync", required=True)
    m.take("aligned", required=True)
    m.take("m8n8", required=True)
    count = int(m.take("x1", "x2", "x4", required=True)[1:])
    trans = m.flag("trans")
    m.take("shared", "shared::cta", required=True)
    m.type("b16")
    registers = ("b32",) * count
    rows = np.arange(32)[None, :] < 8 * count
    load = i.base == "ldmatrix"
    a = Access(i, "shared", 4, 4, "load" if load else "store")

    def owners(g):
        """Only the lanes that give a row address touch memory."""
        return None if count == 4 else np.broadcast_to(rows, (g.n, 32))

    def read(g, mask, addr, off):
        _whole_warp(g, mask, i)
        words = np.stack(access.load(g, a, owners(g), np.broadcast_to(addr, (g.n, 32)), off), axis=-1)
        out = [words[:, 8 * j : 8 * j + 8, :].reshape(g.n, 32) for j in range(count)]
        out = [fragments.transpose_8x8(w) if trans else w for w in out]
        return tuple(out) if count > 1 else out[0]

    def write(g, mask, addr, off, values):
        _whole_warp(g, mask, i)
        words = np.zeros((g.n, 32, 4), "u4")
        for j, v in enumerate(values):
            v = np.broadcast_to(v, (g.n, 32))
            words[:, 8 * j : 8 * j + 8, :] = (fragments.transpose_8x8(v) if trans else v).reshape(g.n, 8, 4)
        access.store(g, a, owners(g), np.broadcast_to(addr, (g.n, 32)), off, tuple(words[..., j] for j in range(4)))

    if load:
        single_result = lambda *args: read(*args)[0]  # noqa: E731
        return Op(
            read if count > 1 else single_result, (registers,), ("addr",), "load.shared", context=True, converge=-1
        )
    return Op(write, (), ("addr", registers), "store.shared", context=True, converge=-1)
