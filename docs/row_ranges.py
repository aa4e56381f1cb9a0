"""The table of docs/reference/shapes.md that says from which numbers of rows a product takes another kernel."""

from __future__ import annotations

from typing import Any

from table_cells import table

from cute_nvfp4.planning.packed import PackedProblem, choose
from cute_nvfp4.target import architecture

ROWS = range(1, 257)
PRODUCTS = (
    ("W4A16", "H100, H200", "sm_90a", {"n": 4096, "k": 4096}),
    ("W4A16", "H100, H200", "sm_90a", {"n": 4096, "k": 14336}),
    ("W4A8", "H100, H200", "sm_90a", {"n": 4096, "k": 4096, "dtype": "float8_e4m3fn"}),
    ("W4A16", "B200, B300", "sm_100a", {"n": 4096, "k": 4096}),
)
"""What x and weight are, the GPU's common name, its architecture, and the problem."""


def first_rows(arch: str, **problem: Any) -> list[int]:
    """For each kernel that products of ``problem`` take for ``ROWS``: the first number of rows."""
    found: dict[Any, int] = {}
    for m in ROWS:
        plan = choose(PackedProblem(m=m, factors=1, **problem), architecture(arch), architecture(arch).sm_count)
        found.setdefault(plan.config, m)
    return list(found.values())


def markdown() -> str:
    """The table."""
    lines = []
    for name, on, arch, problem in PRODUCTS:
        rows = first_rows(arch, **problem)
        lines.append([name, on, f"{problem['n']} × {problem['k']}", str(len(rows)), ", ".join(map(str, rows))])
    head = ["product", "on", "weight, N × K", "kernels for 1 to 256 rows", "first rows of each"]
    return table(head, lines)
