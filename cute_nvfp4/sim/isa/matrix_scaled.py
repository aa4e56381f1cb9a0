"""Warp-level matrix products with block scaling (PTX ISA, "mma", "block scaling"; sm_120a).

The scale register of a lane holds four bytes. ``byte-id`` selects the byte of the first block along K. ``thread-id``
selects the lanes of a quad that provide scales: two for A (rows group and group + 8), one for B (column group). Values
that ptxas refuses are refused here, with an error that names the values it accepts. As in ``matrix``, products are
exact, and their sums are computed in binary64 and rounded once.

Decoding and scaling fragments would take most of the time. Warps of different tiles often have equal fragments, so
each different fragment is decoded once. Most fragments are operands of several successive instructions, so a wave
keeps the most recent ones. No code writes to the arrays of register values, so equal identities mean equal fragments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from cute_nvfp4.sim.errors import UnsupportedInstruction
from cute_nvfp4.sim.frontend.model import Imm, Instruction, Vector
from cute_nvfp4.sim.frontend.opcodes import Mods, Op
from cute_nvfp4.sim.isa.warp import whole_warp
from cute_nvfp4.sim.numerics import fragments, single
from cute_nvfp4.sim.numerics.rows import distinct
from cute_nvfp4.sim.tcgen05.elements import scale_table

_BYTES = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


@dataclass(frozen=True)
class _Shape:
    """One row of the ISA's table of block-scaled shapes."""

    shape: str
    elements: tuple[str, ...]
    blocks: int  # scale blocks along K in one instruction, from ``.scale_vec``
    scale: str  # type of the scales

    @property
    def byte_ids(self) -> tuple[int, ...]:
        """The byte-ids that ptxas accepts: multiples of the number of blocks."""
        return tuple(range(0, 4, self.blocks))


_FORMS = {
    ("mxf4nvf4", "4X"): _Shape("m16n8k64", ("e2m1",), 4, "ue4m3"),
    ("mxf4nvf4", "2X"): _Shape("m16n8k64", ("e2m1",), 2, "ue8m0"),
    ("mxf4", "2X"): _Shape("m16n8k64", ("e2m1",), 2, "ue8m0"),
    ("mxf8f6f4", "1X"): _Shape("m16n8k32", _BYTES, 1, "ue8m0"),
}
_DEFAULT = {"mxf4": "2X", "mxf8f6f4": "1X"}
_TARGETS = ("sm_120a", "sm_120f", "sm_121a", "sm_121f")


def needs_target(i: Instruction, g) -> None:
    """Refuses a program whose target does not have the instruction, as ptxas does."""
    target = g.wave.run.target.partition(",")[0]
    if target not in _TARGETS:
        raise UnsupportedInstruction(f"{i.where()}: `{i.opcode}` needs one of {', '.join(_TARGETS)}, this is {target}")


@dataclass(frozen=True)
class _Selector:
    """The values that ptxas accepts for {byte-id, thread-id} of one operand. Both are constants. Constants that come
    through registers are known only when the instruction runs."""

    bytes: tuple[int, ...]
    threads: tuple[int, ...]

    def known(self, m: Mods, index: int) -> None:
        """Checks operand ``index``, if its values are written in the instruction."""
        given = m.instruction.operands[index]
        if not isinstance(given, Vector) or len(given.items) != 2:
            raise m.refuse("a selector of scales is {byte-id, thread-id}")
        if all(isinstance(x, Imm) for x in given.items):
            self.refuse(m.instruction, [x.value for x in given.items])

    def refuse(self, i: Instruction, values: list[int]) -> None:
        for what, value, legal in zip(("byte-id", "thread-id"), values, (self.bytes, self.threads)):
            if value not in legal:
                expected = ", ".join(map(str, legal))
                raise UnsupportedInstruction(
                    f"{what} of a selector is {value}, expected one of {expected}: {i.where()}"
                )

    def read(self, i: Instruction, given: tuple[np.ndarray, ...]) -> list[int]:
        """Returns the two values, which must be the same in every lane and warp."""
        if any(x.size > 1 and (x != x.flat[0]).any() for x in given):
            raise UnsupportedInstruction(f"a selector of scales must be a constant: {i.where()}")
        values = [x.item(0) for x in given]
        self.refuse(i, values)
        return values


def take_kind(m: Mods) -> tuple[str, bool, str]:
    """Returns ``.kind``, whether ``.block_scale`` is present, and ``.scale_vec``; absent names are empty strings."""
    kind = m.take(*(f"kind::{name}" for name in ("f8f6f4", "mxf8f6f4", "mxf4", "mxf4nvf4"))).removeprefix("kind::")
    scaled = m.flag("block_scale")
    vectors = ("scale_vec::1X", "scale_vec::2X", "scale_vec::4X") if scaled else ()
    return kind, scaled, m.take(*vectors).removeprefix("scale_vec::")


