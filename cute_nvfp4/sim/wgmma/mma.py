"""wgmma.mma_async as an operation of warpgroups.

It is done when it is issued, so that its results do not show whether somebody waited for it: that is what the checks
are for (``checks/warpgroups.py``).
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
"""Rows of D and A."""
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}


@dataclass(frozen=True)
class Form:
    """What the instruction says: element types, N, signs of A and B, which operands are transposed (MN-major)."""

    a: str
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
    """A matrix in shared memory: its descriptor, and the start addresses (w,) of one each warpgroup, which agree modulo
    1024."""

    matrix: MatrixDescriptor
    start: np.ndarray
    mn_major: bool
    rows: int
    type: str

    @property
    def low(self) -> int:
        return int(self.start[0]) % PERIOD

    def chunks(self) -> np.ndarray:
        """Chunk numbers, counted from ``start - low``: (rows, 2), or MN-major (K, chunks of a row)."""
        return operands.operand_chunks(self.matrix, self.mn_major, self.low, (0,), self.rows, BITS[self.type])

    def read(self, wave: Wave, ctas: np.ndarray, where) -> np.ndarray:
        """(w, rows, K) f32 from the shared memory of CTAs (w,)."""
        base = self.start - self.low
        raw = operands.gather(wave.shared2d, ctas[:, None], base, self.chunks(), wave.shared_bytes, where)
        return operands.matrix(raw, self.type, self.mn_major)


class Mma(Pending):
    """One instruction of w warpgroups, whose warps (4 w,) come group by group. ``a`` is an ``Operand``, or (w, 64, K)
    f32 from registers; ``c`` (w, 64, N) is what D was, and counts where ``enable`` (w,) says so. ``result`` is D."""

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
        """Each warp answers for a quarter of an operand, which another warp is likely to have written: all that a
        warpgroup reads must be known to all of its warps."""
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
