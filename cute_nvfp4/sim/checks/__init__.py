"""Checks for hazards that a run need not show: races, missing proxy fences, unwritten memory, copies in flight at exit.

The checks follow the order that the program makes, not the order in which this run happened. Vector clocks (``clocks``)
follow barriers, mbarrier phases, commits, fences and waits. A shadow of every memory (``shadow``, ``spaces``,
``global_memory``) has the epochs of the last write to each granule and of the reads since.

``Checks`` is a client of the machine's events. For each wave it makes a ``State`` and listeners: for ordinary accesses
and unwritten registers (``generic``), asynchronous operations (``asynchronous``), synchronisation, tensor maps,
allocation of tensor memory, the exit of CTAs, and others.
"""

from __future__ import annotations

import itertools
from functools import partial

from cute_nvfp4.sim.checks import kernel as facts
from cute_nvfp4.sim.checks.asynchronous import AsynchronousAccesses
from cute_nvfp4.sim.checks.barrier_use import BarrierUse
from cute_nvfp4.sim.checks.clocks import Layers
from cute_nvfp4.sim.checks.cluster_start import ClusterStart
from cute_nvfp4.sim.checks.dependency import Dependency, Earlier
from cute_nvfp4.sim.checks.ending import Ending
from cute_nvfp4.sim.checks.exchanges import Exchanges
from cute_nvfp4.sim.checks.exchanges import sources as exchanges_of
from cute_nvfp4.sim.checks.findings import Findings
from cute_nvfp4.sim.checks.foreign import Left
from cute_nvfp4.sim.checks.generic import GenericAccesses
from cute_nvfp4.sim.checks.global_memory import GlobalShadows
from cute_nvfp4.sim.checks.lane_sets import LaneSets
from cute_nvfp4.sim.checks.memory import Shadows
from cute_nvfp4.sim.checks.named_barriers import NamedBarriers
from cute_nvfp4.sim.checks.report import Labels
from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.checks.strict import Strict
from cute_nvfp4.sim.checks.synchronisation import Synchronisation
from cute_nvfp4.sim.checks.tensor_maps import Changes, TensorMaps
from cute_nvfp4.sim.checks.tensor_memory import TensorMemoryUse
from cute_nvfp4.sim.checks.unwritten import Unwritten
from cute_nvfp4.sim.checks.warpgroups import WarpgroupRegisters
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.global_memory import GlobalMemory
from cute_nvfp4.sim.machine.kernel import CompiledKernel
from cute_nvfp4.sim.machine.wave import Wave

__all__ = ["Checks"]


class Checks:
    """The checks of one launch, and what they keep from wave to wave: CTAs of different waves are unordered too.

    ``findings`` takes what is found, ``unwritten`` the reads of unwritten memory. ``earlier`` has the accesses of
    earlier launches that may still run; it is None where none does.
    """

    def __init__(
        self,
        kernel: CompiledKernel,
        memory: GlobalMemory,
        findings: Findings,
        unwritten: Unwritten,
        earlier: Earlier | None = None,
    ) -> None:
        self._earlier = earlier
        self._findings, self._unwritten, self._waves = findings, unwritten, itertools.count()
        self._labels = Labels()
        self._left: dict[int, list[Left]] = {}
        self._kinds, self._layers = facts.kinds(kernel.source), Layers.of(facts.fenced_spaces(kernel.source))
        self._some_lanes_meet = facts.some_lanes_meet(kernel.source)
        self._shared_grain, grain = facts.grains(kernel.source)
        self._globals = GlobalShadows(memory, grain, unwritten.written)
        self._self_completing = facts.self_completing(kernel)
        self._exchanges = exchanges_of(kernel)
        self._map_versions: dict[int, Changes] = {}

    def listeners(self, wave: Wave) -> list[Listener]:
        """Returns the listeners for one wave, in the order in which they hear an event."""
        lane_sets = LaneSets() if self._some_lanes_meet else None
        state = State(wave, self._labels, self._left, self._kinds, self._layers, lane_sets, self._findings)
        shadows = Shadows(state, self._globals, self._shared_grain, partial(self._unwritten.read, next(self._waves)))
        exchanges = Exchanges(state, self._exchanges) if self._exchanges else None
        barriers, dependency = BarrierUse(state), Dependency(state, self._earlier)
        start = ClusterStart(state)
        maps = TensorMaps(state, shadows, self._map_versions, dependency)
        return [
            *([exchanges] if exchanges else []),
            GenericAccesses(state, shadows, maps, exchanges, start),
            AsynchronousAccesses(state, shadows, barriers, start, self._self_completing),
            NamedBarriers(state),
            Synchronisation(state, shadows, barriers, maps, start),
            *([dependency] if self._earlier is not None else []),
            *([Strict(state)] if self._findings.strict else []),
            maps,
            TensorMemoryUse(state, shadows),
            *([WarpgroupRegisters(state)] if "wgmma" in self._kinds else []),
            Ending(state, shadows),
        ]
