"""``Run``: a launch under way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cute_nvfp4.sim.errors import LaunchError
from cute_nvfp4.sim.machine.cluster import Clusters
from cute_nvfp4.sim.machine.events import Client
from cute_nvfp4.sim.machine.global_memory import GlobalMemory, owned
from cute_nvfp4.sim.machine.kernel import CompiledKernel
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.machine.multiprocessor import multiprocessor
from cute_nvfp4.sim.machine.registers import registers_at_launch
from cute_nvfp4.sim.machine.schedule import Schedule

MAX_THREADS = 1024
_LIMITS = {"grid": ((1 << 31) - 1, 65535, 65535), "block": (1024, 1024, 64), "cluster": (16, 16, 16)}


class Run:
    """The state of a launch that its waves share. Raises ``LaunchError`` if the launch does not fit kernel and target.

    ``clients`` receive the events, ``variables`` has the host addresses of module-scope variables: the maker sets both
    before the first wave. ``clusters_left`` is the range of clusters that have not started, ``registers`` the registers
    of a thread at the start (0: ``setmaxnreg`` does nothing), ``shared_stride`` the bytes from one CTA's shared memory
    to the next one's, ``parameters_read`` a cache of parameter loads.
    """

    def __init__(
        self,
        kernel: CompiledKernel,
        target: str,
        launch: Launch,
        memory: GlobalMemory,
        step_limit: int,
        sm_count: int,
        schedule: Schedule,
    ) -> None:
        self.kernel, self.target, self.launch, self.memory = kernel, target, launch, memory
        self.step_limit, self.sm_count, self.schedule = step_limit, sm_count, schedule
        self.multiprocessor = multiprocessor(target)
        self.clients: Sequence[Client] = ()
        self._check_sizes()
        self.clusters = Clusters(launch)
        self.clusters_left = range(self.clusters.count)
        self.static_shared, self.local_bytes = kernel.layout.static_shared, kernel.layout.local_bytes
        self._check()
        self.registers = registers_at_launch(kernel.source, launch.registers)
        self.shared_stride = -(-max(self.static_shared + launch.dynamic_smem, 1) // 128) * 128
        self.zeros = kernel.zeros
        self.variables: dict[str, int] = {}
        self.instruction_limit: float = math.inf
        self.params = owned(kernel.source.param_bytes, "kernel parameters")
        data = self.params.rows(1, 1)[1]
        for p, given in zip(kernel.source.params, launch.params):
            data[p.offset : p.offset + p.size] = np.frombuffer(given, np.uint8)
        self.parameters_read: dict[tuple[int, int, int], Any] = {}

    def _check_sizes(self) -> None:
        """Refuses sizes that the driver refuses for every kernel."""
        launch = self.launch
        for name, most in _LIMITS.items():
            given = getattr(launch, name)
            if len(given) != 3 or any(not 1 <= n <= m for n, m in zip(given, most)):
                expected = "three numbers from 1 to " + ", ".join(map(str, most))
                raise LaunchError.of(f"the {name} of {launch.title}", got=given, expected=expected)
        threads = int(np.prod(launch.block))
        if threads > MAX_THREADS:
            raise LaunchError.of(f"threads of a CTA of {launch.title}", got=threads, expected=f"at most {MAX_THREADS}")
        if launch.dynamic_smem < 0:
            raise LaunchError.of(f"shared memory of {launch.title}", got=launch.dynamic_smem, expected="0 or more")

    def _check(self) -> None:
        """Refuses a launch that does not fit the kernel's parameters and directives, or the target's shared memory."""
        kernel, launch = self.kernel.source, self.launch
        sizes, given = [p.size for p in kernel.params], [len(p) for p in launch.params]
        if sizes != given:
            raise LaunchError(f"{launch.title} takes parameters of {sizes} bytes, the launch gives {given}")
        required = kernel.directives.get("reqntid")
        if required and tuple((*required, 1, 1)[:3]) != tuple(launch.block):
            raise LaunchError(
                f"{launch.title} is compiled for CTAs of {required} threads, the launch has {launch.block}"
            )
        most = kernel.directives.get("maxntid")
        if most and np.prod(launch.block) > np.prod(most):
            raise LaunchError(f"{launch.title} is compiled for at most {most} threads, the launch has {launch.block}")
        required = kernel.directives.get("reqnctapercluster")
        if required and tuple((*required, 1, 1)[:3]) != tuple(launch.cluster):
            raise LaunchError(f"{launch.title} is compiled for clusters of {required}, the launch has {launch.cluster}")
        limit = self.multiprocessor.shared_of_cta
        if self.static_shared + launch.dynamic_smem > limit:
            raise LaunchError(
                f"{launch.title} asks for {self.static_shared + launch.dynamic_smem} bytes of shared memory a CTA, "
                f"an SM of {self.target} gives at most {limit}"
            )

    def take(self, count: int) -> np.ndarray:
        """Starts the next ``count`` clusters, or as many as are left; returns their numbers."""
        taken, self.clusters_left = self.clusters_left[:count], self.clusters_left[count:]
        return np.arange(taken.start, taken.stop)
