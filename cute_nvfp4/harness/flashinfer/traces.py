"""FlashInfer-Bench's traces of a run: one for each workload, with FlashInfer-Bench's statuses."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import Any

from ...target import architecture
from ..results import CaseResult, RunResult
from .records import STATUSES, BenchTrace, Correctness, Environment, Performance, TraceEvaluation


def traces(run: RunResult, workloads: list[dict[str, Any]], solution: str) -> list[BenchTrace]:
    """A trace for every case. workloads: those of the problem, by the cases' indices."""
    environment = Environment(hardware=_hardware(run), libs=run.versions | {"times": _times(run)})
    now = datetime.now(timezone.utc).isoformat()
    found = []
    for case in run.cases:
        status = status_of(case)
        evaluation = TraceEvaluation(
            status=status,
            environment=environment,
            timestamp=now,
            log=_log(case),
            correctness=_correctness(case) if status in ("PASSED", "INCORRECT_NUMERICAL") else None,
            performance=_performance(case) if status == "PASSED" else None,
        )
        found.append(
            BenchTrace(definition=run.problem, workload=workloads[case.index], solution=solution, evaluation=evaluation)
        )
    return found


def refused(
    problem: str, workloads: list[dict[str, Any]], solution: str, hardware: str, error: str
) -> list[BenchTrace]:
    """The traces of a solution that cannot be loaded."""
    evaluation = TraceEvaluation(
        status="COMPILE_ERROR",
        environment=Environment(hardware=hardware),
        timestamp=datetime.now(timezone.utc).isoformat(),
        log=error,
    )
    return [BenchTrace(definition=problem, workload=w, solution=solution, evaluation=evaluation) for w in workloads]


def status_of(case: CaseResult) -> str:
    """FlashInfer-Bench's status of a case. A hazard, and a right answer that no launch made, are RUNTIME_ERROR:
    FlashInfer-Bench has no status for them, and neither is a pass."""
    if case.passed:
        return "PASSED"
    said = case.error.partition(":")[0]
    if case.verdict == "wrong":
        return said if said in STATUSES else "INCORRECT_NUMERICAL"
    return "TIMEOUT" if case.error.startswith("timed out") else "RUNTIME_ERROR"


def hardware_of(backend: str, arch: str | None, device: str) -> str:
    """The name of the hardware, with "(simulated)" if it was not a GPU."""
    if backend == "sim":
        return f"NVIDIA_{architecture(arch).example.partition('/')[0].replace(' ', '_')} (simulated)"
    return device.replace(" ", "_") if backend == "cuda" else "CPU (reference backend, no GPU)"


def _hardware(run: RunResult) -> str:
    return hardware_of(run.backend, run.arch, run.device)


def _times(run: RunResult) -> str:
    if any(case.gpu for case in run.cases):
        return "measured"
    if any(case.modelled_us is not None for case in run.cases):
        return f"modelled on {run.clock} by cute_nvfp4's clock, not measured"
    return "none: latency_ms is 0"


def _log(case: CaseResult) -> str:
    if case.passed:
        return case.unscored
    return "\n".join(filter(None, (f"{case.verdict}: {case.error}", case.details)))


def _correctness(case: CaseResult) -> Correctness:
    errors = (math.inf if value is None else value for value in (case.max_rel, case.max_abs))
    relative, absolute = (0.0 if case.passed and value == math.inf else value for value in errors)
    return Correctness(max_relative_error=relative, max_absolute_error=absolute)


def _performance(case: CaseResult) -> Performance:
    """The mean of measured times, else the modelled time, else 0. The reference is not timed."""
    if case.gpu is not None:
        return Performance(latency_ms=case.gpu.mean / 1e6)
    return Performance(latency_ms=0.0 if case.modelled_us is None or case.unscored else case.modelled_us / 1e3)
