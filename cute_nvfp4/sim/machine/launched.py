"""A launch under way: what stays the same over its waves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cute_nvfp4.sim.checks import LaunchChecks
from cute_nvfp4.sim.errors import BrokenRule, LaunchError
from cute_nvfp4.sim.frontend.host import Launch
from cute_nvfp4.sim.frontend.regions import GlobalMemory
from cute_nvfp4.sim.machine.cluster import Clusters
from cute_nvfp4.sim.machine.residency import SHARED_PER_SM, SHARED_RESERVED
from cute_nvfp4.sim.machine.schedule import Schedule
from cute_nvfp4.sim.machine.wave import owned
from cute_nvfp4.sim.observe.counters import Counters
from cute_nvfp4.sim.observe.l2 import L2
from cute_nvfp4.sim.observe.observer import Observer

if TYPE_CHECKING:
    from cute_nvfp4.sim.frontend.program import CompiledKernel, Program
    from cute_nvfp4.sim.machine.access import Access
    from cute_nvfp4.sim.observe.trace import Trace


class Run:
    """What stays the same over the waves of one launch."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        memory: GlobalMemory,
        counting: bool,
        step_limit: int,
        sm_count: int,
        schedule: Schedule,
        checking: bool,
        trace: Trace | None = None,
    ) -> None:
        self.kernel: CompiledKernel = program.kernel(launch.kernel)
        self.target = program.module.target
        self.launch, self.memory = launch, memory
        self.counting, self.step_limit, self.sm_count = counting, step_limit, sm_count
        self.schedule, self.checking = schedule, checking
        self.launch_checks = LaunchChecks(self) if checking else None
        for finding in self.kernel.findings if checking else ():
            if finding.severity == "error":
                raise BrokenRule(str(finding).removeprefix("error: "))
        self.clusters = Clusters(launch)
        self.clusters_left = np.arange(self.clusters.count)
        self.static_shared, self.local_bytes = self.kernel.layout.static_shared, self.kernel.layout.local_bytes
        self._check()
        self.shared_stride = -(-max(self.static_shared + launch.dynamic_smem, 1) // 128) * 128
        self.zeros = self.kernel.zeros
        self.variables = program.variables(memory)
        self.counters = Counters(self.kernel, memory, L2.of(program.module.target) if counting else None)
        recorder = None if trace is None else trace.recorder(self.kernel, launch)
        watched = counting or trace is not None
        self.observer = Observer(self.counters if counting else None, recorder) if watched else None
        self._param_bytes, self.params = owned(self.kernel.source.param_bytes, "kernel parameters")
        data = self.params.rows(1, 1)[1]
        for p, given in zip(self.kernel.source.params, launch.params):
            data[p.offset : p.offset + p.size] = np.frombuffer(given, np.uint8)
        self._param_cache: dict[tuple, object] = {}

    def _check(self) -> None:
        kernel, launch = self.kernel.source, self.launch
        sizes, given = [p.size for p in kernel.params], [len(p) for p in launch.params]
        if sizes != given:
            raise LaunchError(f"{launch.title} takes parameters of {sizes} bytes, the launch gives {given}")
        required = kernel.directives.get("reqntid")
        if required and tuple((*required, 1, 1)[:3]) != tuple(launch.block):
            raise LaunchError(
                f"{launch.title} is compiled for blocks of {required} threads, the launch has {launch.block}"
            )
        most = kernel.directives.get("maxntid")
        if most and np.prod(launch.block) > np.prod(most):
            raise LaunchError(f"{launch.title} is compiled for at most {most} threads, the launch has {launch.block}")
        required = kernel.directives.get("reqnctapercluster")
        if required and tuple((*required, 1, 1)[:3]) != tuple(launch.cluster):
            raise LaunchError(f"{launch.title} is compiled for clusters of {required}, the launch has {launch.cluster}")
        limit = SHARED_PER_SM - SHARED_RESERVED
        if self.static_shared + launch.dynamic_smem > limit:
            raise LaunchError(
                f"{launch.title} asks for {self.static_shared + launch.dynamic_smem} bytes of shared memory a CTA, "
                f"an SM gives at most {limit}"
            )

    def take(self, count: int) -> np.ndarray:
        """The next clusters to start; they are no longer waiting."""
        taken, self.clusters_left = self.clusters_left[:count], self.clusters_left[count:]
        return taken

    def read_param(self, a: Access, offset: int):
        """Parameter bytes as (1, 1) arrays."""
        key = (offset, a.unit, a.count)
        if key not in self._param_cache:
            raw = self.params.rows(1, 1)[1][max(offset, 0) : offset + a.total].copy()
            values = raw[: len(raw) // a.unit * a.unit].view(f"u{a.unit}")
            if len(values) != a.count or offset % a.total:
                raise LaunchError(
                    f"{a.instruction.where()}: bytes {offset}..{offset + a.total} of {self.params.size} parameter bytes"
                )
            arrays = tuple(v.reshape(1, 1) for v in values)
            self._param_cache[key] = arrays if a.count > 1 else arrays[0]
        return self._param_cache[key]
