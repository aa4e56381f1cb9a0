"""Runs what ``cute-nvfp4 explain`` explains (a program, a submission, or an operation) and records its launches."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import explain as worded
from ..harness.errors import HarnessError
from ..sim.execution import Here, Issued

if TYPE_CHECKING:
    from ..sim import GlobalMemory, Launch, Program, Result
    from ..sim.observe.touched import Touched

SHAPES = {
    "gemv": (2048, 1, 1024),
    "gemm": (128, 1024, 1024),
    "gated_gemm": (128, 1024, 1024),
    "grouped_gemm": (128, 1024, 1024),
    "quantize": (512, 1, 1024),
}
"""(m, n, k) of each operation unless the user gives sizes; grouped_gemm has two groups of that shape."""


class Ran(NamedTuple):
    """A launch that has ended, with its program and its result."""

    program: Program
    launch: Launch
    result: Result


@dataclass
class Kept(Here):
    """Runs launches as ``Here`` does, and keeps them while it is ``on``."""

    ran: list[Ran] = field(default_factory=list)
    on: bool = True

    def __call__(
        self, program: Program, launch: Launch, memory: GlobalMemory, issued: Issued, compare: bool, options: Any
    ) -> tuple[Result, Touched | None]:
        if not self.on:
            options = {**options, "counters": False, "clock": None}
        result, touched = super().__call__(program, launch, memory, issued, compare, options)
        if self.on:
            self.ran.append(Ran(program, launch, result))
        return result, touched


@dataclass(frozen=True)
class Target:
    """What to run. name: a path or an operation. problem, task (a file), case: for submissions; sizes (m, n, k): for
    operations, None for those of ``SHAPES``; arguments: for programs."""

    name: str
    arch: str
    problem: str = ""
    case: int = 0
    task: Path | None = None
    sizes: tuple[int | None, int | None, int | None] = (None, None, None)
    arguments: tuple[str, ...] = ()


def launches(target: Target) -> list[Ran]:
    """Runs the target in a simulated GPU, without checks, and with the clock of its architecture if there is one.

    Raises:
        HarnessError: there is no such file or operation, or the problem of a submission is unknown.
    """
    from ..harness.evaluation import clock_for
    from ..runtime.compile import uncached
    from ..runtime.session import simulated_gpu

    run, kept = _runner(target), Kept()
    clock = clock_for(target.arch) or None
    options = {"checks": False, "counters": True, "clock": clock, "execution": kept}
    with uncached(), simulated_gpu(target.arch, **options):
        run(kept)
    return kept.ran


def _runner(target: Target) -> Callable[[Kept], None]:
    """The function that runs the target within a session."""
    if target.name in SHAPES:
        return lambda kept: _operation(target, kept)
    path = Path(target.name)
    if not path.is_file():
        known = f"a Python file, or one of {', '.join(SHAPES)}"
        raise HarnessError(worded("what to explain", got=repr(target.name), expected=known))
    from ..harness.submission import Submission

    submission = Submission.read(path)
    if "def custom_kernel" not in submission.source and not target.problem and target.task is None:
        return lambda kept: _program(target)
    problem = _problem(target, submission.leaderboard)
    cases = _cases(problem, target.task)
    if not 0 <= target.case < len(cases):
        raise HarnessError(worded("the case", got=str(target.case), expected=f"0 to {len(cases) - 1}"))
    case = cases[target.case]
    return lambda kept: _submission(path, problem, case, kept)


def _problem(target: Target, named: str | None) -> Any:
    """The problem of a submission: that of a task file in the public format, or the one that it or the user names."""
    from ..harness.folder.task import is_folder, read_folder
    from ..harness.problem import get_problem

    if target.task is not None and is_folder(target.task):
        return read_folder(target.task)
    if not (target.problem or named):
        what, hint = f"the submission {target.name}", "its #!POPCORN leaderboard line says it as well"
        expected = "--problem nvfp4_gemv and the like, or --task FOLDER/task.yml"
        raise HarnessError(worded(what, got="no problem", expected=expected, hint=hint))
    return get_problem(target.problem or named)


def _cases(problem: Any, task: Path | None) -> list[dict[str, Any]]:
    """The test cases: a folder's own, those of the file ``task``, or the problem's."""
    from ..harness.folder.task import FolderProblem
    from ..harness.schema import load_task

    if isinstance(problem, FolderProblem):
        return problem.task.tests
    own = problem.folder / "task.yml"
    read = load_task(task or own, own)
    if read.name != problem.name:
        raise HarnessError(worded("the task file", got=f"cases of {read.name!r}", expected=f"of {problem.name!r}"))
    return read.tests


def _program(target: Target) -> None:
    from ..sim.session.script import run_script

    run_script(target.name, target.arguments)


def _submission(path: Path, problem: Any, case: dict[str, Any], kept: Kept) -> None:
    """Makes one call of ``custom_kernel`` on the public data of a test case."""
    from ..harness import provided
    from ..harness.folder.task import FolderProblem

    own = problem.files if isinstance(problem, FolderProblem) else {}
    with tempfile.TemporaryDirectory() as place, _imports(Path(place), path.resolve().parent):
        for name, content in own.items():
            (Path(place) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(place) / name).write_bytes(content)
        provided.install(Path(place) if own else path.resolve().parent, False, True)
        data = importlib.import_module("reference").generate_input(**case) if own else _data(problem, case)
        specification = importlib.util.spec_from_file_location("submission", path.resolve())
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        kept.ran.clear()  # drops launches that were made before the call
        module.custom_kernel(data)


def _data(problem: Any, case: dict[str, Any]) -> tuple:
    """The ``data`` of one of the harness's problems, on the device."""
    import torch

    tensors = problem.generate(case, case["seed"], "public")
    for buffer in problem.buffers(case):
        if buffer.output:
            tensors[buffer.name] = torch.zeros(buffer.shape, dtype=getattr(torch, buffer.dtype))
    return problem.views({name: tensor.cuda() for name, tensor in tensors.items()})


