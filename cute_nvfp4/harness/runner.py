"""Runs a submission in a process of its own, and judges its outputs.

The runner draws the data, keeps a private copy, and computes the exact answer; the submission's process sees only the
arena (``process``). A crash, a hang or an exception costs one case: the next case gets a fresh process.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .arena import Arena, Layout, span
from .checker import Check, check_output
from .counters import Launch
from .errors import CallFailed, HarnessError, SubmissionError
from .problem import DataKind, Problem, mix_seed
from .process import Answer, Found, Output, Processes
from .schema import Case, Tolerances
from .submission import Submission
from .work import Told

_INPUTS_COMPARED = 8
"""Calls of a batch on a GPU whose inputs are compared afterwards; they are chosen when all calls have been made."""
_HAZARDS = {"inspect": False, "allow": (), "collect": False, "strict": False, "clock": ""}


@dataclass(frozen=True)
class Outcome:
    """Checked calls: the verdict on all, the time of one (their mean), the simulated launches of the last, and the work
    that all launches did."""

    check: Check
    calls: int
    wall_s: float
    gpu_ns: float | None
    launches: list[Launch] = field(default_factory=list)
    work: Told | None = None


class Runner:
    """A context manager around the process of one submission.

    backend: where the submission's kernels run: ``cuda``, ``sim`` (a simulated GPU of ``arch``, which serves device
    "cuda") or ``reference`` (tensors are on the CPU). arch: also the process's ``CUTE_NVFP4_ARCH``. batch: most calls,
    each on inputs of its own, that are made together. timeout: seconds for every request (without a GPU, for every
    call), of which the attribute ``expected`` is normal. simulation: options of the simulated GPU
    (``device.Device.configure``). aliases: whether names that the DSL has dropped exist.
    """

    def __init__(
        self,
        problem: Problem,
        submission: Submission,
        cases: Sequence[Case],
        *,
        backend: str,
        arch: str | None,
        tolerances: Tolerances,
        data: DataKind = "public",
        batch: int = 1,
        timeout: float = 180.0,
        simulation: dict[str, Any] | None = None,
        aliases: bool = False,
    ) -> None:
        self._problem, self._submission = problem, submission
        self._simulated, self._device = backend == "sim", "cpu" if backend == "reference" else "cuda"
        self._home = "cuda" if backend == "cuda" else "cpu"  # where inputs are kept and compared
        self._tolerances, self._data, self._batch = tolerances, data, batch
        self.timeout, self.expected = timeout, None
        self.notes: list[str] = []  # what was done for the submission, for its author
        places = 1 if self._home == "cuda" else batch
        self._arena = Arena(places * max(Layout.of(problem, case).nbytes for case in cases))
        simulate, hazards = arch if self._simulated else "", _HAZARDS | (simulation or {})
        self._processes = Processes(submission, self._arena, arch, simulate, hazards)
        self._base: tuple[Case, dict[str, torch.Tensor]] = {}, {}
        self._load = {"problem": problem.name, "device": self._device, "aliases": aliases}

    def __enter__(self) -> Runner:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()
        self._arena.close()

    def hear(self, tell: Callable[[str], None]) -> None:
        """Sets the function that gets progress lines of long launches."""
        self._processes.heard = tell

    @property
    def layers(self) -> list[str]:
        """The layers between the submission's process and the judge's (``sandbox``)."""
        return self._processes.layers

    def start(self) -> None:
        """Starts the process and loads the submission.

        Raises:
            SubmissionError: the submission cannot be imported, or has no ``custom_kernel``.
        """
        try:
            self._watched(lambda: self._processes.start(self._load))
        except CallFailed as error:
            details = f"\n{error.details}" if error.details else ""
            raise SubmissionError(f"{self._submission.path.name}: {error}{details}") from error

    # requests

    def call(
        self, case: Case, seed: int, *, calls: int = 1, timed: bool = False, schedule: str = "", trace: str = ""
    ) -> Outcome:
        """Makes calls on fresh data, all together, then checks them one by one.

        schedule, trace: in the simulator, the schedule of the calls, and the file for their timeline.

        Raises:
            CallFailed: a call raised, died, hung, or returned something that is not an output.
        """
        self._started()
        staged = self._stage(case, seed, calls)
        request = {"op": "call", "case": self._told(case), "batch": self._batch, "order": list(staged), "timed": timed}
        how = {"schedule": schedule, "trace": trace, "clocked": timed, "parts": self._parts(case, staged)}
        timeout = self._timeout_of(calls)
        doing = "running custom_kernel"
        if self.expected is not None:
            doing += f" (about {self.expected * calls:.0f} s were expected here)"
        answer, found = self._watched(lambda: self._ask(request, doing, timeout), **how)
        check = self._judge(case, staged, answer)
        gpu_ns = None if answer.gpu_ns is None else answer.gpu_ns / calls
        work = found.work if self._simulated else None
        return Outcome(check, calls, answer.wall_ns * 1e-9 / calls, gpu_ns, found.launches, work)

    def profile(self, case: Case, seed: int, report: bool = False) -> tuple[str, list[Launch]]:
        """One call under torch's profiler: its table, and its simulated launches, each with a profile if ``report``."""
        self._started()
        staged = self._stage(case, seed, 1)
        request = {"op": "profile", "case": self._told(case), "order": list(staged)}
        how = {"profiled": report, "parts": self._parts(case, staged)}
        answer, found = self._watched(lambda: self._ask(request, "profiling custom_kernel"), **how)
        return answer.table, found.launches[len(found.launches) // 2 :]

    def _started(self) -> None:
        if not self._processes.running:
            self.start()

    def _ask(self, request: dict, doing: str, timeout: float | None = None) -> Answer:
        return self._processes.ask(request, doing, timeout or self.timeout)

    def _watched(self, request, *, schedule="", trace="", clocked=False, profiled=False, parts=()) -> Any:
        """The answer to a request, and the device's findings while the submission worked on it.

        Raises:
            CallFailed: a hazard, whatever the submission made of it; else the request's own error; else that the
                submission has left something behind.
        """
        processes, answer, failure, found = self._processes, None, None, Found()
        if self._simulated and processes.running:
            how = {"schedule": schedule, "trace": trace, "clocked": clocked, "profiled": profiled}
            told = processes.device("begin", **how, parts=list(parts))
            if told["late"]:
                raise self._refusal(f"{told['late']} launches came after custom_kernel had returned")
        try:
            answer = request()
        except CallFailed as error:
            failure = error
        if self._simulated and processes.running:
            found = Found.model_validate(processes.device("end", outputs=self._made(answer)))
        self._check_hazards(found, answer, failure)
        if failure is not None:
            raise failure
        self.notes = [processes.shown(note) for note in answer.notes]
        left = processes.left_behind()
        if answer.threads:
            left = f"custom_kernel left {answer.threads} thread{'s' if answer.threads > 1 else ''} running"
        if left:
            raise self._refusal(left)
        return answer, found

    def _made(self, answer: Answer | None) -> list[tuple[int, int]] | None:
        """The places of outputs that launches should have written; None: the output tensors of the call."""

    def _check_hazards(self, found: Found, answer: Answer | None, failure: CallFailed | None) -> None:
        """Raises CallFailed if the device stopped a launch, and for hazards between streams."""
        details = failure.details if failure else answer.traceback
        shown = self._processes.shown
        stopped, unordered = shown(found.stopped), failure.unordered if failure else shown(answer.unordered)
        if stopped or unordered:
            verdict = "hazard" if unordered or stopped.startswith("hazard") else "refused"
            raise CallFailed("\n".join(filter(None, (stopped, unordered))), details, verdict)

    def _refusal(self, message: str) -> CallFailed:
        """The error for a submission that broke a rule. Its process is stopped."""
        self._processes.stop()
        return CallFailed(message)

    def _timeout_of(self, calls: int) -> float:
        """Seconds for ``calls`` calls: on a GPU they are far faster than one timeout; on a CPU each may take it."""
        return self.timeout if self._home == "cuda" else self.timeout * calls

    # staging

    def _told(self, case: Case) -> Case:
        """The part of a case that the submission's process may know: all but the seed."""
        return {name: value for name, value in case.items() if name != "seed"}

    def _stage(self, case: Case, seed: int, calls: int) -> dict[int, dict[str, torch.Tensor]]:
        """Draws inputs for each call and hands them over; returns private copies by place, in the order of the calls.

        The calls take places in random order, so that no address tells which call is the first or the last.
        """
        places = random.Random(mix_seed(seed, calls)).sample(range(self._batch), calls)
        layout = Layout.of(self._problem, case)
        staged = {}
        for number, place in enumerate(places):
            inputs = self._drawn(case, mix_seed(seed, -number) if number else seed)
            start = 0 if self._home == "cuda" else place * layout.nbytes
            for slot in layout.inputs:
                self._arena.write(start + slot.offset, inputs[slot.buffer.name])
            if self._home == "cuda":
                request = {"op": "stage", "case": self._told(case), "index": place, "batch": self._batch}
                self._ask(request, "taking its inputs")
            else:
                for slot in [*layout.outputs, *layout.results]:
                    self._arena.write(start + slot.offset, _nan(slot.buffer.shape, slot.buffer.dtype))
            staged[place] = {name: tensor.to(self._home) for name, tensor in inputs.items()}
        return staged

    def _drawn(self, case: Case, seed: int) -> dict[str, torch.Tensor]:
        """Inputs for one call. On a GPU, which makes hundreds of calls, one draw for each case is varied there."""
        if self._home == "cpu":
            return self._problem.generate(case, seed, self._data)
        known, contents = self._base
        if known != case:
            drawn = self._problem.generate(case, seed, self._data)
            self._base = case, {name: tensor.to(self._home) for name, tensor in drawn.items()}
            return self._base[1]
        return self._problem.vary(contents, seed, self._data)

    def _parts(self, case: Case, staged: dict[int, Any]) -> list[tuple[int, int, str, bool]]:
        """The tensors of the calls in the arena, which kernels may touch."""
        layout, found = Layout.of(self._problem, case), []
        for place in staged if self._simulated else ():
            for slot in layout.buffers:
                name = slot.buffer.name + (f" of place {place} in the batch" if len(staged) > 1 else "")
                found.append((place * layout.nbytes + slot.offset, slot.nbytes, name, slot.buffer.output))
        return found

    # judging

    def _judge(self, case: Case, staged: dict[int, dict[str, torch.Tensor]], answer: Answer) -> Check:
        """The verdict on every call of a batch, or on those up to the first wrong one.

        It copies all outputs before it compares any, so that later writes do not count.
        """
        gpu = self._home == "cuda"
        returned: list[list[Output] | None] = [None] * len(staged) if gpu else list(answer.outputs)
        compared = set(random.sample(list(staged), min(_INPUTS_COMPARED if gpu else len(staged), len(staged))))
        if len(returned) != len(staged):
            raise self._refusal("the process sent an answer of the wrong form while running custom_kernel")
        taken = [None if outputs is None else self._take(case, outputs) for outputs in returned]
        checks = []
        for number, (place, inputs) in enumerate(staged.items()):
            where = f"call {number + 1} of {len(staged)} in the batch: " if len(staged) > 1 else ""
            try:
                check = self._judge_call(case, place, inputs, returned[number], taken[number], place in compared)
            except CallFailed as error:
                raise CallFailed(where + str(error), error.details, error.verdict) from error
            checks.append(replace(check, message=where + check.message) if check.message else check)
            if not check.passed:
                break
        return worst(checks)

    def _judge_call(
        self,
        case: Case,
        place: int,
        inputs: dict[str, torch.Tensor],
        outputs: list[Output] | None,
        contents: list[torch.Tensor] | None,
        look: bool,
    ) -> Check:
        """Checks that the inputs are unchanged (if ``look``), that outputs have the right form, and their values."""
        layout = Layout.of(self._problem, case)
        start = 0 if outputs is None else place * layout.nbytes
        if outputs is None:  # on a GPU the arena now serves this call
            for slot in layout.results:
                self._arena.write(slot.offset, _nan(slot.buffer.shape, slot.buffer.dtype))
            collected = self._ask({"op": "collect", "index": place, "inputs": look}, "handing over its outputs").outputs
            outputs = collected[0] if collected else []
            contents = self._take(case, outputs)
        changed = [
            slot.buffer.name
            for slot in (layout.inputs if look else ())
            if not torch.equal(self._read(start, slot).to(self._home), inputs[slot.buffer.name])
        ]
        if changed:
            raise CallFailed(f"custom_kernel changed its inputs: {', '.join(changed)}")
        self._check_description(case, outputs)
        expected = self._problem.reference(case, inputs, magnitude=self._tolerances.sum_rtol > 0)
        checks = []
        for index, (content, exact) in enumerate(zip(contents, expected)):
            check = check_output(content.numpy(), exact, self._tolerances)
            named = f"output {index}: {check.message}" if check.message and len(expected) > 1 else check.message
            checks.append(replace(check, message=named))
        return worst(checks)

    def _read(self, start: int, slot) -> torch.Tensor:
        return self._arena.read(start + slot.offset, slot.buffer.shape, slot.buffer.dtype)

    def _take(self, case: Case, outputs: list[Output]) -> list[torch.Tensor]:
        """Copies of the outputs that have the right form; ``_check_description`` refuses the others."""
        wanted = self._problem.output_shapes(case)
        if any((out.shape, out.dtype, out.device) != (*kind, self._device) for out, kind in zip(outputs, wanted)):
            return []
        try:
            return [
                self._arena.read(-1 if out.at is None else out.at, out.shape, out.dtype, out.stride)
                for out in outputs[: len(wanted)]
                if out.strided and not out.broadcast
            ]
        except HarnessError as error:
            raise self._refusal(f"the process described an output that is not one: {error}") from error

    def _check_description(self, case: Case, outputs: list[Output]) -> None:
        expected = self._problem.output_shapes(case)
        if len(outputs) != len(expected):
            raise CallFailed(f"custom_kernel returned {len(outputs)} outputs, expected {len(expected)}")
        for index, (out, (shape, dtype)) in enumerate(zip(outputs, expected)):
            name = f"output {index}" if len(expected) > 1 else "output"
            if out.type != "Tensor":
                where = f" as {name}" if len(expected) > 1 else ""
                raise CallFailed(f"custom_kernel returned a {out.type}{where}, expected a torch.Tensor")
            got = (out.shape, out.dtype, out.device)
            if got != (shape, dtype, self._device) or not out.strided:
                raise CallFailed(
                    f"{name} is {got[1]} {list(got[0])} on {got[2]}, expected {dtype} {list(shape)} on {self._device}"
                )
            aliases = out.aliases or self._shared_with(case, out)
            if aliases:
                raise CallFailed(f"the {name} shares memory with the input {', '.join(aliases)}")
            if out.broadcast or any(s == 0 and n > 1 for n, s in zip(shape, out.stride or ())):
                raise CallFailed(f"the {name} is a broadcast view; elements share memory")

    def _shared_with(self, case: Case, out: Output) -> list[str]:
        """The names of the inputs, of any call, that an output in the arena overlaps."""
        if out.stride is None or self._home == "cuda":
            return []
        layout = Layout.of(self._problem, case)
        last = out.at + span(out.shape, out.stride, getattr(torch, out.dtype).itemsize)
        starts = [place * layout.nbytes for place in range(self._batch)]
        both = (
            slot
            for at in starts
            for slot in layout.inputs
            if out.at < at + slot.offset + slot.nbytes and at + slot.offset < last
        )
        return list(dict.fromkeys(slot.buffer.name for slot in both))


def _nan(shape: Sequence[int], dtype: str) -> torch.Tensor:
    return torch.full(tuple(shape), float("nan"), dtype=getattr(torch, dtype))


def worst(checks: Sequence[Check]) -> Check:
    """The verdict on several outputs: all messages, and the largest errors."""
    return Check(
        all(check.passed for check in checks),
        "; ".join(check.message for check in checks if check.message),
        _largest([check.max_abs for check in checks]),
        _largest([check.max_rel for check in checks]),
    )


def _largest(errors: Sequence[float]) -> float:
    """The largest error; NaN if one of them is, wherever it stands."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)
