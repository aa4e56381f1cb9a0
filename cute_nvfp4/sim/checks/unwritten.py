"""Whether it matters what a load has read from shared or tensor memory that nobody has written.

Kernels read rows beyond the last one, compute with them and store nothing of it. So the launch goes on, and at its end
it is run again from the same global memory, each time with other values in exactly the bytes that were read too early:
large, large and negative, NaN. Where the addresses, the branches, the bytes that lanes store to global memory, and the
global memory at the end are always the same, the values go nowhere. That follows them through every instruction:
selects, shuffles, the rows of an mma.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from cute_nvfp4.errors import SimError
from cute_nvfp4.sim.checks.findings import Findings
from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.engine import Pending
from cute_nvfp4.sim.machine.events import Client, Listener, Mask, Values
from cute_nvfp4.sim.machine.global_memory import GlobalMemory, Region
from cute_nvfp4.sim.machine.requests import Access
from cute_nvfp4.sim.machine.wave import Group, Wave

RULE = "uninitialized-read"
FILLS = (0x7800, 0xF800, 0xFFFF)
"""High bits of each 16-bit word: with random low bits large in every format, large and negative, NaN."""
_LOW = 0x03FF


class Unwritten:
    """The reads of one launch. ``bytes_read[wave, space]`` marks bytes of the wave's "shared" or "tensor" memory."""

    def __init__(self, findings: Findings, memory: GlobalMemory) -> None:
        self.findings, self.memory = findings, memory
        self.reads: dict[tuple[int, str], tuple[str, Instruction]] = {}
        self.bytes_read: dict[tuple[int, str], np.ndarray] = {}
        self._before: dict[int, tuple[Region, np.ndarray]] = {}

    def written(self, region: Region) -> None:
        """The launch is about to write ``region`` for the first time."""
        self._before[region.base] = (region, _bytes(region).copy())

    def read(
        self, wave: int, space: str, size: int, at: np.ndarray, say: Callable[[], str], instruction: Instruction
    ) -> None:
        """``instruction`` reads bytes ``at`` of a memory of ``size`` bytes of a wave; ``say`` words it."""
        marked = self.bytes_read.setdefault((wave, space), np.zeros(size, bool))
        marked[at[at < size]] = True
        key = (instruction.line, instruction.text)
        if key not in self.reads:
            self.reads[key] = say(), instruction

    def settle(self, again: Callable[[Client], Any]) -> None:
        """Reports the reads, when the launch is over; ``again`` runs it with one client and nothing else."""
        if not self.reads:
            return
        why = "" if RULE in self.findings.allow else self._matters(again)
        for message, instruction in self.reads.values():
            if why:
                self.findings.hazard(RULE, f"{message};\n  its value decides {why}", instruction)
            else:
                self.findings.warn(RULE, f"{message}; no address, branch or stored byte depends on it", instruction)

    def stopped(self) -> None:
        """The launch was stopped before it could be known."""
        for message, instruction in self.reads.values():
            self.findings.warn(RULE, message, instruction)

    def _matters(self, again: Callable[[Client], Any]) -> str:
        """A name of what depends on the values; "" for nothing."""
        end = {base: _bytes(region).copy() for base, (region, _) in self._before.items()}
        first = None
        try:
            for fill in FILLS:
                for region, before in self._before.values():
                    _bytes(region)[:] = before
                trail, text = Trail(self.bytes_read, fill, first), io.StringIO()
                try:
                    with contextlib.redirect_stdout(text):
                        again(trail)
                except _Differs as different:
                    return str(different)
                except SimError as error:
                    return f"whether the kernel runs: with other values it is {type(error).__name__}: {error}"
                if where := self._changed(end):
                    return f"what is stored at {where}"
                trail.text = text.getvalue()
                if first is not None and (len(trail.steps) != len(first.steps) or trail.text != first.text):
                    return "what the kernel executes or prints"
                first = first or trail
        finally:
            for base, (region, _) in self._before.items():
                _bytes(region)[:] = end[base]
        return ""

    def _changed(self, end: dict[int, np.ndarray]) -> str:
        """The first byte of global memory that is not as in the first run."""
        for base, (region, _) in self._before.items():
            other = _bytes(region) != end[base]
            if other.any():
                return self.memory.describe(base + int(other.argmax())).partition(" is ")[2]
        return ""


