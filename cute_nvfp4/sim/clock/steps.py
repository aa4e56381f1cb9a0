"""The demands of a SASS instruction on an SM: its pipe, for how long, and what the replay does with the instruction."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from cute_nvfp4.sim.clock.machine import Machine
from cute_nvfp4.sim.clock.sass import NO_SCOREBOARD, Slot

_PIPES = {
    "alu": "IADD3 LOP3 LOP SHF LEA ISETP SEL PRMT VIADD VIMNMX VIMNMX3 VIADDMNMX FMNMX FSETP FSEL FSET IABS PLOP3 "
    "IMNMX MOV P2R R2P SGXT BMSK FCHK CS2R VOTE MOV32I FSWZADD F2FP I2FP HMNMX2",
    "heavy": "IMAD IDP IDP4A HADD2 HMUL2 HFMA2 HSET2 HSETP2 HADD2_32I HFMA2_32I HMUL2_32I",
    "lite": "FFMA FADD FMUL FFMA32I FADD32I FMUL32I HFMA2.MMA FFMA2 FADD2 FMUL2",
    "fp64": "DFMA DADD DMUL DSETP",
    "xu": "MUFU F2I I2F F2F FRND POPC FLO BREV I2I",
    "uniform": "ULDC UIADD3 ULOP3 USHF UISETP USEL UIMAD UMOV ULEA UPRMT UPLOP3 UP2UR UR2UP USGXT UBMSK UFLO UPOPC "
    "UBREV R2UR S2UR UF2FP UIADD3.64 LDCU VOTEU",
    "lsu": "LDS STS LDSM STSM ATOMS SHFL LDG STG LDGSTS LD ST ATOM ATOMG RED LDL STL LDC S2R MATCH REDUX SYNCS "
    "QSPC STAS CCTL ERRBAR MEMBAR FENCE ARRIVES LDGDEPBAR LDGMC REDG UTMALDG UTMASTG UTMAPF UTMAREDG UBLKCP UBLKPF "
    "UTMACMDFLUSH UTMACCTL UCGABAR_ARV UCGABAR_WAIT LDTM STTM UTCCP UTCSHIFT UTCBAR UTCATOMSWS UVIRTCOUNT",
    "tensor": "HMMA IMMA QMMA BMMA DMMA HGMMA QGMMA IGMMA BGMMA UTCHMMA UTCQMMA UTCOMMA UTCIMMA",
    "control": "BRA BRX JMP EXIT RET CALL BSSY BSYNC BREAK WARPSYNC NOP BAR DEPBAR WARPGROUP YIELD NANOSLEEP KILL "
    "ELECT COLLECTIVE ENDCOLLECTIVE ACQBULK CCTLL BPT LEPC WARPGROUPSET USETMAXREG PREEXIT DEPBAR.LE R2B B2R",
}
PIPE_OF = {name: pipe for pipe, names in _PIPES.items() for name in names.split()}
PIPES = tuple(_PIPES)
CODE_LINE, CONSTANT_LINE = 128, 64
_PARAMETER = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")
_SLOW = {"REDUX": "REDUX"}
_SHAPE = re.compile(r"\.(64)x(\d+)x(\d+)")
_SYNC = {"16816": 16, "1688": 8, "16832": 32, "1684": 4, "16864": 64}
_KINDS = {
    "shared": "LDS STS LDSM STSM ATOMS SHFL",
    "load": "LDG LD",
    "store": "STG ST RED REDG",
    "atomic": "ATOM ATOMG",
    "copy": "LDGSTS",
    "copies_end": "LDGDEPBAR UTMACMDFLUSH",
    "copies_wait": "DEPBAR",
    "barrier": "BAR",
    "mbarrier": "SYNCS ARRIVES",
    "far": "STAS",
    "bulk": "UTMALDG UTMASTG UBLKCP UTMAREDG",
    "cluster_arrive": "UCGABAR_ARV",
    "cluster_wait": "UCGABAR_WAIT",
    "wgmma": "HGMMA QGMMA IGMMA",
    "wgmma_wait": "WARPGROUP",
    "fence": "MEMBAR FENCE",
    "product": "UTCHMMA UTCQMMA UTCOMMA UTCIMMA",
    "transfer": "UTCCP UTCSHIFT",
    "commit": "UTCBAR",
    "tensor_memory": "LDTM STTM",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}
REASONS = {"shared": "shared", "load": "memory", "atomic": "memory", "wgmma": "tensor", "tensor": "tensor"}


class Step(NamedTuple):
    """An issue of one SASS instruction. ``stall``, ``releases``, ``reads`` and ``source`` are those of its slot."""

    kind: str  # "plain", or the kind of effect that it has (``effects.Effects``)
    pipe: int  # index in ``PIPES``
    other: int  # the pipe that takes it if it is free earlier; ``pipe`` where there is no choice
    interval: float  # cycles for which the pipe is busy
    latency: float  # cycles until its scoreboard is released, where no queue says otherwise
    stall: int
    releases: int
    reads: int
    waits: tuple[int, ...]  # the scoreboards that it waits for, also as the operands of a DEPBAR
    source: int
    slot: Slot
    line: int  # number of its 128-byte line of code
    constant: int  # number of the 64-byte line of parameters that it reads, -1 for none


def stepper(machine: Machine) -> Callable[[Slot], Step]:
    """Returns a function that makes the step of a slot on one machine."""
    cache: dict[Slot, Step] = {}

    def step(slot: Slot) -> Step:
        if slot not in cache:
            cache[slot] = _step(slot, machine)
        return cache[slot]

    return step


def _step(slot: Slot, machine: Machine) -> Step:
    name = "HFMA2.MMA" if slot.opcode.startswith("HFMA2.MMA") else slot.base
    pipe = PIPE_OF.get(name, "uniform" if slot.base.startswith("U") else "alu")
    other = "heavy" if pipe == "lite" and name != "HFMA2.MMA" else pipe
    kind = _KIND_OF.get(slot.base, "plain")
    if kind == "wgmma_wait" and "DEPBAR" not in slot.opcode:
        kind = "plain"
    waits = slot.waits
    if slot.opcode == "DEPBAR":  # of scoreboards: "{5,4,3,2,1,0}"
        kind, waits = "plain", tuple(map(int, re.findall(r"\d", slot.operands)))
    # control takes only an issue slot; tensor cores have figures of their own
    interval, latency = 0.0 if pipe in ("control", "tensor") else machine[f"interval.{pipe}"], 0.0
    if slot.base in _SLOW:
        interval = machine[f"interval.{_SLOW[slot.base]}"]
    if slot.base in ("HMMA", "IMMA", "QMMA"):
        interval = machine[f"mma.{_sync_name(slot)}.interval"]
    elif kind == "wgmma":
        interval, latency = wgmma(slot, machine)
    elif kind == "tensor_memory":
        interval = _columns(slot) * machine["tensor_memory.cycles_per_column"]
        latency = machine["tensor_memory.latency"]
    elif kind == "plain" and slot.releases != NO_SCOREBOARD:
        latency = machine.first(f"latency.{slot.base}", f"latency.{pipe}", "latency.other")
    elif kind == "shared":
        latency = machine["latency.SHFL" if slot.base == "SHFL" else "shared.latency"]
    return Step(
        kind,
        PIPES.index(pipe),
        PIPES.index(other),
        interval,
        latency,
        slot.stall,
        slot.releases,
        slot.reads,
        waits,
        slot.source,
        slot,
        slot.address // CODE_LINE,
        _constant(slot),
    )


def _columns(slot: Slot) -> int:
    """Returns how many 32-bit columns of its 32 lanes a warp's load or store of tensor memory moves."""
    found = re.search(r"\.x(\d+)", slot.opcode)
    return int(found[1]) if found else 1


def _constant(slot: Slot) -> int:
    """Returns the line of the kernel's parameters that an instruction reads, -1 for none."""
    found = _PARAMETER.search(slot.operands)
    return int(found[1], 16) // CONSTANT_LINE if found else -1


def _sync_name(slot: Slot) -> str:
    words = slot.opcode.split(".")
    return f"{words[0]}.{_SYNC.get(words[1], words[1])}"


def wgmma(slot: Slot, machine: Machine) -> tuple[float, float]:
    """Returns the cycles for which a warp's part of one wgmma keeps its tensor core busy, and the part's latency."""
    n, words = int(_SHAPE.search(slot.opcode)[2]), slot.operands.split(",")
    source = "rs" if words[1].strip().startswith("R") else "ss"
    busy = max(machine["wgmma.column"] * n, machine[f"wgmma.a_{source}"] + machine["wgmma.b_column"] * n)
    return busy, machine[f"wgmma.latency_{source}"] + machine["wgmma.column"] * n
