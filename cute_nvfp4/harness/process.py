"""The processes of one submission, as the judge sees them: the worker that runs it, and the device that it launches on.

The worker has its own folder, with a copy of the submission as it was read before any ran (``submission``). The judge
validates everything that comes from the worker.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from . import sandbox
from .arena import Arena
from .counters import Launch
from .errors import CallFailed
from .submission import Submission
from .work import Told

ARCH_VARIABLE = "CUTE_NVFP4_ARCH"
_CAPTURE_TAIL = 4000
_START_TIMEOUT_S = 120.0
_MOST_BYTES = 64 << 20
"""Most bytes of an answer."""
SECRETS = ("POPCORN_FD", "POPCORN_SEED")
_CACHED = "caches"
_CACHES = {"XDG_CACHE_HOME": "", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
_CACHES |= {"TORCH_EXTENSIONS_DIR": "extensions", "CUDA_CACHE_PATH": "nv", "CUTE_DSL_CACHE_DIR": "cute"}
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Output(BaseModel):
    """The worker's description of one returned object."""

    type: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    strided: bool = False
    broadcast: bool = False
    aliases: list[str] = []
    at: int | None = None
    stride: tuple[int, ...] | None = None


class Answer(BaseModel):
    """An answer of the worker, which a submission may have forged."""

    model_config = ConfigDict(allow_inf_nan=False)

    outputs: list[list[Output]] = []
    wall_ns: float = 0.0
    gpu_ns: float | None = None
    threads: int = 0
    unordered: str = ""
    notes: list[str] = []
    table: str = ""
    traceback: str = ""
    layers: list[str] = []
    structures: list[Any] = []


class Found(BaseModel):
    """The device's findings in a call: why a launch was stopped, the launches, and their part of the work."""

    stopped: str = ""
    launches: list[Launch] = []
    work: Told = Told()


