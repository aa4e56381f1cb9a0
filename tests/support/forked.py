"""Forks processes from one that has already imported torch and the DSL: the harness's workers, kernels of notebooks,
and Python commands.

A user's worker, ``python -m cute_nvfp4.harness.worker``, spends most of a small test on these imports, and so does
``python -m ipykernel_launcher``. ``tests/harness/test_eval_command.py`` tests workers that start as users start them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace

_IMPORTED = [
    "torch", "cutlass.cute", "cute_nvfp4.harness.workspace", "cute_nvfp4.harness.remote", "cute_nvfp4.cli.main",
    "cute_nvfp4.cli.json_schema", "cute_nvfp4.harness.evaluation", "cute_nvfp4.harness.folder.runner", "rich.live",
    "rich.panel", "rich.status", "rich.table", "support.forked_kernels", "ipykernel.kernelapp", "matplotlib.pyplot",
]  # fmt: skip


class Descriptor:
    """An open file that travels to the forked process, which receives its number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple:
        return _detached, (DupFd(self._number),)


def _detached(descriptor: DupFd) -> int:
    return descriptor.detach()


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    before = os.environ.get("PYTHONPATH")
    # servers before Python 3.13 take the import path from the environment, and not from this process
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *([before] if before else [])])
    try:
        forkserver._forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ.update({"PYTHONPATH": before} if before is not None else {})
    return context


def _key() -> bytes | None:
    """The key that a running server requires for a fork; servers before Python 3.14 require none."""
    return getattr(forkserver._forkserver, "_forkserver_authkey", None)


class Process:
    """The part of ``subprocess.Popen`` that ``harness.process`` uses, for a command that starts a worker or a
    device."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: tuple[int, ...], stdout: object, env: Mapping[str, str], **_: object
    ) -> None:
        descriptors = [Descriptor(number) for number in (*pass_fds, stdout.fileno())]
        words = list(command[2:])  # the interpreter and -m come first
        self._process = _context().Process(target=_work, args=(descriptors, words, os.getcwd(), dict(env)))
        self._process.start()
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return self._process.exitcode


class KernelProcess:
    """The part of ``subprocess.Popen`` that jupyter_client uses, for a command that starts a notebook's kernel."""

    stdin = stdout = stderr = None

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], cwd: str, **_: object) -> None:
        context = _context()
        ready, told = context.Pipe(duplex=False)
        # the interpreter, -m and the module come first
        self._process = context.Process(target=_serve, args=(told, _key(), list(command[3:]), cwd, dict(env)))
        self._process.start()
        told.close()
        ready.recv()  # it now leads its own process group, which receives signals
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    command: Sequence[str],
    *,
    capture_output: bool = False,
    text: bool = False,
    timeout: float | None = None,
    cwd: str | os.PathLike | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """``subprocess.run`` of ``[sys.executable, script or -m, ...]``."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        outputs = [Descriptor(number) for number in ((out.fileno(), err.fileno()) if capture_output else (1, 2))]
        arguments = list(command[1:]), str(cwd or os.getcwd()), dict(os.environ if env is None else env)
        context = _context()
        process = context.Process(target=_execute, args=(*outputs, _key(), *arguments))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(command, timeout)
        for file in (out, err):
            file.seek(0)
        said = [file.read().decode() if text else file.read() for file in (out, err)]
    return subprocess.CompletedProcess(command, process.exitcode, *(said if capture_output else ()))


def _enter(folder: str, environment: dict[str, str]) -> None:
    """Switches to this working folder and environment."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))  # read only on start
    tempfile.tempdir = None  # the environment may name another folder than the server's


def _work(descriptors: list[int], words: list[str], folder: str, environment: dict[str, str]) -> None:
    """Runs in the forked process, as the worker or the device. words: module, descriptors and further arguments."""
    _enter(folder, environment)
    *passed, log = descriptors
    for output in (1, 2):
        os.dup2(log, output)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    sys.argv = [words[0], *map(str, passed), *words[1 + len(passed) :]]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _execute(out: int, err: int, key: bytes | None, words: list[str], folder: str, environment: dict[str, str]) -> None:
    """Runs in the forked process, as Python called with ``words``."""
    _enter(folder, environment)
    for number, stream in ((out, sys.stdout), (err, sys.stderr)):
        os.dup2(number, 1 if stream is sys.stdout else 2)
    # the server's own streams may be closed
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)
    _fork_what_it_starts(key)
    if words[0] == "-m":
        sys.argv, sys.path[0:0] = words[1:], [folder]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0:0] = words, [os.path.dirname(os.path.abspath(words[0]))]
        runpy.run_path(words[0], run_name="__main__")


def _fork_what_it_starts(key: bytes | None) -> None:
    """Makes this process fork workers, and runs of other schedules, from the server with this ``key``."""
    import torch

    from cute_nvfp4.cli import sim_schedules
    from cute_nvfp4.harness import process

    torch.set_num_threads(1)
    process.subprocess = SUBPROCESS
    sim_schedules.subprocess = SUBPROCESS
    # tell this process which server it comes from; otherwise it would start another one
    forkserver._forkserver.ensure_running = lambda: None
    forkserver._forkserver._forkserver_authkey = key


def _serve(told: Connection, key: bytes | None, arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Runs in the forked process, as the kernel of a notebook."""
    _enter(folder, environment)
    _fork_what_it_starts(key)
    # matplotlib, already imported, reads it here
    sys.modules["matplotlib"].rcParams["backend"] = os.environ["MPLBACKEND"] = (
        "module://matplotlib_inline.backend_inline"
    )
    told.send(os.getpid())
    told.close()
    # no test compares pictures: to crop them, matplotlib would draw each twice
    sys.argv = ["ipykernel_launcher", *arguments, "--InlineBackend.print_figure_kwargs={'bbox_inches': None}"]
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)


SUBPROCESS = SimpleNamespace(**vars(subprocess) | {"Popen": Process, "run": run})
"""Replaces ``process.subprocess`` and ``sim_schedules.subprocess``."""
