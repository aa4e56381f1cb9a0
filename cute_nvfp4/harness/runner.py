"""Runs a submission in a process of its own and judges what comes back.

The runner draws the data, keeps a private copy, and computes the exact answer; the submission's process sees only
the shared arena. That holds one call at a time: the calls of a batch are staged and collected one by one. A crash,
a hang or an exception costs one case: the next one gets a fresh process.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ValidationError

from .arena import Arena, Layout
from .checker import Check, check_output
from .counters import Launch
from .errors import SubmissionError
from .problem import DataKind, Problem, mix_seed
from .schema import Case, Tolerances
from .timing import StopRule

ARCH_VARIABLE = "CUTE_NVFP4_ARCH"
_CAPTURE_TAIL = 4000
_START_TIMEOUT_S = 120.0
# A GEMV cannot read DRAM faster than a copy does; this leaves room for the noise of both measurements.
IMPLAUSIBLE_BANDWIDTH = 1.5


class CallFailed(Exception):
    """A call gave no output to check; ``details`` is the submission's traceback and what it printed."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class _Output(BaseModel):
    """What the worker says of one returned object."""

    type: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    strided: bool = False
    broadcast: bool = False
    aliases: list[str] = []


class _Answer(BaseModel):
    """An answer of the worker, which a submission could have forged: validated like any input."""

    outputs: list[_Output] = []
    wall_ns: float = 0.0
    gpu_ns: float | None = None
    launches: list[Launch] = []
    samples: list[float] = []
    table: str = ""


@dataclass(frozen=True)
class Outcome:
    """Checked calls: the verdict on all, times of one (their mean), and the simulated launches of the last."""

    check: Check
    calls: int
    wall_s: float
    gpu_ns: float | None
    launches: list[Launch] = field(default_factory=list)