class _Differs(Exception):
    """Another value has made a difference."""


class Trail(Listener):
    """Client of a run with other values: what it decides, step by step, compared with the ``first`` such run.

    ``steps`` are check sums. Addresses are taken from the start of the memory they lie in, for it may lie elsewhere.
    """

    def __init__(self, bytes_read: dict[tuple[int, str], np.ndarray], fill: int, first: Trail | None) -> None:
        self.bytes_read, self.fill, self.first = bytes_read, fill, first
        self.steps: list[int] = []
        self.text = ""
        self._waves = 0
        self._quiet = False
        self._tensor: tuple[np.ndarray, np.ndarray] | None = None

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        """Fills the bytes, and listens."""
        marked = self.bytes_read.get((self._waves, "shared"))
        if marked is not None:
            wave.shared2d.reshape(-1)[marked] = self._values(len(marked))[marked]
        marked, self._tensor = self.bytes_read.get((self._waves, "tensor")), None
        if marked is not None:
            self._tensor = wave.tmem, marked.reshape(*wave.tmem.shape, 4).any(axis=-1)
        self._waves += 1
        return (self,)

    def _values(self, size: int) -> np.ndarray:
        words = np.random.default_rng(0).integers(0, _LOW + 1, -(-size // 2), np.uint16) | self.fill
        return words.astype(np.uint16).view(np.uint8)[:size]

    def tensor_allocated(self, cta: np.ndarray, first: np.ndarray, columns: np.ndarray) -> None:
        """Fresh columns hold what an earlier owner left."""
        if self._tensor is None:
            return
        memory, marked = self._tensor
        for c, f, n in zip(cta.tolist(), first.tolist(), columns.tolist()):
            words = self._values(4 * 128 * n).view(np.uint32).reshape(128, n)
            span = slice(f, f + n)
            memory[c, :, span] = np.where(marked[c, :, span], words, memory[c, :, span])

    def starts(self, pending: Pending) -> None:
        self._quiet = True

    def ended(self, pending: Pending) -> None:
        self._quiet = False

    def block(self, g: Group, index: int) -> None:
        def where() -> str:
            code = g.wave.run.kernel.blocks[index].code
            return f"a branch: whether {g.thread()} comes to {code[0][0].where() if code else 'the end'}"

        self._step(where, index, g.warps, g.lanes())

    def load(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        self._access(g, a, space, host, mask, ())

    def store(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask, values: Values) -> None:
        self._access(g, a, space, host, mask, values if space == "global" else ())

    def atomic(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        self._access(g, a, space, host, mask, ())

    def _access(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask, values: Values) -> None:
        if self._quiet or space == "param":
            return
        start = {"shared": g.wave.shared, "cluster": g.wave.shared, "local": g.wave.local}.get(space)
        lanes = g.lanes(mask)
        address, *data = (np.broadcast_to(v, lanes.shape)[lanes] for v in (host, *values))
        what = "address or the bytes" if values else "address"
        self._step(lambda: f"the {what} of {a.instruction.where()}", address - (start.base if start else 0), *data)

    def _step(self, where: Callable[[], str], *parts: Any) -> None:
        total = 0
        for part in parts:
            total = zlib.crc32(np.ascontiguousarray(part).tobytes(), total)
        if self.first is not None:
            at = len(self.steps)
            if at >= len(self.first.steps) or self.first.steps[at] != total:
                raise _Differs(where())
        self.steps.append(total)


def _bytes(region: Region) -> np.ndarray:
    """The live bytes of a region."""
    return np.frombuffer((ctypes.c_uint8 * region.size).from_address(region.base), np.uint8)
