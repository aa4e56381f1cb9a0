"""Runs cases in a process of its own, so that one that hangs or dies costs only itself."""

from __future__ import annotations

import hashlib
import multiprocessing
import resource
import signal
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

AFTER = 40
"""Cases after which a process is replaced: compiled kernels are many."""
SHARE = 20
"""Times the limit of CPU time that a case may take on the clock, on a machine that others use."""


@dataclass(frozen=True)
class Task:
    """``seen``: fingerprints of the kernels with which the case passed before; where they are the same, it is over."""

    family: str
    case: str
    arch: str
    schedules: int
    seen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """seconds: of CPU time."""

    outcome: str
    seconds: float
    runs: int = 0
    kernels: tuple[str, ...] = ()
    error: str = ""
    schedule: str = ""


class Known(Exception):
    """All kernels are those with which the case has passed."""


def perform(task: Task) -> Ended:
    """Runs a case under its schedules, here."""
    from ptx_fingerprints import normalised

    from cute_nvfp4 import simulating
    from cute_nvfp4.sim import adversarial
    from tests.long.families import FAMILIES
    from tests.sim.gemm_sweep import forget

    family, begin, runs, kernels = FAMILIES[task.family], time.process_time(), 0, []
    case, schedule = family.parse(task.case), ""

    def note(kernel: Any) -> Any:
        if not runs:
            kernels.append(hashlib.sha256(normalised(kernel.ptx).encode()).hexdigest()[:12])
            if task.seen and tuple(kernels) == task.seen:
                raise Known
        return kernel

    def ended(outcome: str, error: str = "") -> Ended:
        return Ended(outcome, time.process_time() - begin, runs, tuple(kernels), error, schedule)

    try:
        for one in adversarial(task.schedules):
            schedule = str(one)
            with simulating(task.arch, schedule=one, kernel=note):
                family.run(case)
            runs += 1
    except Known:
        return ended("known")
    except Exception as error:  # every kind is a finding
        place = traceback.extract_tb(error.__traceback__)[-1]
        return ended("failed", f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})")
    finally:
        forget()
    return ended("passed")


def allow(limit: float) -> None:
    """Lets this process have so many seconds of CPU time more; then the system ends it, with SIGXCPU."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + limit) + 1, most))


def serve(connection: Connection) -> None:
    """Tasks come, what became of them goes."""
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            task, limit = connection.recv()
        except EOFError:
            return
        allow(limit)
        connection.send(perform(task))


class Worker:
    """A process, replaced when it hangs, dies, or has done enough."""

    def __init__(self) -> None:
        self._process: Any = None
        self._done = 0

    def run(self, task: Task, limit: float) -> Ended:
        """What became of the task within ``limit`` seconds of CPU time."""
        if self._process is None or self._done >= AFTER:
            self.close()
            self._start()
        self._connection.send((task, limit))
        self._done += 1
        outcome, error = "hung", f"no end after {SHARE * limit:g} s"
        try:
            if self._connection.poll(SHARE * limit):
                return self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            outcome, error = "crashed", f"the process ended with {self._process.exitcode}"
            if self._process.exitcode == -signal.SIGXCPU:
                outcome, error = "hung", f"no end after {limit:g} s of CPU time"
        self.close()
        return Ended(outcome, limit, error=error)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._done = 0

    def close(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
            self._process = None
