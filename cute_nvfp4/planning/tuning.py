"""Timing plans of a GEMM against each other on a GPU, so that the fastest can be kept."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..formats import FORMATS, Format
from ..operand import BlockScaledTensor
from ..scale_layout import to_blocked
from .gemm_problem import GemmProblem, Plan

Call = Callable[[], object]
_FIRST_ROUNDS = 5
"""Rounds in which every plan is timed; then those that are clearly slower drop out."""
_HOPELESS = 1.25


@dataclass(frozen=True)
class Timed:
    """A plan with its median and best time in microseconds, over ``runs`` cold calls, or why it could not run."""

    plan: Plan
    us: float = 0.0
    best_us: float = 0.0
    runs: int = 0
    error: str = ""


def time_plans(
    plans: Sequence[Plan],
    prepare: Callable[[Plan], Call],
    timer: Callable[[Call], float],
    *,
    rounds: int = 40,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Timed]:
    """Times ``plans`` in turn, round after round, so that a drift of the clock meets all of them alike.

    prepare: compiles and checks a plan and returns a call that runs it once; what it raises becomes that plan's error.
    timer: nanoseconds of one call (``harness.timing.time_once`` with a cold L2). progress: told what is done, how much
    of it, of how much. After a few rounds plans a quarter slower than the best are timed no further.

    Returns:
        Plans that ran, fastest median first, then those that could not.
    """
    calls: dict[Plan, Call] = {}
    failed: list[Timed] = []
    for index, plan in enumerate(plans):
        progress("compiling and checking", index, len(plans))
        try:
            calls[plan] = prepare(plan)
        except Exception as error:  # shown beside the plan, whatever it is
            failed.append(Timed(plan, error=f"{type(error).__name__}: {error}"))
    samples: dict[Plan, list[float]] = {plan: [] for plan in calls}
    active = list(calls)
    for turn in range(rounds):
        progress(f"timing {len(active)} of {len(calls)} plans", turn, rounds)
        for plan in active:
            samples[plan].append(timer(calls[plan]))
        if turn + 1 >= _FIRST_ROUNDS:
            medians = {plan: statistics.median(samples[plan]) for plan in active}
            limit = _HOPELESS * min(medians.values(), default=0.0)
            active = [plan for plan in active if medians[plan] <= limit]
        # every other round starts at the other end, so that nobody is always first
        active.reverse()
    done = [
        Timed(plan, statistics.median(times) / 1e3, min(times) / 1e3, len(times)) for plan, times in samples.items()
    ]
    return [*sorted(done, key=lambda timed: timed.us), *failed]


def measure(
    problem: GemmProblem,
    plans: Sequence[Plan],
    *,
    rounds: int = 40,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Timed]:
    """``time_plans`` on the current GPU, with L2 cold: every plan's result is first checked against torch's."""
    from ..harness.timing import ColdL2, time_once

    a, b = operands(problem, "cuda")
    clear = ColdL2()
    return time_plans(
        plans,
        lambda plan: checked_call(problem, plan, a, b),
        lambda call: time_once(call, clear),
        rounds=rounds,
        progress=progress,
    )


def operands(problem: GemmProblem, device: str, seed: int = 1111) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """Random A and B of the problem: E2M1 of all codes, or 8-bit elements below 2; scales from 1/4 to 2."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(rows: int, fmt: Format) -> BlockScaledTensor:
        shape = (problem.batch, rows)
        size = (*shape, fmt.data_columns(problem.k))
        data = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
        if fmt.element_bits == 8:
            data &= 0xBB  # no exponent of all ones: neither NaN nor infinity
        size = (*shape, fmt.scale_columns(problem.k))
        exponent = torch.randint(-2, 2, size, device=device, generator=generator)
        code = exponent + 127 if fmt.scale == "ue8m0" else (exponent + 7) << 3
        return BlockScaledTensor(data, to_blocked(code.to(torch.uint8)), format=fmt)

    return draw(problem.m, FORMATS[problem.a_format]), draw(problem.n, FORMATS[problem.b_format])


def output(problem: GemmProblem, device: torch.device | str) -> torch.Tensor:
    """(L, M, N), contiguous along the problem's dimension, full of NaN."""
    shape = (problem.batch, problem.m, problem.n)
    out = torch.full(shape, float("nan"), dtype=getattr(torch, problem.out), device=device)
    return out if problem.out_major == "n" else out.mT.contiguous().mT


def checked_call(problem: GemmProblem, plan: Plan, a: BlockScaledTensor, b: BlockScaledTensor) -> Call:
    """A call that runs ``plan`` into one output, after its result was found right.

    Raises:
        ValueError: the result is not that of torch's float32 product, to the rounding of the output.
    """
    from .. import ops

    out = output(problem, a.device)

    def call() -> object:
        return ops.gemm(a, b, out=out, config=plan)

    call()
    expected = torch.matmul(a.dequantize(), b.dequantize().mT)
    error = (out.float() - expected).abs().max() / expected.abs().max()
    limit = 2.0**-7 if problem.out == "bfloat16" else 2.0**-9
    if not error <= limit:
        raise ValueError(f"wrong result: relative error {error:.2e}, expected at most {limit:.2e}")
    return call
