"""The protocol of a session that its hooks depend on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from cute_nvfp4.sim.host.device import Device
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.program import Program
from cute_nvfp4.sim.session.memory import DeviceMemory
from cute_nvfp4.sim.session.runtime import Runtime
from cute_nvfp4.sim.session.torch_dispatch import CudaDispatch


class Session(Protocol):
    """The members of ``session.Session`` that the hooks use."""

    device: Device
    runtime: Runtime
    memory: DeviceMemory
    dispatch: CudaDispatch
    benchmarks: str
    active: bool

    @property
    def instructions(self) -> int: ...

    def modes(self) -> AbstractContextManager[None]: ...

    def current_stream(self) -> int: ...

    def submit(self, program: Program | None, launch: Launch) -> None: ...