_PROVIDED = ("task", "utils", "reference")


@contextlib.contextmanager
def _imports(*folders: Path) -> Iterator[None]:
    """Makes modules of ``folders`` importable, and forgets the modules provided for a submission afterwards."""
    before, modules = list(sys.path), {name: sys.modules.pop(name, None) for name in _PROVIDED}
    sys.path[:0] = map(str, folders)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
        for name, module in modules.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def _operation(target: Target, kept: Kept) -> None:
    """Makes one call of an operation on random operands; launches that make operands are not kept."""
    import torch

    from .. import gated_gemm, gemm, gemv, grouped_gemm, prepare_weight, quantize

    m, n, k = (usual if size is None else size for size, usual in zip(target.sizes, SHAPES[target.name]))
    generator = torch.Generator().manual_seed(0)

    def rows(count: int) -> torch.Tensor:
        return torch.randn(count, k, generator=generator).bfloat16().cuda()

    kept.on = False
    x, weights = rows(m), [rows(n) for _ in range(2)]
    hopper = target.arch == "sm_90a" and target.name in ("gemm", "gated_gemm")
    a = x if hopper or target.name == "quantize" else quantize(x)
    quantized = [quantize(w) for w in weights] if target.name != "quantize" else []
    if hopper:
        quantized = [prepare_weight(*quantized[: 2 if target.name == "gated_gemm" else 1])]
    kept.on = True
    calls: dict[str, Callable[[], object]] = {
        "gemv": lambda: gemv(a, quantized[0]),
        "gemm": lambda: gemm(a, quantized[0]),
        "gated_gemm": lambda: gated_gemm(a, *quantized),
        "grouped_gemm": lambda: grouped_gemm([(a, w) for w in quantized]),
        "quantize": lambda: quantize(a),
    }
    calls[target.name]()
