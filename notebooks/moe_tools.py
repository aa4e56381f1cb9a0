"""Runs, counts and checks the layers of ``04_gated_and_grouped.ipynb``: SwiGLU, its gates, and a mixture of experts.

What is compared with is computed here in torch, in float32 or float64, from formulas and not by the library.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from cute_nvfp4 import (
    BlockScaledTensor,
    GroupedRows,
    quantize,
    sim,
    simulating,
    to_blocked,
)
from cute_nvfp4.planning import (
    rates,
)
from cute_nvfp4.planning.gemm import GemmProblem, choose, predict_plan
from cute_nvfp4.sim import Launch, Result
from cute_nvfp4.target import ARCHITECTURES

SM_100A = ARCHITECTURES["sm_100a"]
SIGNAL_ROWS = 128
"""Rows, and columns, of the products that ``gate_probe`` makes."""


# ---- running -------------------------------------------------------------------------------------------------------


@dataclass
class Launched:
    """Every launch that the simulator executed, with its counters."""

    launches: list[tuple[Launch, Result]]

    @property
    def count(self) -> int:
        return len(self.launches)

    @property
    def results(self) -> list[Result]:
        return [result for _, result in self.launches]

    @property
    def dram_read(self) -> int:
        """Bytes that the modelled L2, empty before each launch, fetched."""
        return sum(r.l2.read_bytes for r in self.results)

    @property
    def dram_written(self) -> int:
        return sum(r.l2.written_bytes + r.l2.dirty_bytes for r in self.results)

    @property
    def multiply_adds(self) -> int:
        return sum(x.multiply_adds for r in self.results for x in r.mma)

    @property
    def parameter_bytes(self) -> int:
        """Of the last launch's kernel."""
        return sum(map(len, self.launches[-1][0].params))


@contextlib.contextmanager
def launched(**options: Any) -> Iterator[Launched]:
    """Within it, launches are counted and kept; options: those of ``sim.run`` (trace, schedule, …)."""
    kept = Launched([])
    original = sim.run

    def run(program: sim.Program, one: Launch, memory: sim.GlobalMemory, **given: Any) -> Result:
        kept.launches.append((one, original(program, one, memory, **given)))
        return kept.results[-1]

    with simulating(counters=True, **options), mock.patch.object(sim, "run", run):
        yield kept


def bytes_of(*operands: BlockScaledTensor | torch.Tensor) -> int:
    """Bytes of data and of scales, padding of scales included."""
    tensors = [t for x in operands for t in ([x] if isinstance(x, torch.Tensor) else [x.data, x.scale])]
    return sum(t.numel() * t.element_size() for t in tensors)


def source(function: Any) -> str:
    """The code of a function or class without its docstring."""
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None
        if documented:
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1 : last] = [None] * (last - first + 1)
    return "\n".join(line for line in lines if line is not None)


def block(function: Any, first: str) -> str:
    """The statement of a function that starts with ``first``, with what is indented under it."""
    lines = source(function).splitlines()
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith(first))
    indent = len(lines[start]) - len(lines[start].lstrip())
    end = next((i for i in range(start + 1, len(lines)) if not lines[i].startswith(" " * (indent + 1))), len(lines))
    return "\n".join(line[indent:] for line in lines[start:end])


def said(call: Callable[[], Any]) -> str:
    """The type and the words of the error that ``call`` must raise."""
    try:
        call()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")


# ---- numbers -------------------------------------------------------------------------------------------------------


def relative(x: torch.Tensor, right: torch.Tensor) -> float:
    """Root of Σ(x − right)² / Σ right², in float64."""
    x, right = x.double(), right.double()
    return float((x - right).norm() / right.norm())


