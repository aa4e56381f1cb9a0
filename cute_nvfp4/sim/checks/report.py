"""The messages of hazards: both sides of a conflict, the place, and what would have ordered them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.clocks import Clocks
from cute_nvfp4.sim.checks.findings import Findings
from cute_nvfp4.sim.checks.shadow import Actor
from cute_nvfp4.sim.machine.wave import Wave

_END = {
    "cp_async": "cp.async.wait_group (or cp.async.mbarrier.arrive and a wait for it)",
    "tensor": "a wait for an mbarrier that tcgen05.commit arrives at after it",
    "tmem_load": "tcgen05.wait::ld",
    "tmem_store": "tcgen05.wait::st",
    "bulk_read": "cp.async.bulk.commit_group and cp.async.bulk.wait_group.read",
    "bulk_write": "cp.async.bulk.commit_group and cp.async.bulk.wait_group",
    "wgmma": "wgmma.commit_group and wgmma.wait_group",
}
_BY_ISSUER = ("cp_async", "tmem_load", "tmem_store", "bulk_read", "bulk_write", "wgmma")
"""Kinds of operations for whose end only the issuing warp can wait."""


class _Unknown:
    """A placeholder for an instruction that is no longer known."""

    mods, text, line, loc = (), "", 0, ""

    @staticmethod
    def where() -> str:
        return "an earlier instruction"


_LAST = (1 << 16) - 1


class Labels:
    """The labels (16-bit numbers) of instructions in epochs. The last one is that of all instructions for which there
    is no other."""

    def __init__(self) -> None:
        self._instructions: list[Any] = [_Unknown]
        self._label_of: dict[int, int] = {}

    def label(self, instruction: Any) -> int:
        label = self._label_of.get(id(instruction))
        if label is None:
            label = self._label_of[id(instruction)] = min(len(self._label_of) + 1, _LAST)
            self._instructions.append(instruction)
        return label

    def instruction(self, label: int) -> Any:
        return self._instructions[label] if label < _LAST else _Unknown


@dataclass(frozen=True)
class Other:
    """The earlier side of a conflict, in words."""

    who: str  # the thread or operation, and the instruction
    end: str  # what would end the operation, or order it before the later side
    verb: str  # "store" or "copy"
    instruction: Any
    same_warp: bool = False  # whether both sides are lanes of one warp


def _race(mine: Any, other: Other) -> str:
    """Returns the class of a race."""
    if "dealloc" in mine.mods:
        return "free-in-use"
    if not other.same_warp:
        return "race"
    return "alloc-result" if "alloc" in other.instruction.mods else "race-in-warp"


class Reporter:
    """Reports the conflicts that shadows find as hazards."""

    def __init__(self, wave: Wave, clocks: Clocks, labels: Labels, findings: Findings) -> None:
        self.wave, self.clocks, self.labels, self.findings = wave, clocks, labels, findings

    def conflict(self, kind: str, who: Actor, place: str, row: Any, found: int, label: int | None) -> None:
        """Reports the conflict ``kind`` (``Shadow.report``) at ``place`` of the agent at ``row`` with epoch ``found``.
        ``label`` is that of the earlier instruction, None if the epoch has it."""
        kernel, report, i = self.wave.run.launch.title, self.findings.hazard, who.instruction
        mine = self.actor(who, row)
        if kind == "uninitialized":
            report("uninitialized-read", self.uninitialized(who, place, row), i)
            return
        if kind == "constant":
            there = self.labels.instruction(label).where()
            does = ("read", "written") if i.base.startswith("ld") else ("written", "read")
            report(
                "constant-changes",
                f"{kernel}: {place}\n  is {does[0]} by {mine}\n  and {does[1]} in the same launch by {there}; "
                "ld.global.nc and ldu are for what no thread of the launch writes, whatever orders the two",
                i,
            )
            return
        other = self.other(found, who, row, label)
        if kind == "proxy":
            report(
                "proxy-fence",
                f"{kernel}: {place}\n  is written by {other.who}\n  and used through the asynchronous proxy by "
                f"{mine},\n  which does not see the {other.verb}: fence.proxy.async, by a thread that does, is missing "
                "between",
                i,
            )
            return
        if kind == "proxy read":
            self.findings.warn(
                "read-proxy-fence",
                f"{kernel}: {place}\n  is read by {other.who}\n  and written through the asynchronous proxy by "
                f"{mine};\n  the ISA orders the two only with fence.proxy.async between",
                i,
            )
            return
        if kind == "same instruction":
            report(
                "stores-collide",
                f"{kernel}: {place}\n  is written by {mine}\n  and by another thread that executes the same "
                "instruction, with different values",
                i,
            )
            return
        first, second = {"read after write": ("written", "read"), "write after read": ("read", "written")}.get(
            kind, ("written", "written again")
        )
        if "dealloc" in who.instruction.mods:
            second = "freed"
        report(
            _race(who.instruction, other),
            f"{kernel}: {place}\n  is {first} by {other.who}\n  and {second} by {mine},\n"
            f"  and nothing orders the two; {other.end.removesuffix(',')} would have to come between",
            i,
        )

    def uninitialized(self, who: Actor, place: str, row: Any) -> str:
        """Returns the message that the agent at ``row`` reads what nobody has written."""
        kernel = self.wave.run.launch.title
        return f"{kernel}: {place}\n  is read by {self.actor(who, row)},\n  and nobody has written it"

    def actor(self, who: Actor, row: Any) -> str:
        warp = int(np.broadcast_to(who.warps, _wide(who, row))[row])
        lane = ep.MANY if who.lane is None else int(np.broadcast_to(who.lane, _wide(who, row))[row])
        return f"{self.thread(warp, lane)} at {who.instruction.where()}"

    def thread(self, warp: int, lane: int) -> str:
        if lane < ep.MANY:
            return self.wave.thread(warp, lane)
        cta = int(self.wave.cta_of_warp[warp])
        return f"{self.wave.cta_name(cta)}, warp {int(self.wave.warp_in_cta[warp])}"

    def arrival(self, component: int, cluster: int) -> str:
        """Returns in words what arrives at an mbarrier of a cluster, by its component."""
        c = self.clocks
        if component >= c.first_barrier:
            return "bytes of an asynchronous copy"
        by = self.thread(cluster * c.per_cluster + component % c.per_cluster, ep.MANY)
        tensor = list(c.kinds)[component // c.per_cluster] == "tensor"
        return f"the arrival of a tcgen05.commit of {by}" if tensor else f"an arrival of {by}"

    def other(self, found: int, who: Actor, row: Any, label: int | None) -> Other:
        """Returns the earlier side of a conflict, for the epoch ``found``."""
        e = np.array([found], np.uint64)
        clocks, lane = self.clocks, int(ep.lanes(e)[0])
        component, number = int(ep.components(e, clocks.bits)[0]), int(ep.labels(e, clocks.bits)[0])
        instruction = self.labels.instruction(number if label is None else label)
        where = instruction.where()
        warp = int(np.broadcast_to(who.warps, _wide(who, row))[row])
        cluster = warp // clocks.per_cluster
        if component >= clocks.first_barrier:
            slot, rank = divmod(component - clocks.first_barrier, clocks.cluster_size)
            name = self.wave.mbarriers.name(cluster * clocks.cluster_size + rank, slot)
            by = f"the asynchronous {where}, which ends with a phase of the {name}"
            return Other(by, "a wait for that phase", "copy", instruction)
        kind = list(clocks.kinds)[component // clocks.per_cluster]
        if who.cluster is not None and number != int(np.broadcast_to(who.cluster, _wide(who, row))[row]):
            return Other(
                f"another cluster (number {number}) at {where}",
                "a release by that thread and an acquire of what it released, at gpu scope,",
                "store",
                instruction,
            )
        by = cluster * clocks.per_cluster + component % clocks.per_cluster
        seen = int(ep.clocks(e)[0]) <= int(clocks.known[by, 0, component])
        if kind in _END and not seen:
            end = _END[kind] + (" by that warp, and a barrier after it," if by != warp and kind in _BY_ISSUER else "")
            return Other(f"the asynchronous {where} of {self.thread(by, lane)}", end, "store", instruction)
        if by == warp:
            return Other(
                f"{self.thread(by, lane)} at {where}", "bar.warp.sync (or a barrier)", "store", instruction, True
            )
        where = f"the asynchronous {where}" if kind in _END else where
        same_cta = self.wave.cta_of_warp[by] == self.wave.cta_of_warp[warp]
        how = "a barrier, or an arrival at an mbarrier and a wait for it," if same_cta else "a cluster barrier, or an "
        how += "" if same_cta else "arrival at a remote mbarrier and a wait for it,"
        return Other(f"{self.thread(by, lane)} at {where}", how, "store", instruction)


def _wide(who: Actor, row: Any) -> tuple[int, ...]:
    """Returns a shape of the actor's arrays in which ``row`` is an index."""
    shape = np.broadcast_shapes(*(np.shape(a) for a in (who.warps, who.base, who.thread, who.epoch)))
    row = row if isinstance(row, tuple) else (row,)
    return tuple(max(s, r + 1) for s, r in zip(shape, row)) if len(shape) == len(row) else shape


def first(bad: np.ndarray, index: np.ndarray, epochs: np.ndarray) -> tuple[tuple[int, ...], int, int]:
    """Returns (position, granule, epoch) of the first conflict."""
    bad, index, epochs = np.broadcast_arrays(bad, index, epochs)
    at = tuple(int(x) for x in np.argwhere(bad)[0])
    return at, int(index[at]), int(epochs[at])
