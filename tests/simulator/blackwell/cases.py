"""The forty shapes as cases that know how to run and judge themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cute_nvfp4 import gemv
from cute_nvfp4.harness.problem import get_problem
from cute_nvfp4.operand import BlockScaledTensor

from . import programs, shapes
from .running import library_runs_with, prepared


@dataclass(frozen=True)
class Case:
    """One shape of one problem; ``data`` is "public" or "full", ``kernel`` "" or "pair" (gemm only)."""

    problem: str
    shape: tuple
    data: str = "public"
    kernel: str = ""

    def __str__(self) -> str:
        text = "+".join("x".join(map(str, g)) for g in self.shape) if self.problem == "group" else ""
        parts = (self.problem, self.kernel, text or "x".join(map(str, self.shape)), self.data)
        return "-".join(filter(None, parts))

    def prepare(self) -> tuple[Callable[..., Any], Callable[[], float]]:
        """(run, check): ``run(**options)`` simulates once, ``check()`` gives the error relative to what is allowed.

        Data is drawn and the kernel compiled and parsed here, so that ``run`` is the simulation alone.
        """
        return _gemv(self) if self.problem == "gemv" else _products(self)


def forty(data: str = "public", problems: tuple[str, ...] = ("gemv", "gemm", "dual", "group")) -> list[Case]:
    """The ten shapes of each problem."""
    tables = {
        "gemv": shapes.GEMV_SHAPES,
        "gemm": shapes.GEMM_SHAPES,
        "dual": shapes.DUAL_SHAPES,
        "group": shapes.GROUP_SHAPES,
    }
    return [Case(problem, shape, data) for problem in problems for shape in tables[problem]]


def _products(case: Case) -> tuple[Callable[..., Any], Callable[[], float]]:
    if case.problem == "group":
        products = [shapes.make("group", s, case.data, shapes.SEED + i) for i, s in enumerate(case.shape)]
        kernel, call = programs.compile_group(programs.GEMM_TILE), lambda **o: programs.run_group(products, **o)
    else:
        products = [shapes.make(case.problem, case.shape, case.data)]
        (product,) = products
        if case.kernel == "pair":
            kernel, call = programs.compile_pair(programs.PAIR_TILE), lambda **o: programs.run_pair(product, **o)
        elif case.problem == "dual":
            kernel, call = programs.compile_gemm(programs.DUAL_TILE), lambda **o: programs.run_dual(product, **o)
        else:
            kernel, call = programs.compile_gemm(programs.GEMM_TILE), lambda **o: programs.run_gemm(product, **o)
    prepared(kernel)

    def run(**options: Any) -> Any:
        for product in products:
            product.c.fill_(torch.nan)
        return call(**options)

    return run, lambda: max(shapes.check(product) for product in products)


def _gemv(case: Case) -> tuple[Callable[..., Any], Callable[[], float]]:
    """The library's own kernel, on the harness's data."""
    m, k, batch = case.shape
    problem, sizes = get_problem("nvfp4_gemv"), {"m": m, "k": k, "l": batch}
    tensors = problem.generate(sizes, shapes.SEED, case.data)  # type: ignore[arg-type]
    a = BlockScaledTensor(tensors["a"], tensors["sfa_permuted"].flatten())
    b = BlockScaledTensor(tensors["b"], tensors["sfb_permuted"].flatten())
    out = torch.full((batch, m), torch.nan, dtype=torch.float16)
    gemv(a, b, out=out, backend="sim")

    def run(**options: Any) -> Any:
        out.fill_(torch.nan)
        with library_runs_with(**options):
            return gemv(a, b, out=out, backend="sim")

    def check() -> float:
        (expected,) = problem.reference(sizes, tensors)  # type: ignore[arg-type]
        value, magnitude = (torch.from_numpy(x)[:, 0].T for x in (expected.value, expected.magnitude))
        allowed = value.abs() * 2.0**-11 + magnitude * 2.0**-22 + 2.0**-25
        worst = float(((out.double() - value).abs() / allowed).nan_to_num(torch.inf).max())
        assert worst <= 1, f"an element is {worst:.3g} times further off than is allowed"
        return worst

    return run, check
