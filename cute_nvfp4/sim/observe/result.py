"""What a launch did, in numbers: the counters that a run returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_nvfp4.sim.checks.findings import Finding, grouped
from cute_nvfp4.sim.observe.l2 import L2Traffic
from cute_nvfp4.sim.observe.timing import Timing


@dataclass
class Counted:
    """Which instruction of the PTX a counter is about: its text, its line, its place in the source."""

    instruction: str
    line: int
    loc: str


@dataclass
class MemoryCounter(Counted):
    """Counts of one memory instruction: ``requests`` are warp-level executions with at least one active lane,
    ``sectors`` the distinct 32-byte sectors summed over requests (global), ``bytes`` what active lanes asked for.
    ``passes`` are the turns that the banks of shared memory need, ``ideal_passes`` those they would need if no two
    words of a phase shared a bank (see ``banks``; lanes that meet in an atomic are not counted)."""

    space: str
    kind: str
    width: int
    policy: tuple[str, ...]
    requests: int = 0
    sectors: int = 0
    bytes: int = 0
    passes: int = 0
    ideal_passes: int = 0

    @property
    def sectors_per_request(self) -> float:
        return self.sectors / self.requests if self.requests else 0.0

    @property
    def conflicts(self) -> int:
        """Passes lost to bank conflicts."""
        return self.passes - self.ideal_passes


@dataclass
class EngineCounter(Counted):
    """Operations of one asynchronous instruction, and the bytes they moved. ``engine`` is "tma", "store", "tensor" or
    "copy" (whose operations are threads). A multicast reads global memory once and writes the shared memory of every
    destination; a reduction reads and writes what it changes. Shared memory is counted in chunks of 16 bytes."""

    engine: str
    operations: int = 0
    global_read: int = 0
    global_written: int = 0
    shared_read: int = 0
    shared_written: int = 0
    tensor_read: int = 0
    tensor_written: int = 0


@dataclass
class MmaCounter:
    """Matrix work of one kind ("mma.sync f16", "wgmma bf16", "tcgen05.mma mxf4nvf4"): ``multiply_adds`` is M * N * K
    summed over the operations, whatever was masked or zero."""

    kind: str
    operations: int = 0
    multiply_adds: int = 0


@dataclass
class WaitCounter(Counted):
    """How often a warp, or a part of it, was parked at an instruction, and for how many steps, summed over warps. A
    step is one block executed by a group of warps, or one operation of an engine: it is not time."""

    parked: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Result:
    """Counters of one launch.

    ``opcodes`` and ``classes`` count warp-level instructions issued (one for a warp, however many lanes are active),
    ``lines`` the same by line of the PTX, ``executed`` by index of the instruction in its kernel: what never ran is in
    neither. ``findings`` are what the checks found and went on past, one entry a class and instruction; ``warnings``
    and ``hazards`` tell them by class. All else is empty unless counters were asked for. ``memory`` has one entry a
    memory instruction; ``distinct_bytes`` the bytes of distinct global sectors by kind ("load", "store", "atomic"),
    each counted once in the launch, whether threads or engines touched it; ``engines`` one entry an asynchronous
    instruction, ``waits`` one an instruction at which warps were parked, ``mma`` one a kind of matrix instruction;
    ``l2`` the traffic of a modelled cache; ``thread_instructions`` are instructions times active lanes (those that a
    predicate turns off are active).
    ``timing`` is the modelled time, if a clock was asked for.
    """

    kernel: str
    warps: int
    opcodes: dict[str, int]
    classes: dict[str, int]
    memory: list[MemoryCounter] = field(default_factory=list)
    distinct_bytes: dict[str, int] = field(default_factory=dict)
    engines: list[EngineCounter] = field(default_factory=list)
    waits: list[WaitCounter] = field(default_factory=list)
    mma: list[MmaCounter] = field(default_factory=list)
    l2: L2Traffic | None = None
    lines: dict[int, int] = field(default_factory=dict)
    executed: dict[int, int] = field(default_factory=dict)
    thread_instructions: int = 0
    findings: tuple[Finding, ...] = ()
    timing: Timing | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Suspicious findings, and hazards of classes that were allowed; one text a class."""
        return grouped(self.findings, "warning")

    @property
    def hazards(self) -> tuple[str, ...]:
        """What ``on_hazard="collect"`` went on past; one text a class."""
        return grouped(self.findings, "hazard")

    @property
    def instructions(self) -> int:
        """Warp-level instructions of the launch."""
        return sum(self.opcodes.values())

    def __str__(self) -> str:
        """What was executed, counted, found and modelled, in a line."""
        loads = [m for m in self.memory if (m.space, m.kind) == ("global", "load")]
        requests, conflicts = sum(m.requests for m in loads), self.bank_conflicts
        parts = [f"{self.instructions:,} warp instructions in {self.warps:,} warps"]
        if requests:
            parts.append(f"{sum(m.sectors for m in loads) / requests:.1f} sectors a load request")
        parts += [f"{conflicts:,} bank conflicts"] * bool(conflicts)
        parts += [f"{m.operations:,} {m.kind}" for m in self.mma]
        parts += [f"{len(self.findings)} findings of the checks"] * bool(self.findings)
        if self.timing is not None:
            parts.append(f"modelled {self.timing.microseconds:.2f} µs on {self.timing.machine}")
        return ", ".join(parts)

    @property
    def instructions_per_warp(self) -> float:
        return self.instructions / self.warps

    @property
    def bank_conflicts(self) -> int:
        """Passes lost to bank conflicts by all instructions."""
        return sum(m.conflicts for m in self.memory)
