"""The modes of a run: what is called, checked and timed, and how often."""

from __future__ import annotations

import math
import os
import platform
import random
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .checker import Check
from .errors import HarnessError, TaskFileError
from .problem import DATA_KINDS, MODES, DataKind, Problem, get_problem, mix_seed
from .results import CaseResult, RunResult
from .runner import CallFailed, Outcome, Runner, check_bandwidth, check_samples
from .schema import Case, Task, load_task
from .submission import directives, read_submission
from .timing import L2_CLEAR_BYTES, ColdL2, StopRule, Timing, copy_bandwidth, geometric_mean, time_cuda

SEED_VARIABLE = "POPCORN_SEED"
_BACKENDS = ("auto", "cuda", "sim", "reference")
_GPU_MODES = ("benchmark", "leaderboard")
_ODDS_OF_A_SHORT_BATCH = 0.25

Progress = Callable[[CaseResult, str], None]


@dataclass(frozen=True)
class Options:
    """What to run. ``case`` picks one case; ``seed`` replaces every case's own; ``timeout`` is seconds a request;
    ``jobs`` processes share the cases (mode test without a GPU).

    In the simulator: ``schedules`` is how many adversarial schedules each case runs under (mode test), ``schedule`` one
    of one's own, ``trace`` a file for the timeline of the first case's first call; hazards of the classes ``allow`` are
    warnings, and with ``collect`` none stops a launch, though the case fails; ``strict`` adds warnings; with
    ``inspect``, launches tell registers and spills.
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
    allow: tuple[str, ...] = ()
    collect: bool = False
    strict: bool = False
    inspect: bool = False
    jobs: int = 1


def task_of(options: Options) -> Task:
    """The task that is asked for: shapes, tolerances, limits.

    Raises:
        HarnessError: an unknown problem, or a bad task file.
    """
    return load_task(options.task_file or get_problem(options.problem).folder / "task.yml")


class Evaluation:
    """A validated run: everything a user can get wrong has been refused by the time it exists.

    Raises:
        HarnessError: unknown problem, mode, backend, data kind or case number, a bad task file or submission, or
            ``backend='cuda'`` without a GPU; its ``exit_code`` is the process's.
    """

    def __init__(self, options: Options, cases: list[Case] | None = None) -> None:
        _one_of("mode", options.mode, MODES)
        _one_of("backend", options.backend, _BACKENDS)
        _one_of("data", options.data, DATA_KINDS)
        self.options = options
        self.problem: Problem = get_problem(options.problem)
        self.task = task_of(options)
        if self.task.name != options.problem:
            raise TaskFileError(f"{options.task_file} is for problem {self.task.name!r}, not {options.problem!r}")
        self.submission = options.submission or self.problem.folder / "submission.py"
        named = directives(read_submission(self.submission)).get("leaderboard", options.problem)
        if named != options.problem:
            raise HarnessError(
                f"{self.submission} is a submission to {named!r} (its #!POPCORN line), not {options.problem!r}"
            )
        self.backend = _choose_backend(options.backend)
        self.device = "cuda" if self.backend == "cuda" else "cpu"
        self.arch = _choose_arch(self.backend, options.arch)
        self.numbered = self._select(cases)
        self.timeout = options.timeout or self.task.limits.timeout_seconds
        self.batch = self._batch()
        self.schedules = self._schedules()
        self._check_hazards()
        self.clock = clock_for(self.arch) if self.backend == "sim" and options.mode == "benchmark" else ""
        full = options.data == "full"
        self.tolerances = self.task.full_range_tolerances if full else self.task.tolerances
        self._mixed = _environment_seed()
        if self._mixed is None and options.mode == "leaderboard" and options.seed is None:
            self._mixed = secrets.randbits(32)  # a submission must not know the data of a ranked run
        self._clear: ColdL2 | None = None

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
        """How many calls, each on inputs of its own, a timed repeat makes; times are divided by it."""
        limits = self.task.limits
        if self.options.mode not in _GPU_MODES:
            return 1
        return limits.batch if self.device == "cuda" else min(limits.batch, limits.cpu_batch)

    def _schedules(self) -> list[str]:
        """The schedules of the simulator that every case runs under, as text; one is the default of it."""
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
        """Refuses classes of hazards that do not exist, and any where nothing is simulated."""
        from ..sim.checks.findings import known

        options = self.options
        known(options.allow)
        asked = {"--allow": options.allow, "--continue": options.collect, "--strict": options.strict}
        for name, given in asked.items():
            if given and self.backend != "sim":
                raise HarnessError(f"{name} is for the simulator: it needs --backend sim")

    def _simulation(self) -> dict[str, Any]:
        """The options of the simulated GPU."""
        options = self.options
        told = {name: getattr(options, name) for name in ("inspect", "allow", "collect", "strict")}
        return told | {"clock": self.clock}

    def _seed(self, case: Case) -> int:
        seed = case["seed"] if self.options.seed is None else self.options.seed
        return seed if self._mixed is None else mix_seed(seed, self._mixed)

    def run(self, progress: Progress = lambda result, state: None) -> RunResult:
        """Runs every case; ``progress`` is told before and after each."""
        run = RunResult(
            problem=self.problem.name,
            mode=self.options.mode,
            backend=self.backend,
            arch=self.arch,
            device=torch.cuda.get_device_name() if self.device == "cuda" else f"cpu ({platform.machine()})",
            data=self.options.data,
            submission=str(self.submission),
            seed=self._mixed,
            versions=_versions(),
            clock=self.clock,
        )
        if self.device == "cuda" and self.options.mode in _GPU_MODES:
            run.copy_bytes_s = copy_bandwidth()
            self._clear = ColdL2()
        for index, case in self.numbered:
            result = CaseResult(index, case, self._seed(case), useful_bytes=self.problem.useful_bytes(case))
            result.batch = self.batch
            run.cases.append(result)
        todo, jobs = iter(run.cases), min(self.options.jobs, len(run.cases))
        if jobs == 1:
            self._work(todo, run.copy_bytes_s, progress)
        else:
            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(lambda _: self._work(todo, None, progress), range(jobs)))
        means = [case.gpu.mean / 1e3 for case in run.cases if case.gpu]
        if run.passed and len(means) == len(run.cases):
            run.score_us = geometric_mean(means)
        modelled = [case.modelled_us for case in run.cases if case.modelled_us is not None]
        if run.passed and len(modelled) == len(run.cases):
            run.modelled_score_us = geometric_mean(modelled)
        return run

    def _work(self, todo: Iterator[CaseResult], copy_bytes_s: float | None, progress: Progress) -> None:
        """Runs cases in a process of the submission until none is left to do."""
        with Runner(
            self.problem,
            self.submission,
            [case for _, case in self.numbered],
            backend=self.backend,
            arch=self.arch,
            tolerances=self.tolerances,
            data=self.options.data,
            batch=self.batch,
            timeout=self.timeout,
            simulation=self._simulation(),
        ) as runner:
            for result in todo:  # a list's iterator gives each to one thread
                progress(result, "start")
                try:
                    self._run_case(runner, result, copy_bytes_s)
                    result.passed = not result.error
                except CallFailed as failure:
                    result.error, result.details = str(failure), failure.details
                progress(result, "done")

    def _run_case(self, runner: Runner, result: CaseResult, copy_bytes_s: float | None) -> None:
        modes = {
            "test": self._test,
            "benchmark": self._benchmark,
            "leaderboard": self._leaderboard,
            "profile": self._profile,
        }
        modes[self.options.mode](runner, result)
        if result.gpu is not None and copy_bytes_s is not None:
            check_bandwidth(result.useful_bytes, result.gpu.mean, copy_bytes_s)

    def _checked(
        self, runner: Runner, result: CaseResult, seed: int, *, calls: int = 1, timed: bool = False, schedule: str = ""
    ) -> Outcome:
        first = result.index == self.numbered[0][0] and not result.calls_checked
        trace = str(self.options.trace.resolve()) if first and self.options.trace else ""
        outcome = runner.call(result.case, seed, calls=calls, timed=timed, schedule=schedule, trace=trace)
        _record(result, outcome.check, calls)
        if self.device == "cpu" and result.wall_s is None:
            result.wall_s = outcome.wall_s
            result.add_launches(outcome.launches)
        return outcome

    def _test(self, runner: Runner, result: CaseResult) -> None:
        for schedule in self.schedules:
            self._checked(runner, result, result.seed, schedule=schedule)
        if result.case == min((case for _, case in self.numbered), key=self.problem.flops):
            # new contents at the same addresses: shows results that are kept from call to call
            self._checked(runner, result, mix_seed(result.seed, 1))

    def _benchmark(self, runner: Runner, result: CaseResult) -> None:
        self._checked(runner, result, result.seed, timed=self.device == "cpu")
        samples, check = runner.measure(result.case, mix_seed(result.seed, 1), self._rule(), calls=self.batch)
        _record(result, check, self.batch)
        if self.device == "cuda":
            result.gpu = Timing.of(samples)
            self._time_peer(result)
        else:
            result.wall_s = min(samples) * 1e-9  # the checked call before it may have compiled
        self._checked(runner, result, mix_seed(result.seed, 2))

    def _leaderboard(self, runner: Runner, result: CaseResult) -> None:
        rule, samples = self._rule(), []
        begin, drawn = time.perf_counter(), random.Random(result.seed)
        while not rule.done(samples, time.perf_counter() - begin):
            # The first of these warms up. Batches of other lengths come between the timed ones, so that a submission
            # which puts work off until it has seen a whole batch is caught.
            if not samples or (self.batch > 1 and drawn.random() < _ODDS_OF_A_SHORT_BATCH):
                fewer = drawn.randint(2, self.batch - 1) if self.batch > 2 else 1
                self._checked(runner, result, mix_seed(result.seed, 0, len(samples)), calls=fewer)
            seed = mix_seed(result.seed, 1, len(samples))
            outcome = self._checked(runner, result, seed, calls=self.batch, timed=True)
            samples.append(outcome.wall_s * 1e9 if outcome.gpu_ns is None else outcome.gpu_ns)
        if self.device == "cuda":
            check_samples([self.batch * sample for sample in samples], time.perf_counter() - begin)
            result.gpu = Timing.of(samples)
            self._time_peer(result)

    def _profile(self, runner: Runner, result: CaseResult) -> None:
        result.profile, launches = runner.profile(result.case, result.seed)
        result.add_launches(launches)
        self._checked(runner, result, mix_seed(result.seed, 1))

    def _rule(self) -> StopRule:
        limits = self.task.limits
        if self.device == "cpu":
            return StopRule(limits.cpu_repeats, limits.relative_error, limits.seconds)
        return StopRule(limits.repeats, limits.relative_error, limits.seconds)

    def _time_peer(self, result: CaseResult) -> None:
        """Times the library call as the submission is timed, on enough different inputs to leave nothing in L2."""
        count = min(self.batch, -(-L2_CLEAR_BYTES // result.useful_bytes))
        named = [self.problem.peer(result.case, torch.device(self.device)) for _ in range(count)]
        result.peer_name = named[0][0]

        def calls() -> None:
            for index in range(self.batch):
                named[index % count][1]()

        samples = time_cuda(calls, rule=StopRule(50, 0.001, 10.0), clear=self._clear)
        result.peer = Timing.of([sample / self.batch for sample in samples])


def _record(result: CaseResult, check: Check, calls: int) -> None:
    """Adds the verdict on ``calls`` calls to ``result``; raises CallFailed if it is not a pass."""
    first = result.calls_checked + 1
    result.calls_checked += calls
    result.max_abs = _larger(result.max_abs, check.max_abs)
    result.max_rel = _larger(result.max_rel, check.max_rel)
    if not check.passed:
        numbers = f"call {first}" if calls == 1 else f"calls {first} to {first + calls - 1}"
        raise CallFailed(check.message + (f" ({numbers}, fresh data)" if first > 1 else ""))


def _larger(before: float | None, now: float) -> float | None:
    """The larger error of two; None where it is not a number."""
    return None if math.isnan(now) else max(before or 0.0, now)


def percent_of_copy(result: CaseResult, copy_bytes_s: float) -> float:
    """Useful bytes over mean time, as a percentage of the copy's bandwidth."""
    return 100.0 * result.useful_bytes / (result.gpu.mean * 1e-9) / copy_bytes_s


def _one_of(what: str, got: str, known: tuple[str, ...]) -> None:
    if got not in known:
        raise HarnessError(f"unknown {what} {got!r}; expected one of: {', '.join(known)}")


def clock_for(arch: str | None) -> str:
    """The machine whose clock gives modelled times for ``arch``; "" where there is none, or no ptxas."""
    from ..sim.clock.machine import clocks
    from ..sim.clock.tools import found

    return clocks().get(arch or "", "") if found("ptxas") and found("nvdisasm") else ""


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
