"""The counters that ``run`` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_nvfp4.sim.checks.findings import Finding, grouped
from cute_nvfp4.sim.observe.l2 import L2Traffic
from cute_nvfp4.sim.observe.timing import Timing


@dataclass
class Counted:
    """The PTX instruction that a counter is about: its text, its line in the PTX, and ``loc``, its file and line in the
    source ("" if the compiler left none)."""

    instruction: str
    line: int
    loc: str


@dataclass
class MemoryCounter(Counted):
    """The requests of one memory instruction to one state space.

    ``space`` is "global", "shared" (of the own CTA), "cluster" (shared memory of any CTA, or by generic address),
    "local", or "param" (loads at one address for all lanes are left out). ``kind`` is "load", "store" or "atomic".
    ``width`` is the bytes that one lane accesses. ``policy`` has the cache qualifiers as written.
    ``requests`` counts executions by a warp with at least one active lane. ``sectors`` counts the distinct 32-byte
    sectors of each request to global memory. ``bytes`` counts what the active lanes asked for.
    ``passes`` counts the passes in which the banks of shared memory serve the requests, ``ideal_passes`` those without
    bank conflicts (see ``banks``). Lanes of an atomic that meet in one word add no pass.
    """

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
        """The passes that bank conflicts add."""
        return self.passes - self.ideal_passes


@dataclass
class EngineCounter(Counted):
    """The operations of one asynchronous instruction, and the bytes that they moved.

    ``engine`` is "tma" (loads), "store" (bulk and TMA stores), "tensor" (tensor core) or "copy" (cp.async, whose
    operations are counted by thread). A multicast reads global memory once and writes the shared memory of every
    destination; a reduction reads and writes what it changes. Shared memory is counted in chunks of 16 bytes.
    """

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
    """The matrix operations of one kind ("mma.sync f16", "wgmma bf16", "tcgen05.mma mxf4nvf4"). ``multiply_adds`` sums
    M * N * K over the operations, masked and zero elements included."""

    kind: str
    operations: int = 0
    multiply_adds: int = 0


@dataclass
class WaitCounter(Counted):
    """The waits at one instruction. ``parked`` counts how often a warp waited for at least one step, from when its
    first lanes stopped until its last ones went on. ``steps`` sums these waits. A step is a basic block that a group of
    warps executes, or an operation of an engine; it is no measure of time."""

    parked: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Result:
    """The counters of one launch. ``memory``, ``distinct_bytes``, ``engines``, ``waits``, ``mma``, ``l2`` and
    ``thread_instructions`` are empty unless counters were asked for.

    ``warps`` is the number of warps in the grid.
    ``opcodes`` and ``classes`` count the instructions that warps issued, by opcode and by class of instruction. A warp
    counts once, however many of its lanes are active.
    ``memory`` has an entry for each memory instruction and state space.
    ``distinct_bytes`` counts the bytes of all 32-byte sectors of global memory that threads or engines touched, by kind
    of access ("load", "store", "atomic"). A sector counts once in the launch.
    ``engines`` has an entry for each asynchronous instruction, ``waits`` for each instruction at which warps waited,
    ``mma`` for each kind of matrix instruction.
    ``l2`` is the traffic between a modelled L2 and DRAM.
    ``lines`` says how often warps ran each line of the PTX, ``executed`` how often they ran each instruction, by its
    index in the kernel. Both leave out what never ran.
    ``thread_instructions`` sums the active lanes over all instructions. Lanes that a predicate turns off are active.
    ``findings`` are those that did not stop the launch, one for each class and instruction.
    ``timing`` is the modelled time, None without a clock.
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
        """The suspicious findings and the hazards of allowed classes, one text for each class."""
        return grouped(self.findings, "warning")

    @property
    def hazards(self) -> tuple[str, ...]:
        """The hazards that ``on_hazard="collect"`` did not let stop the launch, one text for each class."""
        return grouped(self.findings, "hazard")

    @property
    def instructions(self) -> int:
        """The number of instructions that warps issued."""
        return sum(self.opcodes.values())

    def __str__(self) -> str:
        """Returns what was executed, counted, found and modelled, in one line."""
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
        """The passes that bank conflicts add, over all instructions."""
        return sum(m.conflicts for m in self.memory)