def block_scaled(i: Instruction, m: Mods, kind: str, vector: str, shape: str) -> Op:
    """Builds ``mma.sync.aligned.SHAPE.row.col.kind::KIND.block_scale.scale_vec::VECTOR``, whose modifiers before the
    types have been consumed."""
    form = _FORMS.get((kind, vector or _DEFAULT.get(kind, "")))
    if form is None or form.shape != shape:
        raise m.refuse(f"kind::{kind} has no form with .{shape} and .scale_vec {vector or 'left out'}")
    m.words("f32")
    a, b = m.type(*form.elements), m.type(*form.elements)
    m.words("f32", form.scale)
    select_a, select_b = _Selector(form.byte_ids, (0, 1)), _Selector(form.byte_ids, (0, 1, 2, 3))
    select_a.known(m, 5)
    select_b.known(m, 7)
    # The 4-bit elements of kinds mxf4 and mxf4nvf4 are packed two in a byte; those of mxf8f6f4 have a byte each.
    packed = shape == "m16n8k64"
    type_a, type_b = ("e2m1x2", "e2m1x2") if packed else (a, b)
    blocks, k = form.blocks, 64 if packed else 32

    def fn(g, mask, ra, rb, rc, sfa, at_a, sfb, at_b):
        whole_warp(g, mask, i)
        needs_target(i, g)
        byte_a, thread_a = select_a.read(i, at_a)
        byte_b, thread_b = select_b.read(i, at_b)
        of_a = _Operand(type_a, k, form.scale, byte_a, blocks, (2 * thread_a, 2 * thread_a + 1))
        of_b = _Operand(type_b, k, form.scale, byte_b, blocks, (thread_b,))
        left, right = (_kept(g.wave.kept, *x) for x in ((of_a, ra, sfa[0]), (of_b, rb, sfb[0])))
        n = max(len(left.of), len(right.of), *map(len, rc))
        products = _products(left, right, n, form.scale == "ue4m3")
        return tuple(single.canonical(fragments.add(products, rc)))

    acc = ("f32",) * 4
    selector = ("u16", "u16")
    source = (("b32",) * 4, ("b32",) * 2, acc, ("b32",), selector, ("b32",), selector)
    return Op(fn, (acc,), source, "matrix", context=True, converge=-1)


@dataclass(frozen=True)
class _Operand:
    """The format of the registers of A or B."""

    type: str  # element type
    k: int
    scale: str  # type of the scales
    byte: int  # byte of the scale register that holds the scale of the first block
    blocks: int  # scale blocks along K
    lanes: tuple[int, ...]  # lane of a quad that holds the scales, for each group of eight rows (columns of B)

    def fragments(self, registers: Sequence[np.ndarray], scale: np.ndarray) -> _Fragments:
        """Returns the scaled fragments of registers (n, 32) of n warps; equal warps are decoded once."""
        n = max(x.shape[0] for x in (*registers, scale))
        arrays = [np.ascontiguousarray(np.broadcast_to(x, (n, 32))) for x in (*registers, scale)]
        first, of = distinct(np.concatenate(arrays, axis=1).view("u8"))
        out = np.empty((len(first), 8 * len(self.lanes), self.k))
        self._fill(out, *(x[first] for x in arrays))
        return _Fragments(out, of)

    def _fill(self, out: np.ndarray, *arrays: np.ndarray) -> None:
        *registers, scale = arrays
        n, halves = len(out), len(self.lanes)
        columns = len(registers) // halves
        # Register halves * column + half holds row group + 8 * half. It has elements of ``blocks`` scale blocks.
        blocks = max(1, self.blocks // columns)
        scales = scale.view("u1").reshape(n, 8, 4, 4)[..., self.byte : self.byte + self.blocks]
        out = out.reshape(n, halves, 8, columns, blocks, -1)
        for half, lane in enumerate(self.lanes):
            values = _scales(self.scale).take(scales[:, :, lane]).reshape(n, 8, -1, blocks, 1)
            for column in range(columns):
                elements = fragments.elements(registers[halves * column + half], self.type).reshape(n, 8, blocks, -1)
                own = values[:, :, min(column, values.shape[2] - 1)]
                np.multiply(elements, own, out=out[:, half, :, column])


@cache
def _scales(name: str) -> np.ndarray:
    return scale_table(name).astype("f8")


@dataclass(frozen=True)
class _Fragments:
    """The fragments of one operand of n warps."""

    matrix: np.ndarray  # (u, 8 or 16 rows, K) f64, the different fragments
    of: np.ndarray  # (n,) index of each warp's fragment


def _products(left: _Fragments, right: _Fragments, n: int, exact: bool) -> np.ndarray:
    """Returns the products (n, 16, 8) of n warps.

    ``exact`` says that sums in binary64 are exact in any order, as they are with UE4M3 scales (multiples of 2⁻²⁰ below
    2²⁹). All pairs of fragments are then multiplied at once, unless too many of these products are unused.
    """
    a, b, k = len(left.matrix), len(right.matrix), left.matrix.shape[2]
    of_a, of_b = (np.broadcast_to(x.of, (n,)) for x in (left, right))
    if exact and a * b <= 2 * n:
        whole = left.matrix.reshape(-1, k) @ right.matrix.reshape(-1, k).T
        return whole.reshape(a, 16, b, 8)[of_a, :, of_b]
    out = np.empty((n, 16, 8))
    for i in range(0, n, _PART):
        part = slice(i, i + _PART)
        np.matmul(left.matrix[of_a[part]], right.matrix[of_b[part]].transpose(0, 2, 1), out=out[part])
    return out


_PART = 96
"""Number of warps in one batch, whose fragments fit the cache of a processor."""
_KEEP = 16
"""Number of fragments that a wave keeps: those of one K step of a 32 × 64 warp tile, and some of the next step."""


def _kept(
    kept: dict[tuple, tuple[tuple, _Fragments]], operand: _Operand, registers: tuple[np.ndarray, ...], scale: np.ndarray
) -> _Fragments:
    """Returns the operand's fragments, from ``kept`` if they are there."""
    arrays = (*registers, scale)
    key = (operand, *map(id, arrays))
    if key not in kept:
        while len(kept) >= _KEEP:
            del kept[next(iter(kept))]
        # The arrays are kept too, so that no new array gets their identity.
        kept[key] = arrays, operand.fragments(registers, scale)
    return kept[key][1]