class Runner:
    """A context manager around the process of one submission.

    ``backend`` is where the submission's kernels run: ``cuda``, ``sim`` (a simulated GPU of ``arch``, which serves
    device "cuda") or ``reference`` (tensors are on the CPU). ``arch`` is also what the process finds in
    ``CUTE_NVFP4_ARCH``; ``batch`` is how many calls, each on inputs of its own, are made together at most; ``timeout``
    (seconds) bounds every request (without a GPU, every call). ``simulation`` are options of the simulated GPU
    (``simulation.Simulation``).
    """

    def __init__(
        self,
        problem: Problem,
        submission: Path,
        cases: Sequence[Case],
        *,
        backend: str,
        arch: str | None,
        tolerances: Tolerances,
        data: DataKind = "public",
        batch: int = 1,
        timeout: float = 180.0,
        simulation: dict[str, Any] | None = None,
    ) -> None:
        self._problem, self._submission = problem, submission
        self._simulate = arch if backend == "sim" else ""
        self._arch, self._device = arch, "cpu" if backend == "reference" else "cuda"
        self._simulation = simulation or {}
        self._home = "cuda" if backend == "cuda" else "cpu"  # where its inputs are kept and compared
        self._tolerances, self._data, self._batch, self._timeout = tolerances, data, batch, timeout
        self._arena = Arena(max(Layout.of(problem, case).nbytes for case in cases))
        self._process: subprocess.Popen | None = None
        self._connection = None
        self._log = tempfile.TemporaryFile()

    def __enter__(self) -> Runner:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._log.close()
        self._arena.close()

    # process

    def start(self) -> None:
        """Starts the process and loads the submission.

        Raises:
            SubmissionError: it cannot be imported, or has no ``custom_kernel``.
        """
        ours, theirs = Pipe()
        self._log.seek(0)
        self._log.truncate()
        environment = dict(os.environ)
        environment.pop("POPCORN_FD", None)  # results are ours to write
        environment["PYTHONUNBUFFERED"] = "1"
        if self._arch is not None:
            environment[ARCH_VARIABLE] = self._arch
        if self._simulate:
            # the simulator's products are small: numpy's threads only fight with torch's for the cores
            environment.setdefault("OPENBLAS_NUM_THREADS", "1")
        root = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "cute_nvfp4.harness.worker"]
        command += [str(theirs.fileno()), str(self._arena.fd), str(self._arena.nbytes)]
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(), self._arena.fd),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        self._connection = ours
        try:
            self._receive(_START_TIMEOUT_S, "starting its process")
            where = {"device": self._device, "simulate": self._simulate, "options": self._simulation}
            request = {"op": "load", "problem": self._problem.name, "path": str(self._submission), **where}
            self._ask(request, "loading the submission")
        except CallFailed as error:
            details = f"\n{error.details}" if error.details else ""
            raise SubmissionError(f"{self._submission.name}: {error}{details}") from error

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            _kill_group(process)

    def _receive(self, timeout: float, doing: str) -> _Answer:
        assert self._connection is not None and self._process is not None
        process = self._process
        try:
            ready = self._connection.poll(timeout)
            answer = json.loads(self._connection.recv_bytes()) if ready else None
        except (EOFError, ConnectionResetError):
            code = process.wait()
            self._stop()
            raise CallFailed(f"the process died while {doing} ({_exit_reason(code)})", self._captured()) from None
        except ValueError as error:
            self._kill()
            raise CallFailed(f"the process sent an unreadable answer while {doing}: {error}") from error
        if answer is None:
            self._kill()
            raise CallFailed(f"timed out after {timeout:g} s while {doing}", self._captured())
        if isinstance(answer, dict) and "error" in answer:
            details = "\n".join(filter(None, (str(answer.get("traceback", "")), self._captured())))
            raise CallFailed(str(answer["error"]), details)
        try:
            return _Answer.model_validate(answer)
        except ValidationError as error:
            self._kill()
            raise CallFailed(f"the process sent an answer of the wrong form while {doing}") from error

    def _ask(self, request: dict, doing: str, timeout: float | None = None) -> _Answer:
        if self._process is None:
            self.start()
        try:
            self._connection.send_bytes(json.dumps(request).encode())
        except (BrokenPipeError, ConnectionResetError):
            pass  # it died since its last answer: receiving says how
        return self._receive(timeout or self._timeout, doing)

    def _kill(self) -> None:
        if self._process is not None:
            _kill_group(self._process)
        self._stop()

    def _captured(self) -> str:
        """The end of what the process printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _CAPTURE_TAIL))
        text = self._log.read().decode(errors="replace").strip()
        return f"its output:\n{text}" if text else ""

    # requests

    def call(
        self, case: Case, seed: int, *, calls: int = 1, timed: bool = False, schedule: str = "", trace: str = ""
    ) -> Outcome:
        """Calls on fresh data, made together and then checked one by one.

        In the simulator they run under ``schedule``, and their timeline is written to the file ``trace``.

        Raises:
            CallFailed: one raised, died, hung, or returned something that is not an output.
        """
        staged = self._stage(case, seed, calls)
        request = {"op": "call", "order": list(staged), "timed": timed, "schedule": schedule, "trace": trace}
        answer = self._ask(request, "running custom_kernel", self._timeout_of(calls))
        gpu_ns = None if answer.gpu_ns is None else answer.gpu_ns / calls
        check = self._judge(case, staged)
        return Outcome(check, calls, answer.wall_ns * 1e-9 / calls, gpu_ns, answer.launches)

    def measure(self, case: Case, seed: int, rule: StopRule, *, calls: int = 1) -> tuple[list[float], Check]:
        """Times (ns, of one call) of repeats of ``calls`` calls on fresh data, and the verdict on all of a last repeat.

        GPU times on CUDA, wall times otherwise. Outputs are filled with NaN before every repeat.
        """
        staged = self._stage(case, seed, calls)
        request = {"op": "measure", "order": list(staged), "repeats": rule.repeats}
        request |= {"relative_error": rule.relative_error, "seconds": rule.seconds}
        begin = time.perf_counter()
        samples = self._ask(request, "timing", self._timeout_of(calls) + rule.seconds).samples
        check_samples(samples, time.perf_counter() - begin)
        if len(samples) > rule.repeats:
            raise CallFailed(f"the timer was tampered with: {len(samples)} times for at most {rule.repeats} repeats")
        return [sample / calls for sample in samples], self._judge(case, staged)

    def profile(self, case: Case, seed: int) -> tuple[str, list[Launch]]:
        """One call under torch's profiler: its table, and its launches where they were simulated."""
        staged = self._stage(case, seed, 1)
        answer = self._ask({"op": "profile", "order": list(staged)}, "profiling custom_kernel")
        return answer.table, answer.launches

    def _timeout_of(self, calls: int) -> float:
        """A GPU is far quicker than the timeout of a call; on a CPU every call may take that long."""
        return self._timeout if self._home == "cuda" else self._timeout * calls

    # staging

    def _stage(self, case: Case, seed: int, calls: int) -> dict[int, dict[str, torch.Tensor]]:
        """Draws inputs for each call and hands them over; returns private copies by call, in the order of the calls.

        The calls take places in random order, so that no address tells which call is the first or the last.
        """
        places = random.Random(mix_seed(seed, calls)).sample(range(self._batch), calls)
        layout = Layout.of(self._problem, case)
        staged = {}
        for number, place in enumerate(places):
            inputs = self._problem.generate(case, mix_seed(seed, -number) if number else seed, self._data)
            for slot in layout.inputs:
                self._arena.tensor(slot).copy_(inputs[slot.buffer.name])
            self._ask({"op": "stage", "case": case, "index": place, "batch": self._batch}, "taking its inputs")
            staged[place] = {name: tensor.to(self._home) for name, tensor in inputs.items()}
        return staged

    def _judge(self, case: Case, staged: dict[int, dict[str, torch.Tensor]]) -> Check:
        """The verdict on every call of a batch, or on those up to the first that is wrong."""
        checks = []
        for number, (place, inputs) in enumerate(staged.items()):
            where = f"call {number + 1} of {len(staged)} in the batch: " if len(staged) > 1 else ""
            try:
                check = self._judge_call(case, place, inputs)
            except CallFailed as error:
                raise CallFailed(where + str(error), error.details) from error
            checks.append(replace(check, message=where + check.message) if check.message else check)
            if not check.passed:
                break
        return _worst(checks)

    def _judge_call(self, case: Case, place: int, inputs: dict[str, torch.Tensor]) -> Check:
        """Inputs unchanged, outputs of the right kind, values right; from what the arena holds once collected."""
        layout = Layout.of(self._problem, case)
        for slot in layout.results:
            self._arena.tensor(slot).fill_(float("nan"))
        outputs = self._ask({"op": "collect", "index": place}, "handing over its outputs").outputs
        changed = [
            slot.buffer.name
            for slot in layout.inputs
            if not torch.equal(self._arena.tensor(slot).to(self._home), inputs[slot.buffer.name])
        ]
        if changed:
            raise CallFailed(f"custom_kernel changed its inputs: {', '.join(changed)}")
        self._check_description(case, outputs)
        expected = self._problem.reference(case, inputs, magnitude=self._tolerances.sum_rtol > 0)
        checks = []
        for index, (slot, exact) in enumerate(zip(layout.results, expected)):
            check = check_output(self._arena.tensor(slot).numpy(), exact, self._tolerances)
            named = f"output {index}: {check.message}" if check.message and len(expected) > 1 else check.message
            checks.append(replace(check, message=named))
        return _worst(checks)

    def _check_description(self, case: Case, outputs: list[_Output]) -> None:
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
            if out.aliases:
                raise CallFailed(f"the {name} shares memory with the input {', '.join(out.aliases)}")
            if out.broadcast:
                raise CallFailed(f"the {name} is a broadcast view; elements share memory")