def decibels(x: torch.Tensor, right: torch.Tensor) -> float:
    """Signal to noise."""
    return -20 * math.log10(relative(x, right))


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x · gateᵀ) ∘ (x · upᵀ), in the dtype of x."""
    g = x @ gate.T
    return g * torch.sigmoid(g) * (x @ up.T)


GATES = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "gelu_erf": lambda x: x / 2 * torch.special.erfc(-x / math.sqrt(2)),
}
"""The gates that need an exponential, in float64. erfc does not cancel where 1 + erf would."""
GATE_BOUNDS = {"silu": (3e-7, 6e-7, 4e-6), "gelu_tanh": (5e-7, 7e-6, 2e-5), "gelu_erf": (5e-7, 4e-6, 2e-5)}
"""Relative errors that ``kernels/gemm/gates.py`` states: −2 < x, −8 < x ≤ −2, and below."""


def gate_probe() -> tuple[BlockScaledTensor, BlockScaledTensor, BlockScaledTensor, torch.Tensor]:
    """(a, b1, b2, x): operands for which A · B1ᵀ = x exactly, from −30 to 30, and A · B2ᵀ = 1.

    A row of A is (u, 0, … | 1, 0, …), one of B1 (1, 0, … | v, 0, …), so that x = u + v; of B2 (0, … | 1, 0, …).
    """
    a, b1, b2 = torch.zeros(3, SIGNAL_ROWS, 32)
    a[:, 0], a[:, 16] = torch.linspace(-28.5, 28.5, SIGNAL_ROWS), 1
    b1[:, 0], b1[:, 16] = 1, torch.linspace(-1.5, 1.5, SIGNAL_ROWS)
    b2[:, 16] = 1
    # with the largest number on 4, ones are exact
    operands = [quantize(x, rule="static_4", global_scale=1.0) for x in (a, b1, b2)]
    exact = [x.dequantize(torch.float64) for x in operands]
    assert torch.equal(exact[0] @ exact[2].T, torch.ones(SIGNAL_ROWS, SIGNAL_ROWS, dtype=torch.float64))
    return *operands, exact[0] @ exact[1].T


# ---- a mixture of experts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """Which experts each of T tokens goes to, and the same sorted by expert.

    weight, expert: (T, top); token: (T · top,) tokens in the order of their experts; factor: (T · top,) their weights;
    offsets: (experts + 1,) int32.
    """

    weight: torch.Tensor
    expert: torch.Tensor
    token: torch.Tensor
    factor: torch.Tensor
    offsets: torch.Tensor

    @property
    def counts(self) -> list[int]:
        return self.offsets.diff().tolist()


def route(logits: torch.Tensor, top: int) -> Routing:
    """The ``top`` experts of each token by softmax, their weights normalised to a sum of 1."""
    weight, expert = logits.softmax(-1).topk(top)
    weight = weight / weight.sum(-1, keepdim=True)
    order = expert.flatten().argsort(stable=True)
    # a tensor all along: on a GPU the host would not wait for it
    counts = torch.bincount(expert.flatten(), minlength=logits.shape[-1])
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    return Routing(weight, expert, order // top, weight.flatten()[order], offsets)


def rows_of(x: BlockScaledTensor, token: torch.Tensor) -> BlockScaledTensor:
    """Rows of a matrix with row-major scales, chosen and repeated: bytes are copied, nothing is rounded."""
    return BlockScaledTensor(x.data[token], x.scale[token], x.global_scale, x.format)


def matrix_of(stack: BlockScaledTensor, index: int) -> BlockScaledTensor:
    """One matrix of a stack, with the stack's global scale."""
    scale = to_blocked(stack.rowmajor_scale()[index].view(torch.uint8))
    return BlockScaledTensor(stack.data[index], scale, stack.global_scale, stack.format)


def list_of(rows: GroupedRows, stack: BlockScaledTensor) -> list[tuple]:
    """The contiguous form as a list of problems; None stands for a group without rows. Reads the offsets."""
    edges, problems, atom = rows.offsets.tolist(), [], 0
    for e, (start, end) in enumerate(itertools.pairwise(edges)):
        problems.append((rows.matrix(start, end, atom) if end > start else None, matrix_of(stack, e)))
        atom += -(-(end - start) // 128)
    return problems


def experts(
    x: torch.Tensor, r: Routing, gate_up: torch.Tensor, down: torch.Tensor, hidden: Callable | None = None
) -> torch.Tensor:
    """The mixture of experts of x (T, K) with weights (E, 2F, K) and (E, K, F), expert by expert, in the dtype of x.

    hidden: what is done to the (T · top, F) numbers between the products.
    """
    wide = down.shape[-1]
    rows = x[r.token]
    ends = list(itertools.pairwise(r.offsets.tolist()))
    h = torch.cat([swiglu(rows[s:e], *gate_up[i].split(wide)) for i, (s, e) in enumerate(ends)])
    h = h if hidden is None else hidden(h)
    y = torch.cat([h[s:e] @ down[i].T for i, (s, e) in enumerate(ends)])
    return combine(y, r)


def combine(y: torch.Tensor, r: Routing) -> torch.Tensor:
    """Σ over a token's experts of weight · y: (T · top, N) to (T, N)."""
    out = torch.zeros(r.expert.shape[0], y.shape[-1], dtype=y.dtype)
    return out.index_add_(0, r.token, y * r.factor[:, None].to(y.dtype))


def deal(config: Any, sizes: list[tuple[int, int, int]], workers: int) -> list[list[tuple[int, int, int]]]:
    """For each worker its (group, tile of the group, steps of K), in order: ``core.grouped_scheduler`` in Python.

    sizes: (m, n, k) of every group as the kernel has them.
    """
    cm, cn = config.cluster
    rows, columns = 128 * cm, config.tile_n * cn
    units = [
        (group, tile, -(-k // config.tile_k))
        for group, (m, n, k) in enumerate(sizes)
        for tile in range(-(-m // rows) * -(-n // columns))
    ]
    return [units[worker::workers] for worker in range(workers)]


# ---- modelled times of a B200, from the published figures in cute_nvfp4.planning.rates -------------------------------


def modelled(tokens: int, k: int, n: int, quantized: bool, products: int = 2) -> float:
    """µs of the GEMM, or gated GEMM, that the library chooses."""
    more = {"products": 2, "gate": "silu"} if products == 2 else {}
    problem = GemmProblem(tokens, n, k, out="nvfp4" if quantized else "float16", **more)
    return predict_plan(choose(problem, SM_100A, rates.SM_COUNT), problem, rates.SM_COUNT).us


def pass_us(read: float, written: float) -> float:
    """µs of a kernel that does nothing but read and write so many bytes: a launch and the best published rate."""
    return rates.LAUNCH_US + (read + written) / rates.BEST_BYTES_S * 1e6
