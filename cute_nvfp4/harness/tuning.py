"""Times the plans of a GEMM on random operands, with a checked result: on a GPU by cold replays of CUDA graphs, without
one by the simulator's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..formats import FORMATS, NVFP4, Format
from ..operand import BlockScaledTensor
from ..ops.gemm import gemm
from ..ops.prepare_weight import prepare_weight
from ..planning.gemm_problem import GemmProblem, Plan
from ..planning.packed_problem import PackedPlan, PackedProblem
from ..planning.tuning import Call, Timed, time_plans
from ..prepared_weight import PreparedWeight
from ..runtime.simulating import simulating
from ..scale_layout import to_blocked
from ..weight_packing import packing_of
from .timing import ColdL2, capture, time_once

Operands = tuple[BlockScaledTensor | torch.Tensor, BlockScaledTensor | PreparedWeight]


def measure(
    problem: GemmProblem | PackedProblem,
    plans: Sequence[Plan | PackedPlan],
    *,
    rounds: int = 40,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Timed]:
    """``time_plans`` on the current GPU with a cold L2, after a check of every plan's result against torch's."""
    a, b = operands(problem, "cuda")
    expected, clear = product(a, b), ColdL2()
    return time_plans(
        plans,
        lambda plan: capture(checked_call(problem, plan, a, b, expected)).graph.replay,
        lambda call: time_once(call, clear),
        rounds=rounds,
        progress=progress,
    )


def by_clock(
    problem: GemmProblem | PackedProblem,
    plans: Sequence[Plan | PackedPlan],
    clock: str,
    sm_count: int,
    *,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Timed]:
    """Modelled times of plans by the simulator's clock of a GPU ("b200"): the fastest first, plans that failed last.

    Each plan is executed once on the CPU, without checks, on ``sm_count`` SMs with a cold L2, and its result is
    compared with torch's.
    """
    a, b = operands(problem, "cpu")
    expected, timed, failed = product(a, b), [], []
    for index, plan in enumerate(plans):
        progress(f"clock of {clock}", index, len(plans))
        try:
            with simulating(plan.config.arch.name, checks=False, clock=clock, sm_count=sm_count) as runs:
                checked_call(problem, plan, a, b, expected)
        except Exception as error:  # any error is reported beside its plan
            failed.append(Timed(plan, error=f"{type(error).__name__}: {error}"))
        else:
            us = sum(run.result.timing.microseconds for run in runs)
            timed.append(Timed(plan, us, us, 1))
    return [*sorted(timed, key=lambda t: t.us), *failed]


def operands(problem: GemmProblem | PackedProblem, device: str, seed: int = 1111) -> Operands:
    """Random A and B of the problem: all E2M1 codes, or 8-bit elements below 2; scales from 1/4 to 2. For a packed
    weight A is x, 16-bit or NVFP4, and B the prepared weight; for weights that stay in rows both are NVFP4."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(shape: tuple[int, ...], fmt: Format) -> BlockScaledTensor:
        size = (*shape, fmt.data_columns(problem.k))
        data = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
        if fmt.element_bits == 8:
            data &= 0xBB  # no exponent has all ones, so that there is neither NaN nor infinity
        size = (*shape, fmt.scale_columns(problem.k))
        exponent = torch.randint(-2, 2, size, device=device, generator=generator)
        code = exponent + 127 if fmt.scale == "ue8m0" else (exponent + 7) << 3
        return BlockScaledTensor(data, to_blocked(code.to(torch.uint8)), format=fmt)

    if isinstance(problem, GemmProblem):
        a, b = (problem.m, problem.a_format), (problem.n, problem.b_format)
        return tuple(draw((problem.batch, rows), FORMATS[name]) for rows, name in (a, b))
    dtype = getattr(torch, problem.dtype)
    if problem.packing == "nvfp4_rows":
        return draw((problem.m,), NVFP4), draw((problem.n,), NVFP4)
    format = next(format for format in FORMATS.values() if packing_of(format) == problem.packing)
    x, weight = draw((problem.m,), NVFP4), draw((problem.n,), format)
    return x if problem.quantized else x.dequantize(dtype), prepare_weight(weight, dtype=dtype)


def product(a: BlockScaledTensor | torch.Tensor, b: BlockScaledTensor | PreparedWeight) -> torch.Tensor:
    """torch's product in float32; with a prepared weight, a product in its 16-bit dtype, of exact operands."""
    dtype = b.dtype if isinstance(b, PreparedWeight) else torch.float32
    x = a if isinstance(a, torch.Tensor) else a.dequantize(dtype)
    return torch.matmul(x, b.dequantize(dtype).mT).float()


def output(problem: GemmProblem | PackedProblem, device: torch.device | str) -> torch.Tensor:
    """An output (L, M, N), for a packed weight (M, N), contiguous along the problem's dimension and full of NaN."""
    batch = (problem.batch,) if isinstance(problem, GemmProblem) else ()
    out = torch.full((*batch, problem.m, problem.n), float("nan"), dtype=getattr(torch, problem.out), device=device)
    return out.mT.contiguous().mT if isinstance(problem, GemmProblem) and problem.out_major == "m" else out


def checked_call(
    problem: GemmProblem | PackedProblem,
    plan: Plan | PackedPlan,
    a: BlockScaledTensor | torch.Tensor,
    b: BlockScaledTensor | PreparedWeight,
    expected: torch.Tensor,
) -> Call:
    """A call that runs ``plan`` into one output, after a check of its result.

    Raises:
        ValueError: the result differs from ``expected``, torch's product, by more than the output's rounding.
    """
    out = output(problem, a.device)

    def call() -> object:
        return gemm(a, b, out=out, config=plan)

    call()
    error = (out.float() - expected).abs().max() / expected.abs().max()
    limit = 2.0**-7 if problem.out == "bfloat16" else 2.0**-9
    if not error <= limit:
        raise ValueError(f"wrong result: relative error {error:.2e}, expected at most {limit:.2e}")
    return call
