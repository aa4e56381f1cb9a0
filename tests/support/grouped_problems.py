"""Random grouped GEMM problems, and the check of their outputs: each group as ``gemm_problems`` checks a GEMM."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from cute_nvfp4.grouped_rows import GroupedRows
from cute_nvfp4.kernels.gemm.config import GemmConfig
from cute_nvfp4.kernels.gemm.grouped_config import GroupedConfig
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.grouped_gemm import grouped_gemm
from cute_nvfp4.ops.grouped_gemm_contiguous import grouped_gemm_contiguous
from cute_nvfp4.planning.gemm_problem import Plan
from support import backends, gemm_problems
from support.gemm_problems import DTYPES, GUARD, Problem, blocked_scales, poisoned_memory

TILINGS = (
    # (pair, cluster, split_k)
    (False, (1, 1), 1), (False, (2, 1), 1), (False, (1, 2), 1), (False, (2, 2), 1), (False, (1, 1), 2),
    (True, (2, 1), 1), (True, (2, 2), 1), (True, (4, 1), 1), (True, (2, 1), 2),
)  # fmt: skip


@dataclass(frozen=True)
class Grouped:
    """A list of problems, or rows of groups with a stack of matrices, and the plan to run it with.

    sizes: (m, n, k) of each group; m or n of 0: an operand without rows.
    contiguous: rows of groups with a stack; sizes then have equal n and equal k. before, after: rows of A outside all
        groups.
    maps: "" for the default. alphas: "" | "number" | "one" | "each".
    globals_: whether operands have global scales (in a list every second one has). workers 0: planning chooses.
    """

    sizes: tuple[tuple[int, int, int], ...]
    contiguous: bool = False
    before: int = 0
    after: int = 0
    tile_n: int = 128
    pair: bool = False
    cluster: tuple[int, int] = (1, 1)
    split_k: int = 1
    stages: int = 0
    acc_stages: int = 0
    raster: str = "m"
    swap: bool = False
    maps: str = ""
    workers: int = 3
    a_format: str = "nvfp4"
    b_format: str = "nvfp4"
    dtype: str = "float32"
    out: str = "rows"
    alphas: str = ""
    globals_: bool = False
    offsets: str = "tensor"
    exact: bool = False
    seed: int = 0

    def __str__(self) -> str:
        sizes = "+".join("x".join(map(str, s)) for s in self.sizes[:4]) + ("+…" if len(self.sizes) > 4 else "")
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return ",".join([f"{len(self.sizes)}:{sizes}", *changed])

    def plan(self) -> Plan | None:
        if not self.workers:
            return None
        make_config = GroupedConfig if self.maps == "workspace" else GemmConfig
        options = {"maps": self.maps} if self.maps == "workspace" else {}
        config = make_config(
            tile_n=self.tile_n, pair=self.pair, cluster=self.cluster, split_k=self.split_k, stages=self.stages,
            acc_stages=self.acc_stages, raster=self.raster, **options,
        )  # fmt: skip
        return Plan(config, self.swap, self.workers)


@dataclass(frozen=True)
class GroupedProblem:
    """The operands of a ``Grouped``. groups: a GEMM each, None where an operand has no rows; alpha: the argument of the
    call. The contiguous form also has the rows of A, the stack B, and the one output with the memory around it."""

    grouped: Grouped
    groups: list[Problem | None]
    alpha: float | torch.Tensor | None
    rows: GroupedRows | None = None
    stack: BlockScaledTensor | None = None
    out: torch.Tensor | None = None
    status: torch.Tensor | None = None

    @cached_property
    def pairs(self) -> list[tuple]:
        """The list that ``grouped_gemm`` gets."""
        pairs = []
        for i, (problem, (m, n, k)) in enumerate(zip(self.groups, self.grouped.sizes)):
            if problem is None:
                alone = gemm_problems.make(_case(self.grouped, i, (max(m, 1), max(n, 1), k)))
                pairs.append((alone.a if m else None, alone.b if n else None))
            else:
                pairs.append((problem.a, problem.b))
        return pairs

    def run(self, backend: str = "") -> list[torch.Tensor]:
        """The outputs of the kernel; outputs and all scratch memory are NaN before."""
        options = {
            "alpha": self.alpha,
            "config": None if backend == "reference" else self.grouped.plan(),
            "backend": backend or backends.backend(),
        }
        with poisoned_memory():
            if self.rows is not None:
                self.out.fill_(math.nan)
                self.status.fill_(77)
                c = grouped_gemm_contiguous(self.rows, self.stack, out=self.out, status=self.status, **options)
                assert c is self.out
                edges = self.rows.offsets.tolist()
                return [c[x:y] for x, y in pairwise(edges)]
            if self.grouped.out == "new":
                return grouped_gemm(self.pairs, out_dtype=DTYPES[self.grouped.dtype], **options)
            outs = []
            for problem, (m, n, _) in zip(self.groups, self.grouped.sizes):
                if problem is None:
                    outs.append(torch.empty((m, n), dtype=DTYPES[self.grouped.dtype], device=backends.device()))
                    continue
                problem.room.fill_(GUARD)
                problem.out.fill_(math.nan)
                outs.append(problem.out)
            results = grouped_gemm(self.pairs, out=outs, **options)
        assert all(x is y for x, y in zip(results, outs))
        return results

    def check(self, results: list[torch.Tensor]) -> None:
        """Raises AssertionError unless every group is right, and everything around the outputs is unchanged."""
        assert len(results) == len(self.groups)
        for i, (problem, c, (m, n, _)) in enumerate(zip(self.groups, results, self.grouped.sizes)):
            if problem is None:
                assert c.shape == (m, n) and c.numel() == 0
                continue
            try:
                gemm_problems.check(problem, c)
            except AssertionError as error:
                raise AssertionError(f"{self.grouped}: group {i}: {error}") from None
        if self.rows is not None:
            edges = self.rows.offsets
            outside = torch.cat([self.out[: edges[0]], self.out[edges[-1] :]])
            assert outside.isnan().all(), "rows of no group were written"
            assert self.status.item() == 0


def _case(grouped: Grouped, index: int, size: tuple[int, int, int], batch: int = 0) -> gemm_problems.Case:
    m, n, k = size
    single = grouped.globals_ and index % 2 == 0
    # of one significant bit where sums must be exact
    a_global, b_global = (0.5, -(2.0 ** (index % 4))) if grouped.exact else (0.03 * (index + 1), -1.5 - index)
    return gemm_problems.Case(
        m, n, k, batch=batch, a_format=grouped.a_format, b_format=grouped.b_format, dtype=grouped.dtype,
        out=grouped.out, exact=grouped.exact, seed=grouped.seed * 1000 + index,
        a_global=a_global if single else None, b_global=b_global if single else None,
    )  # fmt: skip


def _alphas(grouped: Grouped) -> tuple[float | torch.Tensor | None, list[float]]:
    """The argument of the call, and the alpha of each group."""
    count, unit = len(grouped.sizes), 2.0**-9 if grouped.dtype == "float16" or grouped.exact else 1.0
    if grouped.alphas == "each":
        values = torch.tensor([unit * (1 + i % 5) * (-1) ** i for i in range(count)], device=backends.device())
        return values, values.tolist()
    if grouped.alphas == "one":
        return torch.tensor([unit * 3], device=backends.device()), [unit * 3] * count
    if grouped.alphas == "number" or unit != 1.0:
        return unit, [unit] * count
    return None, [1.0] * count


def make(grouped: Grouped) -> GroupedProblem:
    """The operands, always the same."""
    alpha, numbers = _alphas(grouped)
    if grouped.contiguous:
        return _make_contiguous(grouped, alpha, numbers)
    groups: list[Problem | None] = []
    for i, (size, number) in enumerate(zip(grouped.sizes, numbers)):
        problem = None if 0 in size else gemm_problems.make(_case(grouped, i, size))
        groups.append(problem and replace(problem, alpha=number))
    return GroupedProblem(grouped, groups, alpha)


def padded(scale: torch.Tensor, edges: list[int], fmt) -> torch.Tensor:
    """Row-major scales of groups of rows, each group blocked by itself; NaN in padding rows."""
    atoms = [blocked_scales(scale[None, x:y], fmt) for x, y in pairwise(edges) if y > x]
    none = blocked_scales(scale[None, :1], fmt)
    return torch.cat([x.permute(5, 2, 4, 0, 1, 3).reshape(-1) for x in atoms or [none]])


def _make_contiguous(grouped: Grouped, alpha: float | torch.Tensor | None, numbers: list[float]) -> GroupedProblem:
    sizes, (_, n, k) = [m for m, _, _ in grouped.sizes], grouped.sizes[0]
    edges = [grouped.before]
    for m in sizes:
        edges.append(edges[-1] + m)
    total = edges[-1] + grouped.after
    whole = gemm_problems.make(_case(grouped, 0, (total, n, k)))
    a, stack = whole.a, gemm_problems.make(_case(grouped, 0, (1, n, k), batch=len(sizes))).b
    scale, weights = a.rowmajor_scale()[0], stack.rowmajor_scale()
    offsets = torch.tensor(edges, dtype=torch.int32, device=a.device) if grouped.offsets == "tensor" else edges
    rows = GroupedRows(a.data, padded(scale, edges, a.format), offsets, a.global_scale, a.format)
    groups: list[Problem | None] = []
    for e, (m, number) in enumerate(zip(sizes, numbers)):
        if not m:
            groups.append(None)
            continue
        part = slice(edges[e], edges[e + 1])
        left = BlockScaledTensor(a.data[part], scale[part], a.global_scale, a.format)
        right = BlockScaledTensor(stack.data[e], weights[e], stack.global_scale, stack.format)
        case = _case(replace(grouped, out="new"), e, (m, n, k))
        groups.append(Problem(case, left, right, number, None, None, None))
    out = whole.out if whole.out is not None else torch.empty((total, n), dtype=DTYPES[grouped.dtype], device=a.device)
    return GroupedProblem(grouped, groups, alpha, rows, stack, out, torch.zeros(1, dtype=torch.int32, device=a.device))


def random_grouped(generator: np.random.Generator, *, max_groups: int = 64, contiguous: bool | None = None) -> Grouped:
    """A random problem: 1 to 64 groups, a tenth of them empty, ragged sizes, any tiling and form."""
    g = generator
    count = int(g.integers(1, max_groups + 1))
    # keep the work about equal for any number of groups
    limit = max(8, int(900 / math.sqrt(count)))

    def size(largest: int) -> int:
        return int(g.integers(1, largest + 1))

    deal = bool(g.integers(3) == 0) if contiguous is None else contiguous
    pair, cluster, split_k = TILINGS[g.integers(len(TILINGS))]
    # enough steps for every CTA along K
    steps = 256 * (split_k - 1)
    n0, k0 = size(limit), steps + 32 * size(24)
    sizes = []
    for _ in range(count):
        m, n, k = size(limit), size(limit), steps + 32 * size(24)
        empty = g.integers(10)
        if deal:
            sizes.append((0 if empty == 0 else m, n0, k0))
        else:
            sizes.append((0 if empty == 0 else m, 0 if empty == 1 else n, k))
    if deal and not any(m for m, _, _ in sizes):
        sizes[0] = (1, n0, k0)
    formats = (("nvfp4", "nvfp4"),) * 3 + (("mxfp4", "mxfp4"), ("mxfp8", "mxfp8_e5m2"))
    a_format, b_format = formats[g.integers(len(formats))]
    dtype = str(g.choice(list(DTYPES)))
    return Grouped(
        tuple(sizes), deal, before=int(g.integers(3)) if deal else 0, after=int(g.integers(3)) if deal else 0,
        tile_n=int(g.choice((64, 128, 192, 256))), pair=pair, cluster=cluster, split_k=split_k,
        raster=str(g.choice(("m", "n"))), swap=bool(g.integers(2)),
        maps="workspace" if not deal and g.integers(3) == 0 else "", workers=int(g.choice((0, 1, 3, 10))),
        a_format=a_format, b_format=b_format, dtype=dtype,
        out="rows" if deal else str(g.choice(("new", "rows", "strided", "sliced"))),
        alphas=str(g.choice(("", "number", "one", "each"))), globals_=a_format == "nvfp4" and bool(g.integers(2)),
        offsets=str(g.choice(("tensor", "ints"))), exact=dtype == "float16", seed=int(g.integers(1000)),
    )  # fmt: skip
