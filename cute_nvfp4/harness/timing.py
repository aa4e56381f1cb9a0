"""GPU timing: CUDA events around one call at a time, with a cold and clean L2 cache.

*Reading* a buffer several times the size of L2 makes it cold. Writing one would leave dirty lines, whose write-back the
timed kernel would pay for (10 to 20 % on these shapes). The reads also keep the GPU busy while the host queues the next
call, so that the host's overhead is not timed unless it takes longer than the reads.

Every function here uses clocks that were bound at import, before any submission is loaded.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

L2_CLEAR_BYTES = 512 << 20
_QUEUED_NS = 1_000_000
_CALL_QUEUED_NS = 1_500_000  # the time for a list of groups, met for the first time after the judge's own work
_COPY_BYTES = 1 << 30
_MIN_RUNS = 10
_WARM_UP_RUNS = 3

_perf_counter = time.perf_counter
_Event = torch.cuda.Event
_synchronize = torch.cuda.synchronize


def most_queueing_ns(calls: int) -> int:
    """The nanoseconds that the host may take to queue ``calls`` calls while the GPU is kept busy."""
    return _QUEUED_NS + calls * _CALL_QUEUED_NS


@dataclass(frozen=True)
class Timing:
    """Statistics of repeated measurements, in nanoseconds; ``err`` is the standard error of the mean."""

    runs: int
    mean: float
    std: float
    err: float
    best: float
    worst: float
    median: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Statistics of ``samples`` (ns, at least one)."""
        std = statistics.stdev(samples) if len(samples) > 1 else 0.0
        return cls(
            runs=len(samples),
            mean=statistics.fmean(samples),
            std=std,
            err=std / math.sqrt(len(samples)),
            best=min(samples),
            worst=max(samples),
            median=statistics.median(samples),
        )

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class StopRule:
    """Stops when the mean is known to ``relative_error``, after ``repeats`` runs, or after ``seconds``."""

    repeats: int = 200
    relative_error: float = 0.001
    seconds: float = 120.0

    def done(self, samples: Sequence[float], elapsed: float) -> bool:
        """Whether ``samples`` (ns), taken in ``elapsed`` seconds, are enough."""
        if len(samples) >= self.repeats or (samples and elapsed >= self.seconds):
            return True
        if len(samples) < min(_MIN_RUNS, self.repeats):
            return False
        timing = Timing.of(samples)
        return timing.err <= self.relative_error * timing.mean


class ColdL2:
    """Evicts L2 by reading a buffer of ``nbytes`` on the current stream."""

    def __init__(self, device: torch.device | str = "cuda", nbytes: int = L2_CLEAR_BYTES) -> None:
        self._buffer = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
        self._sum = torch.zeros((), dtype=torch.float32, device=device)
        self._read = torch.sum
        self._read_ns = math.inf

    def __call__(self) -> None:
        self._read(self._buffer, dim=0, out=self._sum)

    def measure(self) -> None:
        """Measures how long a read takes, for ``busy``."""
        start, end = _Event(enable_timing=True), _Event(enable_timing=True)
        self()
        start.record()
        self()
        end.record()
        end.synchronize()
        self._read_ns = start.elapsed_time(end) * 1e6

    def busy(self, nanoseconds: float) -> None:
        """Evicts L2 by as many reads as keep the GPU busy for ``nanoseconds``; by one read before ``measure``."""
        for _ in range(max(1, math.ceil(nanoseconds / self._read_ns))):
            self()


class Captured(NamedTuple):
    """A call in a CUDA graph. result: tensors that every replay writes; call: keeps alive what the graph reads."""

    graph: torch.cuda.CUDAGraph
    result: Any
    call: Callable[[], Any]


def capture(call: Callable[[], Any], mode: str = "global") -> Captured:
    """Captures one ``call`` in a CUDA graph. mode: "thread_local" if other threads, as NCCL's, may call CUDA."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles and allocates before the capture
            call()
        torch.cuda.synchronize()
        collected = gc.isenabled()
        gc.disable()  # destroying an older graph would invalidate the capture
        # torch.cuda.graph would collect garbage and empty the allocator each time: a third of a second
        graph.capture_begin(capture_error_mode=mode)
        try:
            result = call()
        finally:
            graph.capture_end()
            if collected:
                gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    return Captured(graph, result, call)


def time_once(call: Callable[[], object], clear: Callable[[], None]) -> float:
    """One measurement in nanoseconds: clears L2, then times ``call`` by two events on the current stream."""
    start, end = _Event(enable_timing=True), _Event(enable_timing=True)
    clear()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e6


def time_cuda(
    call: Callable[[], object],
    *,
    rule: StopRule | None = None,
    clear: Callable[[], None] | None = None,
    warm_up: int = _WARM_UP_RUNS,
) -> list[float]:
    """Times ``call`` on the current CUDA stream until ``rule`` is met; returns all measurements in nanoseconds."""
    rule, clear = rule or StopRule(), clear or ColdL2()
    for _ in range(warm_up):
        call()
    _synchronize()
    samples: list[float] = []
    begin = _perf_counter()
    while not rule.done(samples, _perf_counter() - begin):
        samples.append(time_once(call, clear))
    return samples


def copy_bandwidth(device: torch.device | str = "cuda") -> float:
    """Bytes per second (read plus written) of a device-to-device copy of 1 GiB, median of 30."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    samples = time_cuda(
        lambda: target.copy_(source), rule=StopRule(repeats=30, relative_error=1e-9), clear=lambda: None
    )
    return 2 * _COPY_BYTES / (statistics.median(samples) * 1e-9)


def score(values: Sequence[float], ranking_by: str) -> float:
    """The score of a run from each case's time: their geometric mean, their mean, or the last one."""
    return {"geom": geometric_mean, "mean": statistics.fmean, "last": lambda times: times[-1]}[ranking_by](values)


SCORES = {"geom": "geometric mean", "mean": "mean", "last": "last"}
"""The names of the scores in reports."""


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive values: the score of a leaderboard."""
    return math.exp(statistics.fmean(math.log(value) for value in values))
