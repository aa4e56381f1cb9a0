"""What the hooks of a session may ask of it."""

from __future__ import annotations

from typing import Protocol

from cute_nvfp4.sim.host.device import Device
from cute_nvfp4.sim.machine.launch import Launch
from cute_nvfp4.sim.program import Program
from cute_nvfp4.sim.session.runtime import Runtime


class Session(Protocol):
    """See ``session.Session``."""

    device: Device
    runtime: Runtime
    benchmarks: str
    active: bool

    @property
    def instructions(self) -> int: ...

    def current_stream(self) -> int: ...

    def submit(self, program: Program | None, launch: Launch) -> None: ...
