"""The library's own operations on the CUDA tensors of a session: their launches go to the session too."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cute_nvfp4 import target
from cute_nvfp4.runtime import launch as launching
from cute_nvfp4.runtime.cache import CompiledKernel
from cute_nvfp4.sim.frontend.host import HostModule
from cute_nvfp4.sim.frontend.program import Program
from cute_nvfp4.sim.session.patches import Patches

if TYPE_CHECKING:
    from cute_nvfp4.sim.session.session import Session


def install_library(patches: Patches, session: Session) -> None:
    class SessionLauncher:
        """Takes the place of the launcher for real GPUs."""

        def __init__(self, kernel: CompiledKernel, types: Sequence[type]) -> None:
            self._types = tuple(types)
            self._host = HostModule(kernel.host_ir, kernel.entry, session.device)
            self._program = Program.parse(kernel.ptx)

        def __call__(self, values: Sequence[Any], tensors: Mapping[str, Any]) -> None:
            arguments = [kind(value) for kind, value in zip(self._types, values)]
            self._host.call_at(
                [ctypes.addressof(a) for a in arguments], lambda launch: session.submit(self._program, launch)
            )

    patches.set(launching, "CudaLauncher", SessionLauncher)
    patches.set(launching, "_launchers", {})
    for name in ("_device_architecture", "_resolve", "_device_sm_count"):
        # fresh caches: what they remember of the session must not outlive it
        patches.set(target, name, functools.lru_cache(maxsize=64)(getattr(target, name).__wrapped__))
