"""What a launch did: instructions by opcode and class, memory requests, sectors and bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cute_nvfp4.sim.regions import SECTOR

if TYPE_CHECKING:
    from cute_nvfp4.sim.access import Access
    from cute_nvfp4.sim.host import Launch
    from cute_nvfp4.sim.program import CompiledKernel
    from cute_nvfp4.sim.regions import GlobalMemory
    from cute_nvfp4.sim.wave import Group


@dataclass
class MemoryCounter:
    """Counts of one memory instruction: ``requests`` are warp-level executions with at least one active lane,
    ``sectors`` the distinct 32-byte sectors summed over requests (global), ``bytes`` what active lanes asked for."""

    instruction: str
    line: int
    loc: str
    space: str
    kind: str
    width: int
    policy: tuple[str, ...]
    requests: int = 0
    sectors: int = 0
    bytes: int = 0

    @property
    def sectors_per_request(self) -> float:
        return self.sectors / self.requests if self.requests else 0.0


@dataclass(frozen=True)
class Result:
    """Counters of one launch.

    ``opcodes`` and ``classes`` count warp-level instructions issued (one for a warp, however many lanes are active).
    ``memory`` has one entry a memory instruction, ``distinct_bytes`` the bytes of distinct global sectors by kind
    ("load", "store", "atomic"), each counted once in the launch; both are empty unless counters were asked for.
    """

    kernel: str
    warps: int
    opcodes: dict[str, int]
    classes: dict[str, int]
    memory: list[MemoryCounter] = field(default_factory=list)
    distinct_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def instructions(self) -> int:
        """Warp-level instructions of the launch."""
        return sum(self.opcodes.values())

    @property
    def instructions_per_warp(self) -> float:
        return self.instructions / self.warps


class Counters:
    """Collects counts while a launch runs."""

    def __init__(self, kernel: CompiledKernel, memory: GlobalMemory) -> None:
        self._executed = [0] * len(kernel.blocks)
        self._memory: dict[int, MemoryCounter] = {}
        self._touched: dict[tuple[str, int], np.ndarray] = {}
        self._regions = memory

    def count_block(self, block: int, group: Group) -> None:
        self._executed[block] += group.n

    def memory(self, g: Group, a: Access, space: str, host: np.ndarray, mask: np.ndarray | None) -> None:
        """Records one execution of a memory instruction by the lanes in ``mask``."""
        key = id(a)
        if key not in self._memory:
            i = a.instruction
            self._memory[key] = MemoryCounter(i.text, i.line, i.loc, space, a.kind, a.total, a.policy)
        counter = self._memory[key]
        lanes = g.lanes() if mask is None else np.broadcast_to(mask, (g.n, 32))
        counter.requests += int(lanes.any(axis=1).sum())
        counter.bytes += int(lanes.sum()) * a.total
        if space != "global":
            return
        # Lanes that do not take part repeat the sector of one that does.
        full = np.broadcast_to(host, (g.n, 32))
        held = full[np.arange(g.n), lanes.argmax(axis=1)][:, None]
        sectors = np.sort(np.where(lanes, full, held) // SECTOR, axis=1)
        distinct = (np.diff(sectors, axis=1) != 0).sum(axis=1) + 1
        counter.sectors += int(distinct[lanes.any(axis=1)].sum())
        self._touch(a.kind, np.unique(sectors[lanes.any(axis=1)]))

    def _touch(self, kind: str, sectors: np.ndarray) -> None:
        for region in self._regions.regions:
            first = region.base // SECTOR
            inside = sectors[(sectors >= first) & (sectors <= (region.end - 1) // SECTOR)]
            if len(inside):
                key = (kind, region.base)
                if key not in self._touched:
                    self._touched[key] = np.zeros((region.end - 1) // SECTOR - first + 1, bool)
                self._touched[key][inside - first] = True

    def result(self, kernel: CompiledKernel, launch: Launch) -> Result:
        opcodes: dict[str, int] = {}
        classes: dict[str, int] = {}
        for block, times in zip(kernel.blocks, self._executed):
            for instruction, op in block.code if times else []:
                opcodes[instruction.opcode] = opcodes.get(instruction.opcode, 0) + times
                classes[op.klass] = classes.get(op.klass, 0) + times
        distinct: dict[str, int] = {}
        for (kind, _), seen in self._touched.items():
            distinct[kind] = distinct.get(kind, 0) + int(seen.sum()) * SECTOR
        block_threads = launch.block[0] * launch.block[1] * launch.block[2]
        warps = launch.grid[0] * launch.grid[1] * launch.grid[2] * -(-block_threads // 32)
        memory = sorted(self._memory.values(), key=lambda c: c.line)
        return Result(
            launch.kernel, warps, dict(sorted(opcodes.items())), dict(sorted(classes.items())), memory, distinct
        )
