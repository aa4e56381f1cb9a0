"""Warp-level matrix instructions (PTX ISA, "mma", "ldmatrix", "stmatrix", "movmatrix").

The ISA leaves the order of summation of floating-point mma open. Here the products are exact, and their sum with C is
computed in binary64 and rounded once to the type of D. The result is within K + 1 roundings of f32 of the result of
any order of summation, and equal to it when the sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cute_nvfp4.sim.errors import UnsupportedInstruction
from cute_nvfp4.sim.frontend.model import Instruction, Kernel
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, opcode
from cute_nvfp4.sim.isa.matrix_scaled import block_scaled, needs_target, take_kind
from cute_nvfp4.sim.isa.warp import whole_warp
from cute_nvfp4.sim.machine import access
from cute_nvfp4.sim.machine.access import Access
from cute_nvfp4.sim.numerics import fragments, half, single
from cute_nvfp4.sim.tcgen05.elements import unpack

_NARROW = ("e3m2", "e2m3", "e2m1")
_ELEMENTS = {"f16": 2, "bf16": 2, "tf32": 1, "e4m3": 4, "e5m2": 4, "s8": 4, "u8": 4, **dict.fromkeys(_NARROW, 4)}
_SHAPES = {f"m16n8k{k}": k for k in (4, 8, 16, 32, 64)}


def _wide(g, registers) -> list[np.ndarray]:
    """Returns the registers as (n, 32) arrays with one row for each warp, or (1, 32) when no register differs between
    warps."""
    n = max(r.shape[0] for r in registers)
    return [np.broadcast_to(r, (n, 32)) for r in registers]


@opcode("mma")
def _mma(i: Instruction, m: Mods, k: Kernel) -> Op:
    if m.take("sp", "sp::ordered_metadata"):
        raise m.refuse("sparse mma is not modelled")
    m.words("sync", "aligned")
    # ptxas accepts the kind before the shape or after the layouts.
    kind, scaled, vector = before = take_kind(m)
    shape = m.take(*_SHAPES, required=True)
    m.words("row", "col")
    if not any(before):
        kind, scaled, vector = take_kind(m)
    if scaled:
        return block_scaled(i, m, kind, vector, shape)
    if kind not in ("", "f8f6f4"):
        raise m.refuse(f"kind::{kind} needs .block_scale")
    saturate = m.flag("satfinite")
    d, a = m.type("f32", "f16", "s32"), m.type(*_ELEMENTS)
    b, c = m.type(*_ELEMENTS), m.type("f32", "f16", "s32")
    integer = d == "s32"
    if (
        (a in ("s8", "u8")) != integer
        or _ELEMENTS[a] != _ELEMENTS[b]
        or c != d
        or (d == "f16" and a not in ("f16", "e4m3", "e5m2", *_NARROW))
        or (not kind and {a, b} & {*_NARROW})
    ):
        raise m.refuse("this combination of types does not exist or is not modelled")
    if saturate and not integer:
        raise m.refuse(".satfinite is for integer mma")
    count = _SHAPES[shape] // (4 * _ELEMENTS[a])
    if count not in (1, 2) or _SHAPES[shape] % (4 * _ELEMENTS[a]):
        raise m.refuse(f".{shape} does not exist for .{a}")
    acc = ("f16x2", "f16x2") if d == "f16" else (d,) * 4

    def fn(g, mask, ra, rb, rc):
        whole_warp(g, mask, i)
        if kind:
            needs_target(i, g)
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


@dataclass(frozen=True)
class _Tiles:
    """The matrices that an ldmatrix or stmatrix moves."""

    count: int  # number of matrices
    rows: int = 8  # rows of a matrix, of 16 bytes each in shared memory
    each: int = 1  # registers of a matrix
    gather: Callable[[np.ndarray], np.ndarray] | None = None  # bytes (n, rows, 16) to registers (each, n, 32)
    scatter: Callable[[np.ndarray], np.ndarray] | None = None  # a register (n, 32) to bytes (n, rows, 16)


def _words(raw: np.ndarray) -> np.ndarray:
    """Returns bytes (..., 32, 4) or (..., 8, 16) as registers (..., 32)."""
    return np.ascontiguousarray(raw).view("u4").reshape(*raw.shape[:-2], 32)


def _gather_16x16(raw: np.ndarray) -> np.ndarray:
    """Returns the registers of .m16n16.trans: byte b of register r of lane 4 g + t is the element of row 4 t + b and
    column g + 8 r in memory."""
    parts = raw.reshape(-1, 4, 4, 2, 8)
    return _words(parts.transpose(3, 0, 4, 1, 2).reshape(2, len(raw), 32, 4))


def _scatter_16x8(register: np.ndarray) -> np.ndarray:
    """Returns the bytes of .m16n8.trans: byte i + 2 h of lane 4 g + t goes to row 2 t + i, column g + 8 h in memory."""
    parts = np.ascontiguousarray(register).view("u1").reshape(-1, 8, 4, 2, 2)
    return np.ascontiguousarray(parts.transpose(0, 2, 4, 3, 1)).reshape(-1, 8, 16)


def _tiles(i: Instruction, m: Mods) -> _Tiles:
    """Reads the modifiers of an ldmatrix or stmatrix."""
    load = i.base == "ldmatrix"
    shape = m.take("m8n8", *(("m8n16", "m16n16") if load else ("m16n8",)), required=True)
    count = int(m.take(*(("x1", "x2") if shape == "m16n16" else ("x1", "x2", "x4")), required=True)[1:])
    trans = bool(m.take("trans", required=shape in ("m16n16", "m16n8"))) if shape != "m8n16" else False
    m.take("shared", "shared::cta", required=True)
    if shape == "m8n8":
        m.type("b16")
        turn = fragments.transpose_8x8 if trans else lambda w: w
        return _Tiles(
            count,
            gather=lambda raw: turn(_words(raw))[None],
            scatter=lambda w: np.ascontiguousarray(turn(w)).view("u1").reshape(-1, 8, 16),
        )
    if shape == "m16n8":
        m.type("b8")
        return _Tiles(count, scatter=_scatter_16x8)
    narrow = m.type("b8", "b8x16") if shape == "m16n16" else m.type("b8x16")
    bits = int(m.type("b6x16_p32", "b4x16_p64")[1]) if narrow == "b8x16" else 8
    arrange = _gather_16x16 if shape == "m16n16" else lambda raw: _words(raw)[None]
    # Codes of 4 or 6 bits are unpacked to the low ends of bytes.
    gather = arrange if bits == 8 else lambda raw: arrange(unpack(raw, bits))
    return _Tiles(count, 16, 2, gather) if shape == "m16n16" else _Tiles(count, gather=gather)


@opcode("ldmatrix", "stmatrix")
def _ldmatrix(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Builds ldmatrix and stmatrix. Lane ``rows * j + r`` has the address of row r of matrix j."""
    m.words("sync", "aligned")
    tiles = _tiles(i, m)
    lanes, rows = tiles.count * tiles.rows, tiles.rows
    registers = ("b32",) * (tiles.count * tiles.each)
    owner = np.arange(32)[None, :] < lanes
    load = i.base == "ldmatrix"
    a = Access(i, "shared", 4, 4, "load" if load else "store")

    def begin(g, mask):
        whole_warp(g, mask, i)
        if "m8n8" not in i.mods and g.wave.run.target.startswith("sm_90"):
            raise UnsupportedInstruction(f"{i.where()}: matrices of bytes need sm_100a, this is {g.wave.run.target}")

    def owners(g):
        """Returns the mask of the lanes that have a row address, the only ones that access memory."""
        return None if lanes == 32 else np.broadcast_to(owner, (g.n, 32))

    def read(g, mask, addr, off):
        begin(g, mask)
        words = access.load_rows(g, a, "shared", owners(g), np.broadcast_to(addr, (g.n, 32)), off)
        raw = words[:, :lanes].view("u1").reshape(g.n, tiles.count, rows, 16)
        out = [r for j in range(tiles.count) for r in tiles.gather(np.ascontiguousarray(raw[:, j]))]
        return tuple(out) if len(out) > 1 else out[0]

    def write(g, mask, addr, off, values):
        begin(g, mask)
        words = np.zeros((g.n, 32, 4), "u4")
        for j, v in enumerate(values):
            raw = tiles.scatter(np.ascontiguousarray(np.broadcast_to(v, (g.n, 32))))
            words[:, rows * j : rows * (j + 1)] = raw.view("u4")
        access.store(g, a, owners(g), np.broadcast_to(addr, (g.n, 32)), off, tuple(words[..., j] for j in range(4)))

    if load:
        return Op(read, (registers,), ("addr",), "load.shared", context=True, converge=-1)
    return Op(write, (), ("addr", registers), "store.shared", context=True, converge=-1)


@opcode("movmatrix")
def _movmatrix(i: Instruction, m: Mods, k: Kernel) -> Op:
    m.words("sync", "aligned", "m8n8", "trans", "b16")

    def fn(g, mask, a):
        whole_warp(g, mask, i)
        return fragments.transpose_8x8(np.broadcast_to(a, (g.n, 32)))

    return Op(fn, ("b32",), ("b32",), "matrix", context=True, converge=-1)
