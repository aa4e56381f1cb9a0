"""The events of a launch: what the machine announces, and to whom.

Checks, counters, traces and snapshots are listeners: each overrides the events it wants to hear. A listener may raise,
and then the kernel stops there. Where nobody listens, an event costs the call of an empty function.

Common arguments: ``g`` the group of warps; ``i`` the instruction; ``mask`` its lanes, (n, 32) booleans or None for all
lanes of the group; ``space`` "shared" (of the own CTA), "cluster", "global", "local" or "param". Arrays (k,) have one
entry a thread; ``rows`` (k,) and ``lanes`` (k,) say which one of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    """Hears the events of one wave, in the order of the program; every method here is an event and does nothing."""

    # the execution

    def block(self, g: Group, index: int) -> None:
        """A group is about to execute block ``index``."""

    def parked(self, g: Group, i: Instruction, wait: Wait | None) -> None:
        """A group stops because of ``wait``, or at a named barrier (None)."""

    def resumed(self, g: Group, i: Instruction) -> None:
        """Warps that were parked go on."""

    def undefined(self, g: Group, slot: int, i: Instruction) -> None:
        """Register ``slot`` decides something and has never been written."""

    def exited(self, g: Group) -> None:
        """Lanes have exited; ``wave.live`` says so."""

    def finished(self) -> None:
        """The wave is over."""

    # memory

    def load(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        """Lanes are about to load ``a.total`` bytes at ``host`` addresses, which broadcast to (n, 32)."""

    def store(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask, values: Values) -> None:
        """Lanes are about to store ``values``, ``a.count`` arrays, at ``host`` addresses."""

    def atomic(self, g: Group, a: Access, space: str, host: np.ndarray, mask: Mask) -> None:
        """Lanes are about to read, modify and write at ``host`` addresses."""

    def requested(self, g: Group, a: Access, host: np.ndarray, mask: np.ndarray, size: int) -> None:
        """Lanes are about to load ``size`` bytes of global memory together, by loads that are not ``counted``."""

    # asynchronous operations

    def issued(self, pending: Pending, queued: bool) -> None:
        """An operation is issued, its operands are bound. Where it is not ``queued`` it runs at once."""

    def completed(self, pending: Pending) -> None:
        """A queued operation is about to run, by itself or fused with its neighbours."""

    def starts(self, pending: Pending) -> None:
        """An engine is about to run the operation, which may be several that were fused."""

    def ended(self, pending: Pending) -> None:
        """The engine has run it."""

    # barriers

    def warp_synced(self, g: Group, mask: Mask, members: Mask) -> None:
        """bar.warp.sync; ``members`` (n or 1, 32) are the lanes that it names, None for all."""

    def barrier_arrived(self, g: Group, i: Instruction, ident: np.ndarray, count: np.ndarray) -> None:
        """The warps of a group come to named barriers (n,) of their CTAs, to wait there or not, each for ``count``
        (n,) threads, 0 for all."""

    def barrier_opened(self, warps: Warps, ident: np.ndarray) -> None:
        """Named barriers open; ``warps`` (k,) are all that waited at one of them."""

    def barrier_ended(self, cta: np.ndarray, ident: np.ndarray) -> None:
        """The phases of named barriers (k,) of CTAs (k,) are over, after ``barrier_opened`` for those who waited."""

    def cluster_arrived(self, g: Group, lanes: np.ndarray, release: bool) -> None:
        """barrier.cluster.arrive by lanes (n, 32), after it has been counted."""

    def cluster_waited(self, g: Group, lanes: np.ndarray) -> None:
        """barrier.cluster.wait has passed."""

    # mbarriers, at ``offset`` (k,) of the shared memory of ``cta`` (k,)

    def mbarrier_initialised(self, g: Group, i: Instruction, rows, lanes, cta: np.ndarray, offset: np.ndarray) -> None:
        """mbarrier.init, after it."""

    def mbarrier_replaced(self, g: Group, i: Instruction, rows, lanes, cta: np.ndarray, offset: np.ndarray) -> None:
        """mbarrier.init where an mbarrier was live, after it."""

    def mbarrier_invalidated(self, g: Group, i: Instruction, rows, lanes, cta: np.ndarray, offset: np.ndarray) -> None:
        """mbarrier.inval, before it."""

    def mbarrier_arrives(self, g: Group, i: Instruction, rows, lanes, cta, offset: np.ndarray, release: bool) -> None:
        """An arrival, before it is counted."""

    def mbarrier_counted(self, g: Group, i: Instruction, rows, cta: np.ndarray, offset: np.ndarray) -> None:
        """mbarrier.expect_tx or .complete_tx, before it is counted: no arrival."""

    def phase_ended(self, cta: np.ndarray, slot: np.ndarray, phase: np.ndarray) -> None:
        """Mbarriers (k,), each once, have ended their ``phase``-th phase."""

    def mbarrier_asked(self, g: Group, i: Instruction, mask: Mask, cta, slot, phase) -> None:
        """test_wait or try_wait asks whether ``phase``, of the mbarriers ``slot``, is over: each (n, 1) or (n, 32)."""

    def mbarrier_passed(self, g: Group, i: Instruction, mask: Mask, done, cta, slot, acquire: bool) -> None:
        """test_wait or try_wait has said yes to lanes ``done`` (n, 1) or (n, 32)."""

    def copies_arrive(self, g: Group, i: Instruction, rows, lanes, cta: np.ndarray, offset: np.ndarray) -> None:
        """cp.async.mbarrier.arrive is executed; the arrival comes when the copies of the thread so far are done."""

    # fences and groups

    def fenced(self, g: Group, i: Instruction, mask: Mask, *address) -> None:
        """fence, membar; ``address`` (addr, off) is the tensor map of fence.proxy.tensormap::generic.acquire."""

    def dependency_waited(self, g: Group, mask: Mask) -> None:
        """griddepcontrol.wait."""

    def dependents_launched(self, g: Group, mask: Mask) -> None:
        """griddepcontrol.launch_dependents."""

    def tensor_fenced(self, g: Group, i: Instruction, mask: Mask) -> None:
        """tcgen05.fence."""

    def tensor_waited(self, g: Group, mask: Mask, kind: str) -> None:
        """tcgen05.wait::ld or ::st; ``kind`` is "tmem_load" or "tmem_store"."""

    def group_waited(self, g: Group, lanes: np.ndarray, kind: str, until: np.ndarray, read: bool) -> None:
        """wait_group of ``kind`` "cp_async" or "bulk_group" has passed for lanes (n, 32): groups below ``until``
        (n, 32) are over, with ``read`` only their reads."""

    # warpgroups: ``warps`` (4 w,) come warpgroup by warpgroup

    def warpgroup_fenced(self, warps: Warps, i: Instruction) -> None:
        """wgmma.fence."""

    def warpgroup_committed(self, warps: Warps, i: Instruction) -> None:
        """wgmma.commit_group."""

    def warpgroup_waited(self, warps: Warps, i: Instruction, pending: int) -> None:
        """wgmma.wait_group: at most the ``pending`` groups committed last are not over."""

    def registers_used(self, g: Group, i: Instruction, mask: Mask, names: tuple[str, ...]) -> None:
        """An instruction is about to read or write registers that a wgmma may be using."""

    def map_used(self, i: Instruction, warps: Warps, addresses: np.ndarray) -> None:
        """Copies by ``warps`` (k,) are issued with the tensor maps at ``addresses`` (k,)."""

    # tensor memory

    def tensor_allocated(self, cta: np.ndarray, first: np.ndarray, columns: np.ndarray) -> None:
        """Columns ``first`` .. ``first + columns`` (k,) of CTAs (k,) are given out."""

    def tensor_freed(self, i: Instruction, warps: Warps, cta: np.ndarray, first, columns, pair: np.ndarray) -> None:
        """tcgen05.dealloc by warps (k,), before it; ``pair`` (k, 1 or 2) are the CTAs concerned."""


class Client(Protocol):
    """Wants to know of a launch: one for the checks, one for the counters, one for a trace."""

    def listeners(self, wave: Wave) -> Iterable[Listener]:
        """Who listens to ``wave``, which is about to run; of several the first hears first."""
        ...


EVENTS = tuple(name for name, value in vars(Listener).items() if callable(value))


class Events(Listener):
    """Announces: each event is a method that calls the listeners which override it, in their order."""

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
        """Whether anybody listens to ``event``; only for what costs time to find out."""
        return event in self._heard


def _nobody(*args: Any) -> None:
    """Nobody listens."""


def _announcement(calls: list[Callable[..., None]]) -> Callable[..., None]:
    if not calls:
        return _nobody
    if len(calls) == 1:
        return calls[0]

    def tell(*args: Any) -> None:
        for call in calls:
            call(*args)

    return tell
