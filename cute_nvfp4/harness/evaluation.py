"""A run: it validates the options, then runs every case, one after the other or in several processes."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..dsl_version import require_dsl
from ..sim.profile.page import FORMATS
from . import sandbox
from .errors import HarnessError, TaskFileError
from .folder.modes import FolderModes
from .folder.runner import FolderRunner
from .folder.task import FolderProblem, is_folder, read_folder
from .modelled_score import modelled_kernels
from .modes import Modes, Pace, Progress
from .problem import DATA_KINDS, MODES, DataKind, Problem, get_problem, mix_seed, problem_name
from .results import CaseResult, RunResult
from .runner import Runner
from .schema import Case, Task, load_task
from .submission import Submission
from .timing import ColdL2, copy_bandwidth, score

SEED_VARIABLE = "POPCORN_SEED"
_BACKENDS = ("auto", "cuda", "sim", "reference")
_GPU_MODES = ("benchmark", "leaderboard")


@dataclass(frozen=True)
class Options:
    """What to run. case: the index of a single case; seed: replaces every case's seed; timeout: seconds for a request;
    jobs: processes that share the cases (mode test without a GPU); dsl_compat: whether names that the DSL has dropped
    exist (``dsl_compat``).

    In the simulator: clock: the GPU of modelled times ("": that of ``arch``). schedules: the number of adversarial
    schedules that each case runs under (mode test); schedule: the text of a single one. trace: a file for the timeline
    of the first case's first call; report: a file for the profile of every launch (mode profile). allow: classes of
    hazards that are only warnings; collect: no hazard stops a launch, but the case fails; strict: more warnings;
    inspect: launches report registers and spills.
    """

    problem: str
    mode: str = "test"
    submission: Path | None = None
    backend: str = "auto"
    arch: str | None = None
    data: DataKind = "public"
    task_file: Path | None = None
    seed: int | None = None
    case: int | None = None
    timeout: float | None = None
    schedules: int = 1
    schedule: str = ""
    trace: Path | None = None
    report: Path | None = None
    allow: tuple[str, ...] = ()
    collect: bool = False
    strict: bool = False
    inspect: bool = False
    jobs: int = 1
    dsl_compat: bool = False
    clock: str = ""


def problem_of(options: Options) -> Problem | FolderProblem:
    """The requested problem: a known one, or that of a task file in the public format.

    Raises:
        HarnessError: an unknown problem, or an invalid folder.
    """
    if options.task_file is not None and is_folder(options.task_file):
        return read_folder(options.task_file)
    return get_problem(options.problem)


def task_of(options: Options) -> Task:
    """The requested task: shapes, tolerances, limits.

    Raises:
        HarnessError: an unknown problem, or an invalid task file.
    """
    problem = problem_of(options)
    if isinstance(problem, FolderProblem):
        return problem.task
    own = problem.folder / "task.yml"
    return load_task(options.task_file or own, own)


class Evaluation:
    """A validated run: the constructor refuses everything that a user can get wrong.

    Raises:
        HarnessError: an unknown problem, mode, backend, data kind or case number, an invalid task file or submission,
            or ``backend='cuda'`` without a GPU; its ``exit_code`` is the process's.
        TargetError: ``backend='sim'`` with another release of the DSL.
    """

    def __init__(self, options: Options, cases: list[Case] | None = None) -> None:
        _one_of("mode", options.mode, MODES)
        _one_of("backend", options.backend, _BACKENDS)
        _one_of("data", options.data, DATA_KINDS)
        self.options = options
        self.problem = self._read_problem()
        self.of_folder = isinstance(self.problem, FolderProblem)
        self.task = self.problem.task if self.of_folder else task_of(options)
        if self.of_folder and options.data != "public":
            raise HarnessError(f"--data {options.data}: a folder draws its data itself, by generate_input")
        if self.task.name != self.problem.name:
            raise TaskFileError(f"{options.task_file} is for problem {self.task.name!r}, not {options.problem!r}")
        self.submission = self._read_submission()
        if self.of_folder:
            self.submission = self.submission.beside(self.problem.files)
        named = self.submission.leaderboard
        if not self.of_folder and named is not None and problem_name(named) != self.problem.name:
            raise HarnessError(
                f"{self.submission.path} is a submission to {named!r} (its #!POPCORN line), not {options.problem!r}"
            )
        self.backend = _choose_backend(options.backend)
        if self.backend == "sim":
            require_dsl()
        self.device = "cuda" if self.backend == "cuda" else "cpu"
        self.arch = _choose_arch(self.backend, options.arch or _arch_of(options.clock))
        self.numbered = self._select(cases)
        self.batch = self._batch()
        self.schedules = self._schedules()
        self._check_hazards()
        self._check_report()
        timed = options.mode == "benchmark" or options.report is not None
        self.clock = (options.clock or clock_for(self.arch)) if self.backend == "sim" and timed else ""
        if options.clock:
            self._check_clock()
        full = options.data == "full"
        self.tolerances = self.task.full_range_tolerances if full else self.task.tolerances
        self._mixed = _environment_seed()
        if self._mixed is None and options.mode in _GPU_MODES and options.seed is None:
            self._mixed = secrets.randbits(32)  # a submission must not know the data of a run with a score

    def _check_clock(self) -> None:
        """Refuses a requested clock that does not exist, or that nothing uses."""
        if not self.clock:
            raise HarnessError("--clock is for modelled times: --backend sim with --mode benchmark or --report FILE")
        wanted = _arch_of(self.clock)
        if wanted != self.arch:
            raise HarnessError(f"--clock {self.clock} is of {wanted}, and --arch is {self.arch}: leave --arch out")
        if not clock_for(self.arch):
            raise HarnessError(f"--clock {self.clock}: {no_clock(self.arch)}")

    def _read_problem(self) -> Problem | FolderProblem:
        return problem_of(self.options)

    def _read_submission(self) -> Submission:
        return Submission.read(self.options.submission or self.problem.folder / "submission.py")

    def _select(self, cases: list[Case] | None) -> list[tuple[int, Case]]:
        if cases is None:
            cases = self.task.benchmarks if self.options.mode in _GPU_MODES else self.task.tests
        for index, case in enumerate(cases):
            try:
                self.problem.validate(case)
            except ValueError as error:
                raise TaskFileError(f"case {index}: {error}") from error
        numbered = list(enumerate(cases))
        if self.options.case is None:
            return numbered
        if not 0 <= self.options.case < len(cases):
            raise HarnessError(f"case {self.options.case} does not exist: {len(cases)} cases, numbered from 0")
        return [numbered[self.options.case]]

    def _batch(self) -> int:
        """The number of calls, each on inputs of its own, in a timed repeat; times are divided by it."""
        limits = self.task.limits
        if self.options.mode not in _GPU_MODES:
            return 1
        return limits.batch if self.device == "cuda" else min(limits.batch, limits.cpu_batch)

    def _schedules(self) -> list[str]:
        """The simulator's schedules that every case runs under, as text; "" is the default schedule."""
        from ..sim.machine.schedule import Schedule, adversarial

        options = self.options
        asked = [("--schedules", options.schedules != 1), ("--schedule", options.schedule), ("--trace", options.trace)]
        for name, given in asked:
            if given and (self.backend != "sim" or options.mode != "test"):
                raise HarnessError(f"{name} is for the simulator: it needs --backend sim and --mode test")
        if options.jobs < 1 or (options.jobs > 1 and (self.backend == "cuda" or options.mode != "test")):
            raise HarnessError(f"--jobs {options.jobs}: expected 1, or more with --mode test and without a GPU")
        if options.schedules < 1 or (options.schedules > 1 and options.schedule):
            raise HarnessError(
                "--schedules N makes N schedules itself (N > 0); give --schedule TEXT for one of your own"
            )
        if options.schedules > 1:
            return [str(schedule) for schedule in adversarial(options.schedules)]
        return [str(Schedule.parse(options.schedule)) if options.schedule else ""]

    def _check_hazards(self) -> None:
        """Refuses unknown classes of hazards, and any option for hazards where nothing is simulated."""
        from ..sim.checks.findings import known

        options = self.options
        known(options.allow)
        asked = {"--allow": options.allow, "--continue": options.collect, "--strict": options.strict}
        for name, given in asked.items():
            if given and self.backend != "sim":
                raise HarnessError(f"{name} is for the simulator: it needs --backend sim")

    def _check_report(self) -> None:
        """Refuses a report that no launch would fill, or whose format is unknown."""
        report = self.options.report
        if report is None:
            return
        if self.backend != "sim" or self.options.mode != "profile":
            raise HarnessError("--report is of simulated launches: it needs --backend sim and --mode profile")
        if report.suffix not in FORMATS:
            raise HarnessError(f"--report {report}: expected a name that ends in {', '.join(FORMATS)}")

    def _simulation(self) -> dict[str, Any]:
        """The options of the simulated GPU."""
        options = self.options
        told = {name: getattr(options, name) for name in ("inspect", "allow", "collect", "strict")}
        return told | {"clock": self.clock}

    def _seed(self, case: Case) -> int:
        seed = case.get("seed", 0) if self.options.seed is None else self.options.seed
        return seed if self._mixed is None else mix_seed(seed, self._mixed)

    def run(self, progress: Progress = lambda result, state: None) -> RunResult:
        """Runs every case. progress: called before and after each case."""
        run = RunResult(
            problem=self.problem.name,
            mode=self.options.mode,
            backend=self.backend,
            arch=self.arch,
            device=torch.cuda.get_device_name() if self.device == "cuda" else f"cpu ({platform.machine()})",
            data=self.options.data,
            submission=str(self.submission.path),
            seed=self._mixed,
            versions=_versions(),
            clock=self.clock,
            ranking_by=self.task.ranking_by,
        )
        for index, case in self.numbered:
            result = CaseResult(index, case, self._seed(case), useful_bytes=self.problem.useful_bytes(case))
            result.batch = self.batch
            run.cases.append(result)
        modes, todo, jobs = self._modes(run), iter(run.cases), min(self.options.jobs, len(run.cases))
        with sandbox.shielded(), ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda _: self._work(todo, modes, run, progress), range(jobs)))
        out_of_reach = sandbox.OUT_OF_REACH in run.isolation
        means = [case.gpu.mean / 1e3 for case in run.cases if case.gpu]
        if run.passed and out_of_reach and len(means) == len(run.cases):
            run.score_us = score(means, self.task.ranking_by)
        modelled = [case.modelled_us for case in run.cases if case.modelled_us is not None and not case.unscored]
        scored = self.options.mode == "benchmark" and run.passed and out_of_reach
        if scored and len(modelled) == len(run.cases):
            run.modelled_score_us = score(modelled, self.task.ranking_by)
            run.modelled_kernels = modelled_kernels(
                zip(modelled, (len(case.launches) for case in run.cases)), self.clock, self.task.ranking_by
            )
        return run

    def _modes(self, run: RunResult) -> Modes:
        """The object that runs the cases; on a GPU it first measures what times are compared with."""
        limits = self.task.limits
        modes = (FolderModes if self.of_folder else Modes)(
            problem=self.problem,
            mode=self.options.mode,
            gpu=self.device == "cuda",
            limits=limits,
            pace=Pace(limits, self.options.timeout),
            batch=self.batch,
            schedules=self.schedules,
            smallest=min(self.numbered, key=lambda numbered: self.problem.flops(numbered[1]))[0],
            first=self.numbered[0][0],
            cases=len(self.numbered),
            trace=self.options.trace,
            report=self.options.report is not None,
        )
        if modes.gpu and self.options.mode in _GPU_MODES:
            modes.copy_bytes_s = run.copy_bytes_s = copy_bandwidth()
            modes.clear = ColdL2()
            modes.clear.measure()
        return modes

    def _work(self, todo: Iterator[CaseResult], modes: Modes, run: RunResult, progress: Progress) -> None:
        """Runs cases in one process of the submission until none is left."""
        with (FolderRunner if self.of_folder else Runner)(
            self.problem,
            self.submission,
            [case for _, case in self.numbered],
            backend=self.backend,
            arch=self.arch,
            tolerances=self.tolerances,
            data=self.options.data,
            batch=self.batch,
            timeout=self.options.timeout or self.task.limits.timeout_seconds,
            simulation=self._simulation(),
            aliases=self.options.dsl_compat,
        ) as runner:
            run.isolation = runner.layers
            for result in todo:  # the list's iterator gives each case to one thread
                runner.hear(lambda line, result=result: progress(result, line))
                result.expected_s = modes.expected(result)
                progress(result, "start")
                modes.run(runner, result)
                run.notes = runner.notes
                progress(result, "done")


