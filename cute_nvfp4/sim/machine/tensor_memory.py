"""Allocation of tensor memory (PTX ISA, "Tensor Memory Allocation and Management").

Columns are allocated in powers of two from 32 on, the lowest free columns first. Every instruction that accesses tensor
memory calls ``require`` for its columns.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.errors import TensorMemoryError
from cute_nvfp4.sim.machine.protocols import Wave

LANES, COLUMNS = 128, 512


class TensorMemory:
    """The allocations of tensor memory of each CTA of a wave.

    ``allocated`` and ``freed`` (CTAs, 512) mark columns that are allocated, and that were deallocated since.
    ``blocks[cta]`` maps the first column of each allocation to its number of columns. ``relinquished`` (CTAs,) marks
    CTAs that may allocate no more, ``requests`` (CTAs,) counts their tcgen05.alloc. ``group`` is the cta_group, or 0.
    """

    def __init__(self, wave: Wave) -> None:
        self.wave = wave
        self.allocated = np.zeros((wave.count, COLUMNS), bool)
        self.blocks: list[dict[int, int]] = [{} for _ in range(wave.count)]
        self.freed = np.zeros((wave.count, COLUMNS), bool)
        self.relinquished = np.zeros(wave.count, bool)
        self.requests = np.zeros(wave.count, np.int64)
        self.group = 0

    def same_group(self, where: str, cta_group: int) -> None:
        """Checks that an instruction names the same cta_group as those before, as the ISA demands of a kernel."""
        if self.group and self.group != cta_group:
            raise TensorMemoryError(f"{where}: .cta_group::{cta_group}, but an earlier instruction says {self.group}")
        self.group = cta_group

    def check_request(self, where: str, cta: int, columns: int) -> None:
        """Checks that the CTA may still allocate, and this number of columns."""
        if self.relinquished[cta]:
            raise TensorMemoryError(
                f"{where}: {self.wave.cta_name(cta)} allocates after tcgen05.relinquish_alloc_permit"
            )
        if columns < 32 or columns > COLUMNS or columns & (columns - 1):
            raise TensorMemoryError(f"{where}: {columns} columns; a power of two from 32 to {COLUMNS} is allowed")

    def find(self, cta: int, columns: int, taken: np.ndarray | None = None) -> int:
        """Returns the first of the lowest ``columns`` free columns, or -1; ``taken`` (512,) replaces ``allocated``."""
        busy = self.allocated[cta] if taken is None else taken
        busy_32 = busy.reshape(-1, 32).any(axis=1)
        want = columns // 32
        for base in range(len(busy_32) - want + 1):
            if not busy_32[base : base + want].any():
                return 32 * base
        return -1

    def allocate(self, cta: int, columns: int) -> int:
        """Allocates the columns that ``find`` returns, which must exist; returns the first."""
        base = self.find(cta, columns)
        self.allocated[cta, base : base + columns] = True
        self.freed[cta, base : base + columns] = False
        self.blocks[cta][base] = columns
        return base

    def free(self, where: str, cta: int, address: int, columns: int) -> None:
        """Executes tcgen05.dealloc; raises ``TensorMemoryError`` if the columns are not one whole allocation."""
        base, lane = address & 0xFFFF, address >> 16
        have = self.blocks[cta].get(base)
        if lane or have != columns:
            blocks = ", ".join(f"{b}..{b + n - 1}" for b, n in sorted(self.blocks[cta].items())) or "nothing"
            raise TensorMemoryError(
                f"{where}: {columns} columns at {address:#x} are not an allocation of {self.wave.cta_name(cta)}, "
                f"which has {blocks}"
            )
        del self.blocks[cta][base]
        self.allocated[cta, base : base + columns] = False
        self.freed[cta, base : base + columns] = True
        self.wave.progress += 1

    def require(self, where: str, cta: np.ndarray, first: np.ndarray, count: int) -> None:
        """Raises ``TensorMemoryError`` unless ``count`` columns from ``first`` (k,) on of CTAs (k,) are allocated."""
        low = int(first[0])
        if (first == low).all():
            good = low + count <= COLUMNS and bool(self.allocated[cta, low : low + count].all())
        else:
            good = int(first.max()) + count <= COLUMNS and bool(
                self.allocated[cta[:, None], first[:, None] + np.arange(count)].all()
            )
        if not good:
            self._refuse(where, cta, first, count)

    def _refuse(self, where: str, cta: np.ndarray, first: np.ndarray, count: int) -> None:
        for c, base in zip(cta.tolist(), first.tolist()):
            for column in range(base, base + count):
                if column < COLUMNS and self.allocated[c, column]:
                    continue
                state = "does not exist" if column >= COLUMNS else "is not allocated"
                if column < COLUMNS and self.freed[c, column]:
                    state = "has been deallocated"
                name = self.wave.cta_name(c)
                raise TensorMemoryError(f"{where}: column {column} of the tensor memory of {name} {state}")

    def cta_exited(self, ctas: np.ndarray) -> None:
        """Raises ``TensorMemoryError`` if a CTA of ``ctas`` (k,), which end, has not freed all of its allocations."""
        for cta in ctas.tolist():
            if self.blocks[cta]:
                base, columns = next(iter(sorted(self.blocks[cta].items())))
                name = self.wave.cta_name(cta)
                raise TensorMemoryError(
                    f"{name} of {self.wave.run.launch.title} ends without tcgen05.dealloc of columns "
                    f"{base}..{base + columns - 1}"
                )
