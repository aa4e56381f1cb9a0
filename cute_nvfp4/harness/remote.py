"""The submission's side of the simulated GPU: torch finds a device, and launches go to the judge's (``device``)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import errors
from ..sim import GlobalMemory, Launch, Program, Result
from ..sim import errors as hazards
from ..sim.execution import Issued
from ..sim.machine.global_memory import Region
from ..sim.observe.touched import Runs
from ..sim.session import Session
from .mapped import Mapped, SharedHeap

NO_TRITON = (
    "Triton asked for the driver of a GPU to launch a kernel: the simulated GPU runs kernels of the CuTe DSL and work "
    "of torch, and has no driver for Triton. Run this submission with --backend cuda on a machine with a GPU."
)
"""The error for a submission that launches a Triton kernel in the simulated GPU."""


class RemoteTouched(NamedTuple):
    """The bytes that a launch has touched, as the device reports them."""

    parts: list[tuple[Region, bool, Runs]]

    def runs(self) -> Iterator[tuple[Region, bool, Runs]]:
        return iter(self.parts)


class Remote:
    """Runs a session's launches in the device at the other end of ``connection`` (``sim.execution.Execution``)."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sent: set[str] = set()

    def __call__(
        self, program: Program, launch: Launch, memory: GlobalMemory, issued: Issued, compare: bool, options: Any
    ) -> tuple[Result, RemoteTouched | None]:
        name = hashlib.sha256(program.text.encode()).hexdigest()
        if name not in self._sent:
            self._ask("program", name=name, ptx=program.text, cubin=launch.cubin.hex())
            self._sent.add(name)
        fields = ("kernel", "grid", "block", "cluster", "dynamic_smem", "cooperative", "programmatic", "stream")
        told = self._ask(
            "launch",
            program=name,
            **{field: getattr(launch, field) for field in (*fields, "registers")},
            params=[value.hex() for value in launch.params],
            attributes=[(number, value.hex()) for number, value in launch.attributes],
            regions=[(region.base, region.size, region.name) for region in memory.regions],
            what=issued.what,
            timeline=repr(issued.timeline),
            number=issued.number,
            compare=compare,
        )
        parts = []
        for base, write, count in told["touched"]:
            edges = np.frombuffer(self._connection.recv_bytes(), np.int64)
            parts.append((memory.find(base), write, Runs(edges[:count], edges[count:])))
        result = Result(launch.kernel, 0, {"": told["instructions"]}, {})
        return result, RemoteTouched(parts) if compare else None

    def _ask(self, operation: str, **arguments: Any) -> dict:
        self._connection.send_bytes(json.dumps({"op": operation} | arguments).encode())
        told = json.loads(self._connection.recv_bytes())
        if "error" in told:
            known = getattr(hazards, told["error"], None) or getattr(errors, told["error"], RuntimeError)
            raise known(told["text"])
        return told


class SimulatedGpu:
    """The simulated GPU that a submission finds, for the life of its process."""

    def __init__(self, arch: str, connection: Connection, memory: Mapped, calls: int) -> None:
        from ..runtime.session import simulated_gpu

        self._open = contextlib.ExitStack()
        how = {"execution": Remote(connection), "heap": SharedHeap(memory, calls)}
        self._session: Session = self._open.enter_context(simulated_gpu(arch, **how))

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which lies in the arena, as a tensor of device "cuda"."""
        self._session.memory.adopt(tensor)
        return tensor

    def forget(self, allow: list[str], collect: bool) -> None:
        """Drops all launches and findings so far. allow, collect: how hazards between streams are treated from here."""
        session = self._session
        session.launches.clear()
        session.between.clear()
        session.failure = None
        session.execute = True
        session.options = {"allow": tuple(allow), "on_hazard": "collect" if collect else "raise"}

    def unordered(self) -> str:
        """The hazards between streams. They are found here, since only this process knows torch's own work."""
        found = [str(finding) for finding in self._session.between.values() if finding.severity == "hazard"]
        return "\n".join(f"hazard: Race: {text.removeprefix('hazard: ')}" for text in found)

    def failure(self) -> BaseException | None:
        """The error that stopped a launch, even if the submission went on."""
        return None if self._session.failure is None else self._session.failure[1]

    def synchronize(self) -> None:
        """Waits, on the host, for all issued work."""
        self._session.runtime.order.synchronize()


def is_of_tritons_driver(error: BaseException) -> bool:
    """Whether the error comes from Triton's search for a driver, with which its every launch begins."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == "triton.runtime.driver" for frame in frames)
