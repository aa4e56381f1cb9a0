"""The judge's side of a folder's process (``examiner``): it starts the process, and validates each of its answers."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .. import process, sandbox
from ..arena import Arena
from ..errors import CallFailed, HarnessError, TaskFileError
from .task import FolderProblem

_START_TIMEOUT_S = 120.0
_MOST_BYTES = 1 << 20
_CHUNK = 64 << 20
_TAIL = 2000


class Drawn(BaseModel):
    """The names and sizes of drawn buffers, whose bytes follow one another in the memory."""

    model_config = ConfigDict(extra="forbid")

    sizes: list[tuple[str, int]] = Field(min_length=1, max_length=4096)


class Verdict(BaseModel):
    """The folder's verdict on an answer, and the largest errors if it reports them."""

    model_config = ConfigDict(extra="forbid")

    passed: bool
    message: str
    errors: dict[Literal["max_abs", "max_rel"], float] = {}


class Told(BaseModel):
    """An error in place of an answer."""

    error: str
    traceback: str = ""


class Examination:
    """A folder's process, from ``start`` to ``close``. arch: of its simulated device, "" for a GPU."""

    def __init__(self, problem: FolderProblem, arch: str) -> None:
        self._problem, self._arch = problem, arch
        self._memory = Arena(0)
        self._log = tempfile.TemporaryFile()
        self._folder = tempfile.TemporaryDirectory(prefix="cute_nvfp4-folder-", ignore_cleanup_errors=True)
        self._process: Any = None
        self._loaded = False

    def start(self) -> None:
        """Starts the process. The first request waits until it has loaded ``reference.py``."""
        folder = Path(self._folder.name)
        for name, content in self._problem.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        self._control, control = Pipe()
        words = ["cute_nvfp4.harness.folder.examiner", str(control.fileno()), str(self._memory.fd), str(folder)]
        environment = {name: value for name, value in os.environ.items() if name not in process.SECRETS}
        environment |= {"TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {sandbox.MARK: secrets.token_hex(8)}
        self._process = process.start(
            [*words, str(os.getpid()), self._arch], (control.fileno(), self._memory.fd), self._log, environment
        )
        control.close()

    def close(self) -> None:
        """Ends the process and removes its folder."""
        if self._process is not None:
            self._control.close()
            process.kill_group(self._process)
            self._process = None
        self._folder.cleanup()
        self._log.close()
        self._memory.close()

    # requests

    def draw(self, case: dict[str, Any], timeout: float) -> list[tuple[str, int]]:
        """Has new data drawn: names and sizes of its buffers. Raises ``TaskFileError`` if the folder's code fails."""
        try:
            drawn = Drawn.model_validate(self._ask({"op": "draw", "case": case}, timeout))
        except ValidationError as error:
            raise TaskFileError(f"{self._problem.name}: generate_input's process sent something else") from error
        if any(size < 0 for _, size in drawn.sizes) or len({name for name, _ in drawn.sizes}) < len(drawn.sizes):
            raise TaskFileError(f"{self._problem.name}: generate_input's process sent invalid sizes")
        return drawn.sizes

    def drawn(self, sizes: list[tuple[str, int]]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The bytes of the buffers from ``draw`` in chunks: index of the buffer, offset in the buffer, bytes."""
        at = 0
        for number, (_, size) in enumerate(sizes):
            for first in range(0, size, _CHUNK):
                count = min(_CHUNK, size - first)
                yield number, first, self._memory.read(at + first, (count,), "uint8")
            at += size

    def check(self, output: Any, tensors: list[torch.Tensor], host: list[bool], timeout: float) -> Verdict:
        """The folder's verdict on ``output``. tensors: those in it, on the CPU; host: which of them the folder's code
        gets on the CPU, and not on its device.

        Raises:
            CallFailed: the folder's check fails on the output, which therefore is not an answer.
        """
        at, described = 0, []
        for tensor, on_host in zip(tensors, host):
            self._memory.write(at, tensor)
            described.append((at, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), on_host))
            at += tensor.numel() * tensor.element_size()
        try:
            told = self._ask({"op": "check", "output": output, "tensors": described}, timeout)
            return Verdict.model_validate(told)
        except TaskFileError as error:
            raise CallFailed(f"the folder's check does not take what custom_kernel returned: {error}") from error
        except ValidationError as error:
            raise TaskFileError(f"{self._problem.name}: the process of its check sent something else") from error

    def _ask(self, request: dict[str, Any], timeout: float) -> dict:
        if not self._loaded:
            self._loaded = True
            self._answer({"op": "load"}, _START_TIMEOUT_S)
        return self._answer(request, timeout)

    def _answer(self, request: dict[str, Any], timeout: float) -> dict:
        name = self._problem.name
        try:
            self._control.send_bytes(json.dumps(request).encode())
            if not self._control.poll(timeout):
                raise HarnessError(f"{name}: the folder's {request['op']} took more than {timeout:g} s (--timeout)")
            told = json.loads(self._control.recv_bytes(_MOST_BYTES))
        except (EOFError, OSError, ValueError, RecursionError) as error:
            raise HarnessError(f"{name}: the process of the folder's code has ended\n{self._said()}") from error
        if isinstance(told, dict) and "error" in told:
            said = Told.model_validate(told)
            text = f"{said.error}\n{said.traceback}".replace(self._folder.name, str(self._problem.folder))
            text = process.printable(text)
            raise TaskFileError(f"{name}: {request['op']} failed in the folder's code: {text}")
        return told

    def _said(self) -> str:
        """The end of the process's output."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _TAIL))
        return process.printable(self._log.read().decode(errors="replace"))