class Processes:
    """The worker of a submission and, with ``simulate`` (an architecture), its device. hazards: its options."""

    def __init__(self, submission: Submission, arena: Arena, arch: str | None, simulate: str, hazards: dict) -> None:
        self._submission, self._arena, self._arch = submission, arena, arch
        self._simulate, self._hazards = simulate, hazards
        self._log = tempfile.TemporaryFile()
        self._folder: tempfile.TemporaryDirectory | None = None
        self._worker: subprocess.Popen | None = None
        self._device: subprocess.Popen | None = None
        self.layers: list[str] = []
        self.heard: Callable[[str], None] = lambda line: None

    # life cycle

    @property
    def running(self) -> bool:
        return self._worker is not None

    def start(self, load: dict) -> Answer:
        """Starts both processes, and has the worker ``load`` the submission. Raises ``CallFailed``."""
        self._log.seek(0)
        self._log.truncate()
        self._folder = tempfile.TemporaryDirectory(prefix="cute_nvfp4-submission-", ignore_cleanup_errors=True)
        path = self._submission.copy_to(Path(self._folder.name))
        self._mark = secrets.token_hex(8)
        (self._control, control), (self._gpu, gpu) = Pipe(), Pipe()
        launches, ours = Pipe()
        nbytes, calls = str(self._arena.nbytes), str(self._arena.calls)
        told = [str(connection.fileno()) for connection in (control, launches)]
        self._worker = self._popen(
            ["cute_nvfp4.harness.worker", *told, str(self._arena.fd), nbytes, calls, self._folder.name],
            (control.fileno(), launches.fileno(), self._arena.fd),
            self._environment(Path(self._folder.name)),
        )
        if self._simulate:
            told = [str(connection.fileno()) for connection in (gpu, ours)]
            self._device = self._popen(
                ["cute_nvfp4.harness.device", *told, str(self._arena.fd), nbytes, calls],
                (gpu.fileno(), ours.fileno(), self._arena.fd),
                dict(os.environ) | {"OPENBLAS_NUM_THREADS": "1"},
            )
        for connection in (control, launches, gpu, ours):
            connection.close()
        self.layers = self._receive(_START_TIMEOUT_S, "starting its process").layers
        if self._simulate:
            self.device("configure", arch=self._simulate, **self._hazards)
        hazards = {name: self._hazards[name] for name in ("allow", "collect")} if self._simulate else {}
        if self._simulate:
            how = {"schedule": "", "trace": "", "clocked": False, "profiled": False}
            self.device("begin", **how, parts=[])  # for launches while the submission is imported
        request = {"op": "load", "path": str(path), "simulate": self._simulate, "hazards": hazards}
        answer = self.ask(request | load, "loading the submission", _START_TIMEOUT_S)
        self._files = self._own_files()
        return answer

    def _popen(self, module: list[str], descriptors: tuple[int, ...], environment: dict[str, str]) -> subprocess.Popen:
        words = [*module, str(os.getpid())] if module[0].endswith("worker") else module
        return start(words, descriptors, self._log, environment)

    def _environment(self, folder: Path) -> dict[str, str]:
        """The worker's environment: without the judge's secrets, and with every cache in the worker's folder."""
        found = {name: value for name, value in os.environ.items() if name not in SECRETS}
        caches = folder / _CACHED
        caches.mkdir()
        found |= {name: str(caches / place) for name, place in _CACHES.items()}
        found |= {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", sandbox.MARK: self._mark}
        found |= {"TMPDIR": str(caches), "TORCHINDUCTOR_COMPILE_THREADS": "1"} | (
            {ARCH_VARIABLE: self._arch} if self._arch is not None else {}
        )
        if self._simulate:
            # the simulator's products are small: numpy's threads would only compete with torch's for the cores
            found.setdefault("OPENBLAS_NUM_THREADS", "1")
        return found

    def stop(self) -> None:
        """Ends both processes, and whatever the submission has started."""
        worker, device, self._worker, self._device = self._worker, self._device, None, None
        if worker is None:
            return
        left = sandbox.strays(worker.pid, self._mark)
        self._control.close()
        self._gpu.close()
        try:
            worker.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            pass
        sandbox.end([*left, *sandbox.strays(worker.pid, self._mark)])
        for process in filter(None, (worker, device)):
            kill_group(process)
        self._folder.cleanup()

    def close(self) -> None:
        """Ends the processes and closes the log."""
        self.stop()
        self._log.close()

    # messages

    def ask(self, request: dict, doing: str, timeout: float) -> Answer:
        """The worker's answer to a request. Raises ``CallFailed`` if there is none."""
        try:
            self._control.send_bytes(json.dumps(request).encode())
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker died after its last answer: receiving tells how
        return self._receive(timeout, doing)

    def device(self, operation: str, **arguments: Any) -> dict:
        """The device's answer; it waits for running launches only. Raises ``CallFailed``."""
        try:
            self._gpu.send_bytes(json.dumps({"op": operation} | arguments).encode())
            told = {"progress": ""}
            while "progress" in told:
                ready = self._gpu.poll(_START_TIMEOUT_S)
                told = json.loads(self._gpu.recv_bytes()) if ready else {"error": "no answer"}
        except (EOFError, OSError) as error:
            told = {"error": type(error).__name__, "text": "it has ended"}
        if "error" in told:
            captured = self._captured()
            self.stop()
            raise CallFailed(f"the simulated GPU failed: {told['error']}: {told.get('text', '')}", captured)
        return told

    def left_behind(self) -> str:
        """What a call has left behind, processes or files that are no cache; "" if nothing. It ends the processes."""
        left = sandbox.strays(self._worker.pid, self._mark)
        if left:
            sandbox.end(left)
            return f"the submission left {len(left)} process{'es' if len(left) > 1 else ''} running"
        new = sorted(self._own_files() - self._files)
        return f"custom_kernel wrote files: {', '.join(new[:3])}" if new else ""

    def _own_files(self) -> set[str]:
        """The files in the worker's folder that are no cache."""
        folder = Path(self._folder.name)
        caches = folder / _CACHED
        files = (path for path in folder.rglob("*") if path.is_file() and caches not in path.parents)
        return {str(path.relative_to(folder)) for path in files}

    def _waited(self, timeout: float) -> bool:
        """Whether the worker answers in time. Meanwhile it passes on the progress that the device reports."""
        sources, until = [self._control, *([self._gpu] if self._simulate else [])], time.monotonic() + timeout
        while self._control not in (ready := wait(sources, max(0.0, until - time.monotonic()))):
            if not ready:
                return False
            try:
                self.heard(json.loads(self._gpu.recv_bytes()).get("progress", ""))
            except (EOFError, OSError):  # the device has ended, which the next request to it reports
                sources.remove(self._gpu)
        return True

    def _receive(self, timeout: float, doing: str) -> Answer:
        worker = self._worker
        try:
            ready = self._waited(timeout)
            answer = json.loads(self._control.recv_bytes(_MOST_BYTES)) if ready else None
        except (EOFError, ConnectionResetError):
            code = worker.wait()
            self.stop()
            raise CallFailed(f"the process died while {doing} ({_exit_reason(code)})", self._captured()) from None
        except (ValueError, OSError) as error:
            self.stop()
            raise CallFailed(f"the process sent an unreadable answer while {doing}: {error}") from error
        if answer is None:
            self.stop()
            raise CallFailed(f"timed out after {timeout:g} s while {doing}", self._captured())
        if isinstance(answer, dict) and "error" in answer:
            details = "\n".join(filter(None, (str(answer.get("traceback", "")), self._captured())))
            unordered = self.shown(str(answer.get("unordered", "")))
            raise CallFailed(self.shown(str(answer["error"])), self.shown(details), unordered=unordered)
        try:
            return Answer.model_validate(answer)
        except ValidationError as error:
            self.stop()
            raise CallFailed(f"the process sent an answer of the wrong form while {doing}") from error

    def _captured(self) -> str:
        """The end of what the processes printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _CAPTURE_TAIL))
        text = self.shown(self._log.read().decode(errors="replace").strip())
        return f"its output:\n{text}" if text else ""

    def shown(self, text: str) -> str:
        """``text`` for the user: with the submission's own folder, and without control characters."""
        if self._folder is not None:
            text = text.replace(self._folder.name, str(self._submission.path.resolve().parent))
        return printable(text)


def printable(text: str) -> str:
    """``text`` with its control characters replaced, which a terminal would obey."""
    return _UNPRINTABLE.sub("\ufffd", text)


def start(words: list[str], descriptors: tuple[int, ...], log: IO, environment: dict[str, str]) -> subprocess.Popen:
    """Starts Python on the module ``words[0]``, in its own process group; its output goes to ``log``."""
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,
    )


def kill_group(process: subprocess.Popen) -> None:
    """Kills the process group of a process that ``start`` has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)  # its session: the process, and what it has started
    except ProcessLookupError:
        pass
    process.wait()


def _exit_reason(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