def check_samples(samples: Sequence[float], elapsed: float) -> None:
    """Raises CallFailed for times (ns) that cannot be true of a request that took ``elapsed`` seconds."""
    if not samples or not all(np.isfinite(sample) and sample > 0 for sample in samples):
        raise CallFailed("the timer was tampered with: times that are not positive numbers")
    if sum(samples) * 1e-9 > elapsed:
        raise CallFailed(f"the timer was tampered with: {sum(samples) * 1e-9:.3g} s reported in {elapsed:.3g} s")


def check_bandwidth(useful_bytes: int, mean_ns: float, copy_bytes_s: float) -> None:
    """Raises CallFailed for a mean time that would need more than DRAM can give with a cold L2."""
    reached = useful_bytes / (mean_ns * 1e-9)
    if reached > IMPLAUSIBLE_BANDWIDTH * copy_bytes_s:
        raise CallFailed(
            f"implausible time: {reached / 1e12:.2f} TB/s of useful bytes, a copy reaches {copy_bytes_s / 1e12:.2f}"
        )


def _worst(checks: Sequence[Check]) -> Check:
    return Check(
        all(check.passed for check in checks),
        "; ".join(check.message for check in checks if check.message),
        max(check.max_abs for check in checks),
        max(check.max_rel for check in checks),
    )


def _kill_group(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: it and what it started
    except ProcessLookupError:
        pass
    process.wait()


def _exit_reason(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
