"""Runs cases in a separate process, so that a case that hangs or dies costs only itself."""

from __future__ import annotations

import hashlib
import itertools
import math
import multiprocessing
import resource
import signal
import time
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

AFTER, FORGET = 100, 10
"""After how many cases a process is replaced, and forgets compiled kernels: they are many, but some serve case after
case."""
GRACE = 5.0
"""Seconds that a case may continue when the time is over."""
PAUSES = 1.0, 5.0, 20.0
"""Seconds to wait before each new attempt to start a process."""
SHARE = 10
"""Wall time that a case may take, as a multiple of its CPU time limit, on a machine that others use, too."""


@dataclass(frozen=True)
class Task:
    """A case; with an empty one, the request to list the cases of ``part``. seen: fingerprints of the kernels with
    which the case passed before; if they are the same, it does not run again."""

    family: str
    case: str
    arch: str
    schedules: int
    seen: tuple[str, ...] = ()
    part: str = ""


@dataclass(frozen=True)
class Ended:
    """The outcome of a task. seconds: CPU time. note: the family's remark about a case that passed. cases: the listed
    cases, and what each stands for."""

    outcome: str
    seconds: float
    runs: int = 0
    kernels: tuple[str, ...] = ()
    error: str = ""
    schedule: str = ""
    note: str = ""
    cases: tuple[tuple[str, str], ...] = ()


DETERMINED = "every schedule"
"""Note of a case whose first schedule proves that all schedules do the same (``sim.equivalence``). Two more run to
compare their results; the checks would find what they have already found."""


class Known(Exception):
    """All kernels are those with which the case has passed before."""


def fingerprint(ptx: str) -> str:
    from support.ptx_fingerprints import normalised

    return hashlib.sha256(normalised(ptx).encode()).hexdigest()[:12]


def perform(task: Task, slowly: bool = False) -> Ended:
    """Runs a case under its schedules, in this process. Where execution is watched (``depends.Executed``), the case
    fails if it executes code that its fingerprints leave out."""
    from tests.long.depends import Executed, undeclared
    from tests.long.families import FAMILIES

    family = FAMILIES[task.family]
    if not task.case:
        return listing(family, task)
    with Executed(slowly) as seen:
        ended = _judged(family, task)
    if ended.outcome == "passed" and (unnamed := undeclared(seen, family.rooms, task.arch)):
        return replace(ended, outcome="failed", error=f"Undeclared: {', '.join(unnamed)} ran; depends.py leaves it out")
    return ended


def _judged(family: Any, task: Task) -> Ended:
    from cute_nvfp4 import simulating
    from cute_nvfp4.sim.equivalence import FIRST, Determined, schedules
    from tests.long.family import Gone

    begin, runs, kernels = time.process_time(), 0, []
    case, schedule, once, note = family.parse(task.case), "", None, ""
    every, causes = schedules(task.schedules), Determined()

    def saw(ptx: str) -> None:
        kernels.append(fingerprint(ptx))
        if task.seen and tuple(kernels) == task.seen:
            raise Known

    def launched(kernel: Any) -> Any:
        if not runs and family.ptx is None:
            saw(kernel.ptx)
        return kernel

    def ended(outcome: str, error: str = "") -> Ended:
        return Ended(outcome, time.process_time() - begin, runs, tuple(kernels), error, schedule, note)

    try:
        if family.ptx is not None:
            saw(family.ptx(case))
        for one in every:
            schedule, first = str(one), runs < len(FIRST) < len(every)
            proved = first and runs > 0 and not causes.doubts
            with simulating(
                task.arch, schedule=one, kernel=launched, checks=not proved, others=[causes] if first else []
            ):
                once = once or family.prepare(case)
                note = once() or ""
            runs += 1
            assert not (proved and causes.doubts), f"proved by the first schedule, but {min(causes.doubts)}"
            if proved and runs == len(FIRST):
                note = DETERMINED
                break
    except Known:
        return ended("known")
    except Gone:
        return ended("gone")
    except Exception as error:  # every kind of error is a finding
        place = traceback.extract_tb(error.__traceback__)[-1]
        return ended("failed", f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})")
    return ended("passed")


def listing(family: Any, task: Task) -> Ended:
    """Lists the cases."""
    begin = time.process_time()
    texts = [family.text(case) for case in family.every(task.arch, task.part)]
    cases = tuple((text, family.stands_for(text)) for text in texts)
    return Ended("listed", time.process_time() - begin, cases=cases)


def allow(limit: float) -> None:
    """Allows this process this many further seconds of CPU time; then the system ends it with SIGXCPU."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + limit) + 1, most))


def serve(connection: Connection) -> None:
    """Receives tasks and sends their outcomes."""
    import torch

    from tests.simulator.gemm_sweep import forget

    torch.set_num_threads(1)
    for number in itertools.count(1):
        try:
            task, limit = connection.recv()
        except EOFError:
            return
        allow(limit)
        ended = perform(task)
        if number % FORGET == 0 or ended.outcome == "failed":
            forget()
        connection.send(ended)


class Worker:
    """A process for cases, replaced when it hangs, dies, or has run enough of them."""

    def __init__(self) -> None:
        self._process: Any = None
        self._done = 0

    def run(self, task: Task, limit: float, end: float = math.inf) -> Ended:
        """The outcome of the task within ``limit`` seconds of CPU time. At ``end`` of the monotonic clock it is left
        unfinished."""
        if self._process is None or self._done >= AFTER:
            self.close()
            self._start()
        self._done += 1
        outcome, error = "hung", f"no end after {SHARE * limit:g} s"
        left = end + GRACE - time.monotonic()
        if left < SHARE * limit:
            outcome = "unfinished"
        try:
            self._connection.send((task, limit))
            if self._connection.poll(max(0.0, min(SHARE * limit, left))):
                return self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            outcome, error = "crashed", f"the process ended with {self._process.exitcode}"
            if self._process.exitcode == -signal.SIGXCPU:
                outcome, error = "hung", f"no end after {limit:g} s of CPU time"
        self.close()
        return Ended(outcome, limit, error=error)

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.long.families", "cute_nvfp4.sim.equivalence"])
        for pause in (*PAUSES, None):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            try:
                process.start()
            except (EOFError, OSError):
                # the machine has no process left for now, which may have killed the fork server
                ours.close()
                if pause is None:
                    raise
                time.sleep(pause)
            else:
                self._connection, self._process, self._done = ours, process, 0
                return
            finally:
                theirs.close()

    def close(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
            self._process = None