def percent_of_copy(result: CaseResult, copy_bytes_s: float) -> float:
    """Useful bytes over mean time, as a percentage of the copy's bandwidth."""
    return 100.0 * result.useful_bytes / (result.gpu.mean * 1e-9) / copy_bytes_s


def _one_of(what: str, got: str, known: tuple[str, ...]) -> None:
    if got not in known:
        raise HarnessError(f"unknown {what} {got!r}; expected one of: {', '.join(known)}")


def clock_for(arch: str | None) -> str:
    """The GPU whose clock gives modelled times for ``arch``; "" if none does, or without ptxas and nvdisasm."""
    from ..sim.clock.machine import clocks
    from ..sim.clock.tools import found

    return clocks().get(arch or "", "") if found("ptxas") and found("nvdisasm") else ""


def _arch_of(clock: str) -> str | None:
    """The architecture of the GPU ``clock``; None for ""."""
    from ..sim.clock.machine import machine

    return machine(clock).arch if clock else None


def no_clock(arch: str | None) -> str:
    """The reason why ``clock_for`` finds no clock for ``arch``."""
    from ..sim.clock.machine import clocks

    if arch not in clocks():
        return f"there is no clock of {arch}; --arch {' and --arch '.join(clocks())} have one"
    return "the clock needs ptxas and nvdisasm: pip install 'cute_nvfp4[clock]'"


