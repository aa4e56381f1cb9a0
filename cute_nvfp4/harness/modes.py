"""The modes: which calls each makes for a case, and what it checks and times."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .checker import Check
from .errors import CallFailed
from .plausible import check_bandwidth, check_samples
from .problem import Problem, mix_seed
from .results import CaseResult
from .runner import Outcome, Runner
from .schema import Limits
from .timing import L2_CLEAR_BYTES, ColdL2, StopRule, Timing, most_queueing_ns, time_cuda

_ODDS_OF_A_SHORT_BATCH = 0.25
_SLOWER = 10
"""A case may take so many times longer than expected."""
NOTHING = (
    "right, but {what}: torch or the host has made the answer. Launch a kernel for this shape; on a GPU, where all "
    "work is timed, --backend cuda takes the submission as it is"
)


@dataclass
class Pace:
    """The speed at which the cases of a run go without a GPU: limits and estimates grow with a case's work.

    seconds: the user's limit for a case; None to derive it from the case's work.
    """

    limits: Limits
    seconds: float | None
    _rates: list[float] = field(default_factory=list)

    def note(self, flops: int, seconds: float) -> None:
        """Records that a call of ``flops`` operations has taken ``seconds``."""
        self._rates.append(seconds / flops)

    def expected(self, flops: int) -> float | None:
        """The expected seconds of a call, from those already made; None before the first."""
        return statistics.median(self._rates) * flops if self._rates else None

    def limit(self, flops: int) -> float:
        """The seconds that a call may take."""
        if self.seconds is not None:
            return self.seconds
        by_work = self.limits.timeout_seconds + flops / self.limits.cpu_flop_s
        return max(by_work, _SLOWER * (self.expected(flops) or 0.0))


@dataclass
class Modes:
    """Runs cases of ``problem`` in ``mode``. smallest: the case that mode test calls a second time; trace: a file for
    the timeline of case ``first``; report: whether mode profile profiles every launch."""

    problem: Problem
    mode: str
    gpu: bool
    limits: Limits
    pace: Pace
    batch: int
    schedules: list[str]
    smallest: int
    first: int
    cases: int
    trace: Path | None = None
    report: bool = False
    clear: ColdL2 | None = None
    copy_bytes_s: float | None = None

    def expected(self, result: CaseResult) -> float | None:
        """The expected seconds of a call of the case; None on a GPU, and before any call."""
        return None if self.gpu else self.pace.expected(self.problem.flops(result.case))

    def run(self, runner: Runner, result: CaseResult) -> None:
        """Runs one case and records the findings in ``result``."""
        if not self.gpu:
            runner.timeout, runner.expected = self.pace.limit(self.problem.flops(result.case)), result.expected_s
        try:
            getattr(self, f"_{self.mode}")(runner, result)
            if self.gpu and result.gpu is not None and self.copy_bytes_s is not None:
                check_bandwidth(result.useful_bytes, result.gpu.mean, self.copy_bytes_s)
            if result.nothing:
                raise CallFailed(NOTHING.format(what=result.nothing), verdict="launched-nothing")
            result.verdict = "right"
        except CallFailed as failure:
            result.error, result.details, result.verdict = str(failure), failure.details, failure.verdict

    def _checked(
        self, runner: Runner, result: CaseResult, seed: int, *, calls: int = 1, timed: bool = False, schedule: str = ""
    ) -> Outcome:
        first = result.index == self.first and not result.calls_checked
        trace = str(self.trace.resolve()) if first and self.trace else ""
        outcome = runner.call(result.case, seed, calls=calls, timed=timed, schedule=schedule, trace=trace)
        _record(result, outcome.check, calls)
        self._look_at_work(result, outcome)
        if not self.gpu:
            if result.wall_s is None or timed:
                result.wall_s = outcome.wall_s
                result.add_launches(outcome.launches)
            self.pace.note(self.problem.flops(result.case), outcome.wall_s)
        return outcome

    def _look_at_work(self, result: CaseResult, outcome: Outcome) -> None:
        """Records whether the launches cannot have made the answer; if they did not do all of it, there is no score."""
        work, case = outcome.work, result.case
        if work is None:
            return
        shapes = self.problem.output_shapes(case)
        outputs = sum(math.prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in shapes)
        bytes_, sums = result.useful_bytes - outputs, self.problem.flops(case) // 2
        what = ""
        if not outcome.launches:
            what = "no kernel was launched"
        elif work.read < bytes_ * outcome.calls:
            what = f"the launches read {work.read:,} bytes, the operands have {bytes_ * outcome.calls:,}"
        elif work.multiply_adds < sums * outcome.calls:
            what = f"the launches have {work.multiply_adds:,} multiply-adds at most, of {sums * outcome.calls:,}"
        result.nothing = result.nothing or what
        if work.by_host:
            result.unscored = f"{work.by_host}: torch's or the host's work has no modelled time"

    def _test(self, runner: Runner, result: CaseResult) -> None:
        for schedule in self.schedules:
            self._checked(runner, result, result.seed, schedule=schedule)
        if result.index == self.smallest:
            # new contents at the same addresses reveal results that are kept from call to call
            self._checked(runner, result, mix_seed(result.seed, 1))

    def _benchmark(self, runner: Runner, result: CaseResult) -> None:
        self._checked(runner, result, result.seed)
        if self.gpu:
            self._leaderboard(runner, result)
        elif self.batch > 1:
            self._checked(runner, result, mix_seed(result.seed, 1), calls=self.batch)
        # the first call may have compiled the kernel and allocated memory that later calls use again
        self._checked(runner, result, mix_seed(result.seed, 2), timed=not self.gpu)

    def _leaderboard(self, runner: Runner, result: CaseResult) -> None:
        seconds = self.limits.ranked_seconds / self.cases if self.gpu else self.limits.seconds
        repeats = self.limits.repeats if self.gpu else self.limits.cpu_repeats
        self._repeat(runner, result, StopRule(repeats, self.limits.relative_error, seconds))

    def _repeat(self, runner: Runner, result: CaseResult, rule: StopRule) -> None:
        """Makes timed repeats, each checked and on fresh data, so that answers kept from one call are of no use."""
        samples: list[float] = []
        begin, drawn = time.perf_counter(), random.Random(result.seed)
        while not rule.done(samples, time.perf_counter() - begin):
            # The first of these calls warms up. It is short, since drawing and checking take most of a case's time.
            # Later ones put batches of other lengths between the timed ones, to catch a submission that puts work off
            # until it has seen a whole batch.
            if not samples or (self.batch > 1 and drawn.random() < _ODDS_OF_A_SHORT_BATCH):
                longest = self.batch - 1 if samples else min(self.batch - 1, max(2, self.batch // 4))
                fewer = drawn.randint(2, longest) if longest > 1 else 1
                self._checked(runner, result, mix_seed(result.seed, 0, len(samples)), calls=fewer)
            seed = mix_seed(result.seed, 1, len(samples))
            outcome = self._checked(runner, result, seed, calls=self.batch, timed=self.gpu)
            samples.append(outcome.wall_s * 1e9 if outcome.gpu_ns is None else outcome.gpu_ns)
        if self.gpu:
            check_samples([self.batch * sample for sample in samples], time.perf_counter() - begin)
            result.gpu = Timing.of(samples)
            self._time_peer(result)

    def _profile(self, runner: Runner, result: CaseResult) -> None:
        self._checked(runner, result, mix_seed(result.seed, 1))
        result.profile, launches = runner.profile(result.case, result.seed, self.report)
        result.add_launches(launches)

    def _time_peer(self, result: CaseResult) -> None:
        """Times the library call as the submission is timed, on enough different inputs to leave nothing in L2."""
        count = min(self.batch, -(-L2_CLEAR_BYTES // result.useful_bytes))
        named = [self.problem.peer(result.case, torch.device("cuda")) for _ in range(count)]
        result.peer_name = named[0][0]

        def calls() -> None:
            for index in range(self.batch):
                named[index % count][1]()

        # as in the worker, the host queues the library's calls while the GPU is busy
        queueing = most_queueing_ns(self.batch)
        samples = time_cuda(calls, rule=StopRule(50, 0.001, 2.0), clear=lambda: self.clear.busy(queueing))
        result.peer = Timing.of([sample / self.batch for sample in samples])


Progress = Callable[[CaseResult, str], None]


def _record(result: CaseResult, check: Check, calls: int) -> None:
    """Adds the verdict on ``calls`` calls to ``result``; raises CallFailed if it is not a pass."""
    first = result.calls_checked + 1
    result.calls_checked += calls
    result.max_abs = _larger(result.max_abs, check.max_abs)
    result.max_rel = _larger(result.max_rel, check.max_rel)
    if not check.passed:
        numbers = f"call {first}" if calls == 1 else f"calls {first} to {first + calls - 1}"
        text = check.message + (f" ({numbers}, fresh data)" if first > 1 else "")
        raise CallFailed(text, verdict="wrong")


def _larger(before: float | None, now: float) -> float | None:
    """The larger of two errors; None if ``now`` is NaN."""
    return None if math.isnan(now) else max(before or 0.0, now)
