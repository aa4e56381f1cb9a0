"""tcgen05.ld and tcgen05.st (PTX ISA, "tcgen05.ld", "tcgen05.st", "Data Movement Shape")."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cute_nvfp4.sim.errors import InvalidLanes, TensorMemoryError
from cute_nvfp4.sim.frontend.model import Imm, Instruction, Kernel
from cute_nvfp4.sim.frontend.opcodes import Mods, Op
from cute_nvfp4.sim.machine.engine import Cells, Completion, Footprint, Pending
from cute_nvfp4.sim.machine.tensor_memory import COLUMNS, LANES
from cute_nvfp4.sim.numerics import single
from cute_nvfp4.sim.tcgen05.layouts import Movement, movement

_SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
_MOST = {"16x128b": 64, "16x256b": 32}  # greatest .num of a shape, where it is not 128


def whole_warp(g, mask, i: Instruction) -> None:
    """Raises ``InvalidLanes`` unless all live lanes of every warp execute the instruction."""
    if mask is None:
        return
    missing = g.wave.live[g.warps] & ~np.broadcast_to(mask, (g.n, 32))
    if missing.any():
        raise InvalidLanes(f"{i.where()}: {g.thread(missing)} does not take part; the whole warp must")


@lru_cache(maxsize=128)
def _table(shape: str, num: int, packed: bool, split: int) -> np.ndarray:
    """Returns lane * 512 + column of every word, relative to the base address: (registers, 32), or (registers, 32, 2)
    where a register has two ``packed`` words. ``split`` is the offset of the second half of .16x32bx2."""
    m = movement(shape, num)
    column = m.column * (2 if packed else 1) + np.where(m.high, split, 0)[:, None]
    table = (m.lane * COLUMNS + column).T
    return np.stack([table, table + 1], axis=-1) if packed else table


class Move(Pending):
    """One tcgen05.ld or tcgen05.st of k warps. ``table`` is that of ``_table``; ``lane`` and ``column`` (k,) are the
    base addresses. ``values`` (registers, k, 32) holds the loaded or stored registers."""

    engine = "tensor"

    def __init__(self, i: Instruction, wave, warps, kind: str, m: Movement, table, lane, column) -> None:
        super().__init__(i, wave, warps)
        self.completion = Completion("tmem_load" if kind == "load" else "tmem_store")
        self.write, self.movement, self.table, self.lane, self.column = kind == "store", m, table, lane, column
        self.values: np.ndarray | None = None

    def run(self, wave) -> None:
        base = self.ctas * (LANES * COLUMNS) + self.lane * COLUMNS + self.column
        memory = wave.tmem.reshape(-1)
        # The register is the first axis, so that each register is one array (k, 32).
        index = base.reshape(-1, 1, *(1,) * (self.table.ndim - 2)) + self.table[:, None]
        packed = self.table.ndim == 3
        if not self.write:
            got = memory.take(index)
            self.values = (got[..., 0] & np.uint32(0xFFFF)) | got[..., 1] << np.uint32(16) if packed else got
        elif packed:
            memory[index[..., 0]] = self.values & np.uint32(0xFFFF)
            memory[index[..., 1]] = self.values >> np.uint32(16)
        else:
            memory[index] = self.values

    def footprints(self, wave) -> list[Footprint]:
        columns = np.unique(self.table % COLUMNS)
        out = []
        for lane in np.unique(self.lane).tolist():
            rows = np.flatnonzero(self.lane == lane)
            cells = Cells(slice(lane, lane + self.movement.lanes), self.column[rows, None] + columns)
            out.append(Footprint("tensor", self.write, self.ctas[rows], cells, rows))
        return out


def _of_warp(g, addr: np.ndarray, i: Instruction) -> np.ndarray:
    """Returns the address (n,) int64 of each warp, that of its first live lane.

    The ISA wants the same address in all lanes. The hardware reads one register for the warp, which the compiler fills
    from the first lane. In a published kernel (CUTLASS's mixed-input attention), thread t names lane t of the quarter.
    Addresses that differ only in the lane within the quarter are therefore accepted; others raise an error.
    """
    wide = np.broadcast_to(addr, (g.n, 32))
    if addr.shape[-1] == 1:
        return wide[:, 0].astype(np.int64)
    live = g.wave.live[g.warps]
    first = np.take_along_axis(wide, live.argmax(axis=1)[:, None], axis=1)
    within = np.uint32(0x1F0000)
    if ((wide & ~within != first & ~within) & live).any():
        raise TensorMemoryError(f"{i.where()}: the lanes of a warp give different addresses")
    return first[:, 0].astype(np.int64)


class _Form:
    """The modifiers and operands that tcgen05.ld and tcgen05.st share."""

    def __init__(self, i: Instruction, m: Mods, packing: str, split_at: int) -> None:
        m.words("sync", "aligned")
        self.i = i
        self.shape = m.take(*_SHAPES, required=True)
        self.num = int(m.take(*(f"x{1 << j}" for j in range(8)), required=True)[1:])
        if self.num > _MOST.get(self.shape, 128):
            raise m.refuse(f".{self.shape} does not exist with .x{self.num}")
        self.packed = bool(packing) and m.flag(packing)
        self.movement = movement(self.shape, self.num)
        self.split = 0
        self.statics: tuple[str, ...] = ()
        if self.shape == "16x32bx2":
            operand = i.operands[split_at] if len(i.operands) > split_at else None
            if not isinstance(operand, Imm) or operand.kind != "int":
                raise m.refuse("the offset of the second half must be a constant")
            self.split, self.statics = operand.value, ("static",)
        self.table = _table(self.shape, self.num, self.packed, self.split)
        self.width = int((self.table % COLUMNS).max()) + 1
        self.half = self.movement.lanes == 16

    def pending(self, g, mask, addr, off: int, kind: str) -> Move:
        """Returns the operation, after it has checked that the warps may access the address.

        A warp can access only the quarter of the lanes that its index modulo 4 selects. The address must name that
        quarter or quarter 0, because DeepGEMM and CUTLASS's examples leave the quarter out of the address.
        """
        i, wave = self.i, g.wave
        whole_warp(g, mask, i)
        value = _of_warp(g, addr, i) + off
        lane, column = value >> 16 & 0xFFFF, value & 0xFFFF
        quarter = wave.warp_in_cta[g.warps] % 4
        inside, named = lane % 32, lane // 32
        allowed = ((named == quarter) | (named == 0)) & ((inside == 0) | (inside == 16 if self.half else False))
        if allowed.all():
            lane = 32 * quarter + inside
        else:
            row = int(np.flatnonzero(~allowed)[0])
            q = int(quarter[row])
            raise TensorMemoryError(
                f"{i.where()}: {wave.thread(int(g.warps[row]), 0)} may access lanes {32 * q}..{32 * q + 31} only, "
                f"the address names lane {int(lane[row])} for shape .{self.shape}"
            )
        one = Move(i, wave, g.warps, kind, self.movement, self.table, lane, column)
        wave.tensor_memory.require(i.where(), one.ctas, column, self.width)
        return one


def build_load(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Builds tcgen05.ld."""
    if m.flag("red"):
        return _build_reduction(i, m)
    form = _Form(i, m, "pack::16b", 2)
    m.type("b32")
    count = form.movement.registers

    def fn(g, mask, addr, off):
        one = form.pending(g, mask, addr, off, "load")
        g.wave.engines.perform(one)
        return tuple(one.values) if count > 1 else one.values[0]

    return Op(fn, (("b32",) * count,), ("addr", *form.statics), "tensor", context=True, converge=-1)


def _build_reduction(i: Instruction, m: Mods) -> Op:
    """Builds tcgen05.ld.red, which also returns the minimum or maximum of the registers of each thread."""
    form = _Form(i, m, "", 3)
    if form.shape not in ("32x32b", "16x32bx2") or form.num < 2:
        raise m.refuse(f"tcgen05.ld.red does not exist for .{form.shape}.x{form.num}")
    operation = m.take("min", "max", required=True)
    absolute, keep_nan = m.flag("abs"), m.flag("NaN")
    t = m.type("f32") if absolute or keep_nan else m.type("f32", "u32", "s32")
    count = form.movement.registers
    skips_nan = t == "f32" and not keep_nan
    pick = {"min": np.fmin if skips_nan else np.minimum, "max": np.fmax if skips_nan else np.maximum}[operation]

    def fn(g, mask, addr, off):
        one = form.pending(g, mask, addr, off, "load")
        g.wave.engines.perform(one)
        values = one.values.view({"f32": "f4", "u32": "u4", "s32": "i4"}[t])
        values = np.abs(values) if absolute else values
        reduced = pick.reduce(values, axis=0)
        return (*one.values, single.canonical(reduced) if t == "f32" else reduced)

    return Op(fn, (("b32",) * count, t), ("addr", *form.statics), "tensor", context=True, converge=-1)


def build_store(i: Instruction, m: Mods, k: Kernel) -> Op:
    """Builds tcgen05.st."""
    form = _Form(i, m, "unpack::16b", 1)
    m.type("b32")
    count = form.movement.registers

    def fn(g, mask, addr, off, registers):
        one = form.pending(g, mask, addr, off, "store")
        one.values = np.stack([np.broadcast_to(r, (g.n, 32)) for r in registers])
        g.wave.engines.perform(one)

    return Op(fn, (), ("addr", *form.statics, ("b32",) * count), "tensor", context=True, converge=-1)
