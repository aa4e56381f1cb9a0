"""Measuring plans of a GEMM on a GPU: random operands, a checked result, cold calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..formats import FORMATS, Format
from ..operand import BlockScaledTensor
from ..ops.gemm import gemm
from ..planning.gemm_problem import GemmProblem, Plan
from ..planning.tuning import Call, Timed, time_plans
from ..scale_layout import to_blocked
from .timing import ColdL2, time_once


def measure(
    problem: GemmProblem,
    plans: Sequence[Plan],
    *,
    rounds: int = 40,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Timed]:
    """``time_plans`` on the current GPU, with L2 cold: every plan's result is first checked against torch's."""
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
    out = output(problem, a.device)

    def call() -> object:
        return gemm(a, b, out=out, config=plan)

    call()
    expected = torch.matmul(a.dequantize(), b.dequantize().mT)
    error = (out.float() - expected).abs().max() / expected.abs().max()
    limit = 2.0**-7 if problem.out == "bfloat16" else 2.0**-9
    if not error <= limit:
        raise ValueError(f"wrong result: relative error {error:.2e}, expected at most {limit:.2e}")
    return call
