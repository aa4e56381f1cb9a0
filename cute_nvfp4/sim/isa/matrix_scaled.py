"""Warp-level products with block scales, and of 4- and 6-bit elements (PTX ISA, "mma", "block scaling"; sm_120a).

A lane's scale register has four bytes. ``byte-id`` says which byte is the first block's along K, ``thread-id`` which
lanes of a quad are asked: of A's two (row group and row group + 8), of B's one (column group). What ptxas refuses is
refused here, with the values it takes. Sums are as in ``matrix``: exact products, in binary64, rounded once.

Most of the work would be to decode and scale fragments. Warps of other tiles have the same ones at the same time, so
each is decoded once; and most are operands of several instructions one after the other, so a wave keeps the last ones:
registers' values are arrays that nobody writes, so that the same array has the same fragment.
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
    """One row of the ISA's table: blocks along K of one instruction by ``.scale_vec``, and the type of scales."""

    shape: str
    elements: tuple[str, ...]
    blocks: int
    scale: str

    @property
    def byte_ids(self) -> tuple[int, ...]:
        """ptxas takes these: the blocks' bytes lie within the register, from a multiple of their number on."""
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
    """Refuses a program for a target for which ptxas does."""
    target = g.wave.run.target.partition(",")[0]
    if target not in _TARGETS:
        raise UnsupportedInstruction(f"{i.where()}: `{i.opcode}` needs one of {', '.join(_TARGETS)}, this is {target}")


@dataclass(frozen=True)
class _Selector:
    """{byte-id, thread-id} of one operand: what ptxas takes. Both are constants, which may have come through registers;
    then they are known when the instruction runs."""

    bytes: tuple[int, ...]
    threads: tuple[int, ...]

    def known(self, m: Mods, index: int) -> None:
        """Refuses constants that are written in the instruction."""
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
        """The two values, the same in every lane and warp."""
        if any(x.size > 1 and (x != x.flat[0]).any() for x in given):
            raise UnsupportedInstruction(f"a selector of scales must be a constant: {i.where()}")
        values = [x.item(0) for x in given]
        self.refuse(i, values)
        return values


def take_kind(m: Mods) -> tuple[str, bool, str]:
    """``.kind``, whether there is ``.block_scale``, and ``.scale_vec``; of what is not there the empty string."""
    kind = m.take(*(f"kind::{name}" for name in ("f8f6f4", "mxf8f6f4", "mxf4", "mxf4nvf4"))).removeprefix("kind::")
    scaled = m.flag("block_scale")
    vectors = ("scale_vec::1X", "scale_vec::2X", "scale_vec::4X") if scaled else ()
    return kind, scaled, m.take(*vectors).removeprefix("scale_vec::")


def block_scaled(i: Instruction, m: Mods, kind: str, vector: str, shape: str) -> Op:
    """``mma.sync.aligned.SHAPE.row.col.kind::KIND.block_scale.scale_vec::VECTOR…``, read up to the types."""
    form = _FORMS.get((kind, vector or _DEFAULT.get(kind, "")))
    if form is None or form.shape != shape:
        raise m.refuse(f"kind::{kind} has no form with .{shape} and .scale_vec {vector or 'left out'}")
    m.words("f32")
    a, b = m.type(*form.elements), m.type(*form.elements)
    m.words("f32", form.scale)
    select_a, select_b = _Selector(form.byte_ids, (0, 1)), _Selector(form.byte_ids, (0, 1, 2, 3))
    select_a.known(m, 5)
    select_b.known(m, 7)
    # 4-bit elements of kinds mxf4 and mxf4nvf4 are packed, two in a byte; those of mxf8f6f4 have a byte each
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
    """How the registers of A or B are read. ``lanes``: of a quad, which have the scales of each eight rows."""

    type: str
    k: int
    scale: str
    byte: int
    blocks: int
    lanes: tuple[int, ...]

    def fragments(self, registers: Sequence[np.ndarray], scale: np.ndarray) -> _Fragments:
        """Each row of the registers (n, 32) decoded and scaled once. Register r has row group + 8 * (r % halves)."""
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
        # blocks of the columns that a register has, or one of them all
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
    """Fragments of a matrix: (u, 8 or 16 rows, K), the different ones; of (n,): which of them each warp has."""

    matrix: np.ndarray
    of: np.ndarray


def _products(left: _Fragments, right: _Fragments, n: int, exact: bool) -> np.ndarray:
    """(n, 16, 8) of each warp. ``exact``: sums are so in binary64, whatever their order (UE4M3 scales: multiples of
    2⁻²⁰ below 2²⁹); then all fragments are multiplied at once where few of the products are nobody's."""
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
"""Warps at a time: their fragments stay in a processor's cache."""
_KEEP = 16
"""Fragments that a wave keeps: those of a step of a warp's tile of 32 × 64, and some of the next."""


def _kept(
    kept: dict[tuple, tuple[tuple, _Fragments]], operand: _Operand, registers: tuple[np.ndarray, ...], scale: np.ndarray
) -> _Fragments:
    """The operand's fragments, from the last ones if they are among them."""
    arrays = (*registers, scale)
    key = (operand, *map(id, arrays))
    if key not in kept:
        while len(kept) >= _KEEP:
            del kept[next(iter(kept))]
        # the arrays are kept too, so that no other gets their identity
        kept[key] = arrays, operand.fragments(registers, scale)
    return kept[key][1]
