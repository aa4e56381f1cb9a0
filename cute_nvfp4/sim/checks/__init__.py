"""Hazards that a run need not show: races, missing proxy fences, memory nobody wrote, copies in flight at the end.

The checks follow the order that the program makes, not the order in which this run happened: vector clocks
(``clocks``) over barriers, mbarrier phases, commits, fences and waits, and a shadow of every memory (``shadow``,
``spaces``, ``global_memory``) with the epochs of the last write and of the reads since.

Events, in the order of the program (g: the group, i: the instruction, mask: lanes (n, 32) or None for all):

====================================================  ================================================================
memory
``load(g, a, space, host, mask)``                     before lanes load; ``host`` addresses broadcast to (n, 32);
                                                      spaces "shared", "cluster", "global", others are ignored
``store(g, a, space, host, mask, values)``            before lanes store
``atomic(g, a, space, host, mask)``                   before atom, red
``issued(pending)``                                   an asynchronous operation, when it is issued
``starts(pending)``, ``ended(pending)``               before and after an engine runs it
barriers
``warp_synced(g, mask)``                              bar.warp.sync
``barrier_arrived(warps, ident)``                     warps (k,) come to named barriers (k,), to wait or not
``barrier_opened(warps, ident)``                      all warps that waited at barriers that now open
``cluster_arrive(g, lanes, release)``                 barrier.cluster.arrive, after it has been counted
``cluster_wait(g, lanes)``                            barrier.cluster.wait has passed
mbarriers
``mbarrier_init(g, i, rows, lanes, cta, offset)``     after it; rows, lanes, CTA, offset (k,)
``mbarrier_inval(g, i, rows, lanes, cta, offset)``     before mbarrier.inval
``mbarrier_arrive(…, cta, offset, release)``          arrivals, before they are counted
``phase_ended(cta, slot, phase)``                     barriers (each once) have ended ``phase`` phases
``mbarrier_wait(…, mask, done, cta, slot, acquire)``  waits that pass
``copies_arrive(g, i, rows, lanes, cta, offset)``     cp.async.mbarrier.arrive
fences, groups
``fenced(g, i, mask, addr, off)``                     fence, membar; the address is that of a tensor map
``map_used(i, warps, addresses)``                     a tensor map is read by a copy that is issued
``group_commit(g, lanes, kind)``                      "cp_async", "bulk_group"
``group_wait(g, lanes, kind, until, read)``           groups below ``until`` (n, 32) are over
``tensor_waited(g, mask, kind)``                      "tmem_load", "tmem_store"
``tensor_fenced(g, mask, before)``                    tcgen05.fence
tensor memory, the end
``tensor_allocated(cta, first, columns)``             columns given out
``tensor_freed(i, warps, cta, first, columns, pair)`` before tcgen05.dealloc; pair (k, 1 or 2): the CTAs concerned
``exited(g)``                                         lanes have exited, ``wave.live`` says so
``at_end()``                                          the wave is over
====================================================  ================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cute_nvfp4.sim.checks import kernel as facts
from cute_nvfp4.sim.checks.asynchronous import AsynchronousAccesses
from cute_nvfp4.sim.checks.barrier_words import BarrierWords
from cute_nvfp4.sim.checks.clocks import Clocks
from cute_nvfp4.sim.checks.ending import Ending
from cute_nvfp4.sim.checks.foreign import Foreign, Locations
from cute_nvfp4.sim.checks.generic import GenericAccesses
from cute_nvfp4.sim.checks.global_memory import GlobalShadows
from cute_nvfp4.sim.checks.report import Labels, Reporter, first
from cute_nvfp4.sim.checks.spaces import SharedShadow, TensorShadow
from cute_nvfp4.sim.checks.synchronisation import Synchronisation
from cute_nvfp4.sim.checks.tensor_maps import TensorMaps
from cute_nvfp4.sim.machine.layout import SHARED_BASE

if TYPE_CHECKING:
    from cute_nvfp4.sim.machine.launched import Run
    from cute_nvfp4.sim.machine.wave import Wave

__all__ = ["Checks", "LaunchChecks"]


class LaunchChecks:
    """What lasts over the waves of a launch: CTAs of different waves are as unordered as those of one."""

    def __init__(self, run: Run) -> None:
        source = run.kernel.source
        self.labels = Labels()
        self.locations = Locations()
        self.kinds = facts.kinds(source)
        self.shared_grain, grain = facts.grains(source)
        self.globals = GlobalShadows(run.memory, grain)
        self.self_completing = facts.self_completing(run.kernel)
        self.map_versions: dict[int, int] = {}


class Checks(GenericAccesses, AsynchronousAccesses, Synchronisation, TensorMaps):
    """The checks of one wave; see the module for the events."""

    def __init__(self, wave: Wave, launch: LaunchChecks) -> None:
        self.wave, self.labels = wave, launch.labels
        self.kernel_name = wave.run.launch.title
        self.self_completing = launch.self_completing
        slots = max(8, len(wave.mbarriers.offset_of))
        self.clocks = Clocks(wave.warps, wave.warps_per_cta, wave.cluster_size, launch.kinds, slots)
        self.reporter = Reporter(wave, self.clocks, launch.labels)
        self.cluster_of_warp = wave.cluster_index[wave.cta_of_warp]
        self.foreign = Foreign(self.clocks, launch.locations, self.cluster_of_warp)
        self.shared = SharedShadow(wave.shared_stride * wave.count, launch.shared_grain, self._in_shared)
        self.barrier_words = BarrierWords(self)
        self.tensor = TensorShadow(wave.count, self._in_tensor)
        self.globals = launch.globals
        self.globals.report, self.globals.foreign = self._in_global, self.foreign.ordered
        self.watches_global = True
        self.ending = Ending(self)
        self.map_versions, self.map_seen = launch.map_versions, {}
        self.cluster_parity = np.zeros(wave.warps, np.int64)
        self.carried: dict[int, np.ndarray] = {}
        self.stored: dict[tuple[int, int, bytes], tuple[int, int]] = {}
        self.kept: list[Any] = []
        # Engines use the same functions as lanes do to reach memory; their accesses are checked when they are issued.
        self.quiet = False
        self.flying = {k: np.zeros(wave.warps, np.int32) for k in ("tensor", "bulk_read") if k in self.clocks.kinds}

    def _in_shared(self, size: int, kind: str, who, index, bad, epochs) -> None:
        at, granule, found = first(bad, index, epochs)
        cta, byte = divmod(granule * size, self.wave.shared_stride)
        place = f"byte {byte} of the shared memory (address {byte + SHARED_BASE:#x}) of {self.wave.cta_name(cta)}"
        raise self.reporter.hazard(kind, who, place, at, found, None)

    def _in_tensor(self, kind: str, who, index, bad, epochs) -> None:
        at, granule, found = first(bad, index, epochs)
        cta, lane, column = self.tensor.place(granule)
        place = f"tensor memory of {self.wave.cta_name(cta)}, lanes {lane}..{lane + 15}, column {column}"
        raise self.reporter.hazard(kind, who, place, at, found, None)

    def _in_global(self, watched, kind: str, who, index, bad, epochs) -> None:
        at, granule, found = first(bad, index, epochs)
        address = max(watched.start + granule * watched.grain, watched.region.base)
        label = int((watched.read_by if kind == "write after read" else watched.wrote)[granule])
        place = self.wave.run.memory.describe(address).partition(" is ")[2]
        raise self.reporter.hazard(kind, who, place, at, found, label)
