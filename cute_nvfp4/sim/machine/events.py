"""The events that the machine announces during a launch, and the listeners that receive them.

Checks, counters, traces and snapshots are listeners: each overrides the methods of the events that it wants. A listener
may raise, and then the kernel stops there. An event without a listener costs the call of an empty function.

Common arguments: ``g`` is the group of n warps, ``i`` the instruction, ``a`` a memory access. ``mask`` has the active
lanes, booleans that broadcast to (n, 32), or None for all lanes of the group. ``space`` is "shared" (of the own CTA),
"cluster", "global", "local" or "param". Arrays (k,) have one entry for each of k threads: ``rows`` (k,) are their warps
in the group, ``lanes`` (k,) their lanes. ``cta`` and ``warps`` are indices in the wave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.engine import Pending, Wait
from cute_nvfp4.sim.machine.protocols import Group, Wave
from cute_nvfp4.sim.machine.requests import Access

Warps = np.ndarray
Mask = np.ndarray | None
Values = tuple[np.ndarray, ...]


class Listener:
    """The base class of listeners, which receive the events of one wave as they happen. Every method is an event, and
    does nothing here."""

    # execution

    def block(self, g: Group, index: int) -> None:
        """A group is about to execute block ``index``."""

    def parked(self, g: Group, i: Instruction, wait: Wait | None) -> None:
        """A group is parked because of ``wait``, or waits at a named barrier (None)."""

    def resumed(self, g: Group, i: Instruction) -> None:
        """Warps that were parked at ``i`` go on."""

    def undefined(self, g: Group, slot: int, i: Instruction) -> None:
        """The value of register ``slot``, which was never written, decides a branch, an address or a stored value."""

    def exited(self, g: Group) -> None:
        """The lanes of a group have exited; ``wave.live`` no longer has them."""

    def finished(self) -> None:
        """The wave has ended."""

    def closed(self) -> None:
        """The wave is over, by an error too; no event follows."""

    # memory

    def load(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        """Lanes are about to load ``a.total`` bytes at the host addresses ``host``, which broadcast to (n, 32)."""

    def store(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask, values: Values) -> None:
        """Lanes are about to store ``values``, ``a.count`` arrays, at the host addresses ``host``."""

    def atomic(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        """Lanes are about to execute an atomic at the host addresses ``host``."""

    def requested(self, g: Group, a: Access, host: np.ndarray, mask: np.ndarray, size: int) -> None:
        """Lanes are about to load ``size`` bytes of global memory in all, by accesses that are not ``counted``."""

    # asynchronous operations

    def issued(self, pending: Pending, queued: bool) -> None:
        """An operation is issued, with its operands bound. If it is not ``queued``, it runs at once."""

    def completed(self, pending: Pending) -> None:
        """A queued operation is about to run, alone or fused with its neighbours."""

    def starts(self, pending: Pending) -> None:
        """An engine is about to run a queued operation, which may be several that were fused."""

    def ended(self, pending: Pending) -> None:
        """The engine has run the operation that ``starts`` announced."""

    # barriers

    def warp_synced(self, g: Group, mask: Mask, members: Mask) -> None:
        """bar.warp.sync is executed; ``members`` (n or 1, 32) are the lanes in its member mask, None for all lanes."""

    def barrier_arrived(self, g: Group, i: Instruction, ident: np.ndarray, count: np.ndarray) -> None:
        """Warps arrive at the named barriers ``ident`` (n,) of their CTAs, to wait there or not. ``count`` (n,) is the
        thread count that each names, 0 for all threads."""

    def barrier_opened(self, warps: Warps, ident: np.ndarray) -> None:
        """Phases of named barriers end; ``warps`` (k,) are those that waited, each at barrier ``ident`` (k,)."""

    def barrier_ended(self, cta: np.ndarray, ident: np.ndarray) -> None:
        """The phases of the named barriers ``ident`` (k,) of CTAs (k,) are over; it follows ``barrier_opened``."""

    def cluster_arrived(self, g: Group, lanes: np.ndarray, release: bool) -> None:
        """The arrival of ``lanes`` (n, 32) by barrier.cluster.arrive has been counted."""

    def cluster_waited(self, g: Group, lanes: np.ndarray) -> None:
        """barrier.cluster.wait has passed for ``lanes`` (n, 32)."""

    # mbarriers, at ``offset`` (k,) of the shared memory of ``cta`` (k,)

    def mbarrier_initialised(self, g: Group, i: Instruction, rows, lanes, cta: np.ndarray, offset: np.ndarray) -> None:
        """mbarrier.init has been executed."""

    def mbarrier_replaced(self, g: Group, i: Instruction, rows, lanes, cta: np.ndarray, offset: np.ndarray) -> None:
        """mbarrier.init has been executed at mbarriers that were valid before."""

    def mbarrier_invalidated(self, g: Group, i: Instruction, rows, lanes, cta: np.ndarray, offset: np.ndarray) -> None:
        """mbarrier.inval is about to be executed."""

    def mbarrier_arrives(self, g: Group, i: Instruction, rows, lanes, cta, offset: np.ndarray, release: bool) -> None:
        """Arrivals are about to be counted; ``release`` says whether they have release semantics."""

    def mbarrier_counted(self, g: Group, i: Instruction, rows, cta: np.ndarray, offset: np.ndarray) -> None:
        """The bytes of mbarrier.expect_tx or .complete_tx, which are no arrivals, are about to be counted."""

    def phase_ended(self, cta: np.ndarray, slot: np.ndarray, phase: np.ndarray) -> None:
        """The mbarriers ``slot`` (k,) of CTAs (k,), each once, have ended a phase and begun phase ``phase`` (k,)."""

    def mbarrier_asked(self, g: Group, i: Instruction, mask: Mask, cta, slot, phase) -> None:
        """test_wait or try_wait asks whether the phases ``phase`` of the mbarriers ``slot`` of ``cta``, each (n, 1) or
        (n, 32), are over."""

    def mbarrier_passed(self, g: Group, i: Instruction, mask: Mask, done, cta, slot, acquire: bool) -> None:
        """test_wait or try_wait has returned true to the lanes ``done``, (n, 1) or (n, 32)."""

    def copies_arrive(self, g: Group, i: Instruction, rows, lanes, cta: np.ndarray, offset: np.ndarray) -> None:
        """cp.async.mbarrier.arrive is executed; each thread's arrival follows when its earlier copies are complete."""

    # fences and groups

    def fenced(self, g: Group, i: Instruction, mask: Mask, *address) -> None:
        """fence or membar is executed; ``address`` (addr, off) is the map of fence.proxy.tensormap::generic.acquire."""

    def dependency_waited(self, g: Group, mask: Mask) -> None:
        """griddepcontrol.wait is executed."""

    def dependents_launched(self, g: Group, mask: Mask) -> None:
        """griddepcontrol.launch_dependents is executed."""

    def tensor_fenced(self, g: Group, i: Instruction, mask: Mask) -> None:
        """tcgen05.fence is executed."""

    def tensor_waited(self, g: Group, mask: Mask, kind: str) -> None:
        """tcgen05.wait::ld (``kind`` is "tmem_load") or ::st ("tmem_store") is executed."""

    def group_waited(self, g: Group, lanes: np.ndarray, kind: str, until: np.ndarray, read: bool) -> None:
        """wait_group of ``kind`` "cp_async" or "bulk_group" has passed for ``lanes`` (n, 32): their groups with numbers
        below ``until`` (n, 32) are complete, or with ``read`` have at least read their sources."""

    # warpgroups: ``warps`` (4 w,) are in order of their warpgroups

    def warpgroup_fenced(self, warps: Warps, i: Instruction) -> None:
        """wgmma.fence is executed."""

    def warpgroup_committed(self, warps: Warps, i: Instruction) -> None:
        """wgmma.commit_group is executed."""

    def warpgroup_waited(self, warps: Warps, i: Instruction, pending: int) -> None:
        """wgmma.wait_group has passed: at most the last ``pending`` committed groups are incomplete."""

    def registers_used(self, g: Group, i: Instruction, mask: Mask, names: tuple[str, ...]) -> None:
        """An instruction is about to read or write the registers ``names``, which a wgmma may be using."""

    def map_used(self, i: Instruction, warps: Warps, addresses: np.ndarray) -> None:
        """Tensor copies by ``warps`` (k,) are issued with the tensor maps at ``addresses`` (k,)."""

    # tensor memory

    def tensor_allocated(self, cta: np.ndarray, first: np.ndarray, columns: np.ndarray) -> None:
        """``columns`` (k,) columns from ``first`` (k,) on of CTAs (k,) have been allocated."""

    def tensor_freed(self, i: Instruction, warps: Warps, cta: np.ndarray, first, columns, pair: np.ndarray) -> None:
        """tcgen05.dealloc by ``warps`` (k,) is about to be executed; ``pair`` (k, 1 or 2) are the CTAs concerned."""


class Client(Protocol):
    """A receiver of the events of a whole launch, such as the checks, the counters or a trace."""

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        """Returns the listeners for ``wave``, which is about to run, in the order in which they receive events."""
        ...


EVENTS = tuple(name for name, value in vars(Listener).items() if callable(value))


class Events(Listener):
    """The announcer of events: each method calls, in order, the listeners that override the event."""

    def __init__(self, listeners: Iterable[Listener]) -> None:
        everyone = list(listeners)
        self._heard = set()
        for name in EVENTS:
            default = getattr(Listener, name)
            calls = [getattr(one, name) for one in everyone if getattr(type(one), name) is not default]
            setattr(self, name, _announcement(calls))
            if calls:
                self._heard.add(name)

    def hears(self, event: str) -> bool:
        """Returns whether a listener overrides ``event``, so that costly arguments need not be made for none."""
        return event in self._heard


def _nobody(*args: Any) -> None:
    """Receives an event that no listener overrides."""


def _announcement(calls: list[Callable[..., None]]) -> Callable[..., None]:
    if not calls:
        return _nobody
    return calls[0] if len(calls) == 1 else partial(_all, calls)


def _all(calls: list[Callable[..., None]], *args: Any) -> None:
    for call in calls:
        call(*args)
