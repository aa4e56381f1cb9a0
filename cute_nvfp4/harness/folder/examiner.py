"""The process of a folder's own code: it draws data with ``generate_input`` and asks ``check_implementation``.

``examination`` starts ``python -m cute_nvfp4.harness.folder.examiner CONTROL_FD MEMORY_FD FOLDER JUDGE ARCH``. The
process can reach neither judge nor submission (``sandbox``): all that the judge takes from it are the data that it
draws and its verdicts. Device "cuda" is a simulated GPU of ``ARCH``; "" is a real one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .. import provided, sandbox
from .described import STRUCTURE
from .structure import Leaf, paths, rebuilt, taken_apart


class Examiner:
    """Serves one judge. Tensors travel in the file ``memory``, at offsets that the judge knows."""

    def __init__(self, memory: int, folder: Path, simulated: bool) -> None:
        self._memory, self._folder, self._simulated = memory, folder, simulated
        self._reference: Any = None
        self._data: Any = None

    def load(self) -> dict:
        """Imports ``reference.py``."""
        sys.path.insert(0, str(self._folder))
        provided.install(self._folder, False, self._simulated)
        self._reference = importlib.import_module("reference")
        if not callable(getattr(self._reference, "generate_input", None)):
            raise AttributeError("reference.py defines no function generate_input(**case)")
        self._check()
        return {}

    def _check(self) -> Callable[[Any, Any], Any]:
        check = getattr(self._reference, "check_implementation", None)
        if check is None:
            reference = getattr(self._reference, "ref_kernel", None)
            if reference is None:
                raise AttributeError("reference.py defines neither check_implementation(data, output) nor ref_kernel")
            check = provided.make_match_reference(reference)
        return check

    def draw(self, *, case: dict[str, Any]) -> dict:
        """Draws data for a case and keeps it; the submission gets a copy.

        Returns the name and size of every buffer, in the order of their bytes in the memory.
        """
        self._data = None
        self._data = data = self._reference.generate_input(**case)
        places, buffers = paths(data), []

        def leaf(tensor: torch.Tensor) -> Leaf:
            name = places.get(id(tensor), f"tensor {len(buffers)}")
            copy = tensor.detach().clone()  # dense; a dense tensor keeps its strides
            shape, stride, host = tuple(copy.shape), tuple(copy.stride()), copy.device.type == "cpu"
            flat = copy.cpu().as_strided((prod(shape),), (1,)).view(torch.uint8)
            buffers.append((name, flat.numpy()))
            kind = str(copy.dtype).removeprefix("torch.")
            return Leaf(name, kind, shape, stride, host, isinstance(tensor, torch.nn.Parameter))

        pickled = taken_apart(data, leaf)
        at, sizes = 0, []
        for name, content in [(STRUCTURE, pickled), *buffers]:
            content = memoryview(content).cast("B") if len(content) else b""
            sizes.append((name, len(content)))
            while len(content):
                done = os.pwrite(self._memory, content, at)
                at, content = at + done, content[done:]
        return {"sizes": sizes}

    def check(self, *, output: Any, tensors: list) -> dict:
        """The folder's verdict on ``output`` for the data drawn last. tensors: those in it, as (offset, dtype, shape,
        whether it is on the CPU). A check may also return the largest errors."""
        value = rebuilt(output, [self._tensor(*tensor) for tensor in tensors])
        said = self._check()(self._data, value)
        errors: dict[str, float] = {}
        if isinstance(said, tuple):
            passed, message, *more = said
            errors = more[0] if more else errors
        else:  # a message, which is empty for a pass, or a plain verdict
            passed, message = (said, "") if isinstance(said, bool) else (not said, said)
        lines = message if isinstance(message, list) else [message or ""]
        return {"passed": bool(passed), "message": "\n".join(map(str, lines)), "errors": errors}

    def _tensor(self, offset: int, dtype: str, shape: list[int], host: bool) -> torch.Tensor:
        kind = getattr(torch, dtype)
        content = bytearray(os.pread(self._memory, size, offset)) if (size := prod(shape) * kind.itemsize) else b""
        while len(content) < size:
            content += os.pread(self._memory, size - len(content), offset + len(content))
        flat = torch.frombuffer(content, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
        tensor = flat.view(kind).view(shape)
        return tensor if host else tensor.to("cuda")


def _own(error: BaseException) -> str:
    """The traceback, without the harness's own frames above the folder's code."""
    trace = traceback.TracebackException.from_exception(error)
    kept = [frame for frame in trace.stack if frame.filename != __file__ and "importlib" not in frame.filename]
    trace.stack = traceback.StackSummary.from_list(kept)
    return "".join(trace.format()).rstrip()


def main() -> None:
    """Answers the judge until it closes the connection."""
    control, memory, folder, judge, arch = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    for descriptor in (control, memory):
        os.set_inheritable(descriptor, False)
    connection = Connection(control)
    os.chdir(folder)
    sys.argv = ["reference.py"]
    sandbox.enter(Path(folder), int(judge))
    if not arch:
        torch.zeros(1, device="cuda")  # CUDA does not start in a process that cannot write to its own /proc entry
    sandbox.shield()  # a submission may run as the same user as this process
    with contextlib.ExitStack() as stack:
        if arch:
            from ...runtime.session import simulated_gpu

            stack.enter_context(simulated_gpu(arch))
        examiner = Examiner(memory, Path(folder), bool(arch))
        while True:
            try:
                request = json.loads(connection.recv_bytes())
            except EOFError:
                os._exit(0)
            try:
                told = getattr(examiner, request.pop("op"))(**request)
            except (Exception, SystemExit) as error:
                told = {"error": f"{type(error).__name__}: {error}", "traceback": _own(error)}
            sys.stdout.flush()
            connection.send_bytes(json.dumps(told).encode())


if __name__ == "__main__":
    main()