def _choose_backend(backend: str) -> str:
    available = torch.cuda.is_available()
    if backend == "cuda" and not available:
        raise HarnessError(
            "backend 'cuda' needs a CUDA device, and torch sees none here. Use --backend sim to run the kernel's PTX "
            "on the CPU, or run 'cute-nvfp4 doctor' to see what is missing."
        )
    return ("cuda" if available else "sim") if backend == "auto" else backend


def _choose_arch(backend: str, arch: str | None) -> str | None:
    from ..runtime.backend import ARCH_VARIABLE, resolve
    from ..target import ARCHITECTURES, DEFAULT_ARCH

    what = "architecture"
    if arch is None and backend == "sim":
        arch, what = os.environ.get(ARCH_VARIABLE) or DEFAULT_ARCH, f"architecture in {ARCH_VARIABLE}"
    if arch is not None:
        _one_of(what, arch, tuple(ARCHITECTURES))
    if backend == "cuda":
        return resolve("cuda", "cuda", arch).arch.name
    return None if backend == "reference" else arch


def _environment_seed() -> int | None:
    text = os.environ.get(SEED_VARIABLE)
    if not text:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise HarnessError(f"{SEED_VARIABLE} is {text!r}, expected an integer") from error


def _versions() -> dict[str, str]:
    from .. import __version__

    found = {"cute_nvfp4": __version__, "python": platform.python_version()}
    for package in ("torch", "nvidia-cutlass-dsl"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
