"""wgmma.mma_async as an operation of warpgroups.

The simulator executes the operation when it is issued, so its results do not show whether the program waits for it.
The checks find missing waits (``checks/warpgroups.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.engine import Completion, Footprint, Pending
from cute_nvfp4.sim.machine.wave import Wave
from cute_nvfp4.sim.tcgen05 import operands
from cute_nvfp4.sim.tcgen05.descriptor import PERIOD, MatrixDescriptor
from cute_nvfp4.sim.wgmma import sums
from cute_nvfp4.sim.wgmma.fragments import WARPS

ROWS = 64
"""Number of rows of A and D."""
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
"""Bits of an element, by type."""


@dataclass(frozen=True)
class Form:
    """The qualifiers and constant operands of the instruction. K is ``k``, and M is ``ROWS``."""

    a: str  # element types of A, B and D
    b: str
    d: str
    n: int
    negate_a: bool = False
    negate_b: bool = False
    a_mn_major: bool = False
    b_mn_major: bool = False
    saturate: bool = False

    @property
    def k(self) -> int:
        return 256 // BITS[self.a]


@dataclass(frozen=True)
class Operand:
    """An operand tile in shared memory."""

    matrix: MatrixDescriptor
    start: np.ndarray  # (w,) start address of each warpgroup; they agree modulo 1024
    mn_major: bool
    rows: int  # extent of M or N
    type: str

    @property
    def low(self) -> int:
        return int(self.start[0]) % PERIOD

    def chunks(self) -> np.ndarray:
        """Returns the chunk numbers (rows, 2) from ``start - low`` on, or (K, chunks of a row) with ``mn_major``."""
        return operands.operand_chunks(self.matrix, self.mn_major, self.low, (0,), self.rows, BITS[self.type])

    def read(self, wave: Wave, ctas: np.ndarray, where) -> np.ndarray:
        """Returns the operand as f32 (w, rows, K) from the shared memory of ``ctas`` (w,)."""
        base = self.start - self.low
        raw = operands.gather(wave.shared2d, ctas[:, None], base, self.chunks(), wave.shared_bytes, where)
        return operands.matrix(raw, self.type, self.mn_major)


class Mma(Pending):
    """One wgmma.mma_async of w warpgroups. ``warps`` (4 w,) holds them warpgroup by warpgroup.

    ``a`` is an ``Operand``, or f32 (w, 64, K) from registers. ``c`` (w, 64, N) is the old D, which is added where
    ``enable`` (w,) is set. ``result`` is the new D once ``run`` has returned.
    """

    engine = "tensor"
    completion = Completion("wgmma")

    def __init__(
        self, instruction: Instruction, wave: Wave, warps: np.ndarray, form: Form, a: Operand | np.ndarray, b: Operand,
        c: np.ndarray, enable: np.ndarray,
    ) -> None:  # fmt: skip
        super().__init__(instruction, wave, warps)
        self.form, self.a, self.b, self.c, self.enable = form, a, b, c, enable
        self.result = c

    def run(self, wave: Wave) -> None:
        form, ctas, where = self.form, self.ctas[::WARPS], self.instruction.where
        a = self.a.read(wave, ctas, where) if isinstance(self.a, Operand) else self.a
        b = self.b.read(wave, ctas, where)
        if form.negate_a != form.negate_b:
            a = -a
        c = self.c
        if not self.enable.any():
            c = None
        elif not self.enable.all():
            c = np.where(self.enable[:, None, None], c, c.dtype.type(0))
        self.result = sums.multiply(a, b, c, (form.a, form.b, form.d), form.saturate)

    def footprints(self, wave: Wave) -> list[Footprint]:
        """Returns the footprints of A and B. Every warp must have synchronised with all that its warpgroup reads. Each
        warp therefore accounts for a quarter of an operand that another warp has probably written."""
        out = []
        for one in (self.a, self.b):
            if isinstance(one, Operand):
                table = one.chunks()
                base = one.start - one.low
                operands.check_inside(base, table, wave.shared_bytes, self.instruction.where)
                quarters = np.roll(table.reshape(WARPS, -1), -1, axis=0)
                chunks = base[:, None, None] + 16 * quarters
                out.append(Footprint("shared", False, self.ctas, chunks.reshape(len(self.ctas), -1)))
        return out
