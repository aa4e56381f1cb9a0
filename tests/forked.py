"""The harness's worker, forked from a process that has imported torch and the DSL already.

A worker as users have it, ``python -m cute_nvfp4.harness.worker``, spends most of a small test on these imports.
``tests/harness/test_eval_command.py`` has tests that start it so.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from types import SimpleNamespace

_IMPORTED = ["torch", "cutlass.cute", "cute_nvfp4.harness.workspace", "cute_nvfp4.harness.simulation"]


class Descriptor:
    """An open file that travels to the forked process; there it is a number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple:
        return _detached, (DupFd(self._number),)


def _detached(descriptor: DupFd) -> int:
    return descriptor.detach()


class Process:
    """What the runner uses of ``subprocess.Popen``, for a command that starts a worker."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: tuple[int, int], stdout: object, env: Mapping[str, str], **_: object
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        descriptors = [Descriptor(number) for number in (*pass_fds, stdout.fileno())]
        self._process = context.Process(target=_work, args=(*descriptors, command[-1], os.getcwd(), dict(env)))
        self._process.start()
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return self._process.exitcode


def _work(control: int, arena: int, log: int, nbytes: str, folder: str, environment: dict[str, str]) -> None:
    """What the forked process does: takes on folder and environment, and is the worker."""
    os.setsid()
    os.chdir(folder)
    for output in (1, 2):
        os.dup2(log, output)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["worker", str(control), str(arena), nbytes]
    runpy.run_module("cute_nvfp4.harness.worker", run_name="__main__", alter_sys=True)


SUBPROCESS = SimpleNamespace(**vars(subprocess) | {"Popen": Process})
"""For ``runner.subprocess``."""
