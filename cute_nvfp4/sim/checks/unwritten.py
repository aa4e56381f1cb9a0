"""Decides whether the values matter that loads read from shared or tensor memory which nobody has written.

Kernels read rows beyond the last one, compute with them and store no result of it. So the launch goes on after such a
load. When it is over it runs again from the same global memory, each time with other values in exactly the bytes that
were read too early: large, large and negative, NaN. The values do not matter if these runs have the same addresses,
branches and bytes that lanes store to global memory, and leave the same global memory as the first run. This follows
the values through every instruction: selects, shuffles, the rows of an mma.
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
"""The high bits of each 16-bit word in one run. With random low bits (``_LOW``) they make values that are large in
every format, large and negative, or NaN."""
_LOW = 0x03FF


class Unwritten:
    """The reads of unwritten memory in one launch.

    ``bytes_read[wave, space]`` (bytes,) marks what was read of the "shared" or "tensor" memory of a wave. ``reads`` has
    the message for each instruction, about its first such read.
    """

    def __init__(self, findings: Findings, memory: GlobalMemory) -> None:
        self.findings, self.memory = findings, memory
        self.reads: dict[tuple[int, str], tuple[str, Instruction]] = {}
        self.bytes_read: dict[tuple[int, str], np.ndarray] = {}
        # by base address: the regions that the launch writes, and their bytes before the launch
        self._before: dict[int, tuple[Region, np.ndarray]] = {}

    def written(self, region: Region) -> None:
        """Keeps the bytes of ``region``, which the launch is about to write for the first time."""
        self._before[region.base] = (region, _bytes(region).copy())

    def read(
        self, wave: int, space: str, size: int, at: np.ndarray, say: Callable[[], str], instruction: Instruction
    ) -> None:
        """Records that ``instruction`` reads the unwritten bytes ``at`` of a memory of ``size`` bytes of a wave.

        ``wave`` is the number of the wave, ``space`` is "shared" or "tensor", and ``say`` returns the message.
        """
        marked = self.bytes_read.setdefault((wave, space), np.zeros(size, bool))
        marked[at[at < size]] = True
        key = (instruction.line, instruction.text)
        if key not in self.reads:
            self.reads[key] = say(), instruction

    def settle(self, again: Callable[[Client], Any]) -> None:
        """Reports the reads when the launch is over; ``again`` runs it once more, with one client only."""
        if not self.reads:
            return
        why = "" if RULE in self.findings.allow else self._matters(again)
        for message, instruction in self.reads.values():
            if why:
                self.findings.hazard(RULE, f"{message};\n  its value decides {why}", instruction)
            else:
                self.findings.warn(RULE, f"{message}; no address, branch or stored byte depends on it", instruction)

    def stopped(self) -> None:
        """Reports the reads as warnings: the launch has stopped before it was known whether they matter."""
        for message, instruction in self.reads.values():
            self.findings.warn(RULE, message, instruction)

    def _matters(self, again: Callable[[Client], Any]) -> str:
        """Returns what depends on the values, in words; "" if nothing does."""
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
        """Returns the name of the first byte of global memory that differs from ``end``; "" if none does."""
        for base, (region, _) in self._before.items():
            other = _bytes(region) != end[base]
            if other.any():
                return self.memory.describe(base + int(other.argmax())).partition(" is ")[2]
        return ""


class _Differs(Exception):
    """Raised when a run takes another step than the first run with other values."""


class Trail(Listener):
    """A client that fills the bytes of a run and compares its steps with those of the ``first`` such run.

    ``bytes_read`` are the marks of ``Unwritten``; ``fill`` is one of ``FILLS``. ``steps`` are checksums of branches,
    addresses and bytes stored to global memory. Addresses of shared and local memory are relative to its start, because
    each run may allocate it elsewhere.
    """

    def __init__(self, bytes_read: dict[tuple[int, str], np.ndarray], fill: int, first: Trail | None) -> None:
        self.bytes_read, self.fill, self.first = bytes_read, fill, first
        self.steps: list[int] = []
        self.text = ""
        self._waves = 0
        self._quiet = False
        self._tensor: tuple[np.ndarray, np.ndarray] | None = None

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        """Fills the marked bytes of shared memory, and returns this client as the listener."""
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
        """Fills the marked words of fresh columns: they hold what an earlier owner left."""
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
