"""Helpers of ``03_gemm.ipynb``: they compile and run the GEMM, one plan at a time, on operands that suit a laptop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from IPython.display import Markdown, display

from cute_nvfp4 import BlockScaledTensor, gemm, simulating
from cute_nvfp4.errors import SimError
from cute_nvfp4.kernels.gemm import pipeline_graph as graph
from cute_nvfp4.kernels.gemm.config import GemmConfig
from cute_nvfp4.kernels.gemm.sm100.memory_plan import Tcgen05SharedPlan, pipelines
from cute_nvfp4.ops.gemm import KERNEL
from cute_nvfp4.planning.gemm import GemmProblem, Plan
from cute_nvfp4.reference import gemm_reference
from cute_nvfp4.runtime.compile import CompiledKernel
from cute_nvfp4.runtime.inspection import disassemble
from cute_nvfp4.scale_layout import to_blocked
from cute_nvfp4.sim import Result
from cute_nvfp4.sim.machine.layout import SHARED_BASE
from cute_nvfp4.target import ARCHITECTURES

ERROR_BOUND = 2.0**-10
_SMALL_TERMS = 2.0**-12
SM_100A = ARCHITECTURES["sm_100a"]


def table(header: list, rows: list[list]) -> None:
    """Shows a Markdown table; the first column is left-aligned."""
    lines = [header, ["---"] + ["--:"] * (len(header) - 1), *rows]
    display(Markdown("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)))


def operand(rows: int, k: int, seed: int, in_steps: bool = False) -> BlockScaledTensor:
    """An NVFP4 operand (rows, K) with every E2M1 code and every E4M3 scale from 0 to 448, scales blocked.

    in_steps: scales grow along the rows instead, which pictures show better.
    """
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 0x7F, (rows, k // 16), generator=generator, dtype=torch.uint8)
    if in_steps:
        row, block = torch.arange(rows)[:, None], torch.arange(k // 16)[None]
        scale = (0x20 + row // 8 % 48 + block % 4 * 3).to(torch.uint8)
    return BlockScaledTensor(data, to_blocked(scale))


@dataclass(frozen=True)
class Case:
    """C (M, N) = A (M, K) · B (N, K)ᵀ, its result in float64, and the sums of magnitudes."""

    a: BlockScaledTensor
    b: BlockScaledTensor
    expected: torch.Tensor
    magnitude: torch.Tensor

    @property
    def mnk(self) -> tuple[int, int, int]:
        return self.a.rows, self.b.rows, self.a.k


@functools.cache
def case(m: int, n: int, k: int, in_steps: bool = False) -> Case:
    """The case of these sizes, always with the same operands; in_steps: see ``operand``."""
    a, b = operand(m, k, 1, in_steps), operand(n, k, 2, in_steps)
    magnitudes = [x.dequantize(torch.float64).abs() for x in (a, b)]
    return Case(a, b, gemm_reference(a, b, out_dtype=torch.float64), magnitudes[0] @ magnitudes[1].T)


def plan_for(c: Case, workers: int, swap: bool = False, **tiling: Any) -> Plan:
    """A plan with this tiling (fields of ``GemmConfig``) on ``workers`` clusters. The output is float32: float16 would
    overflow with operands that use all of their range."""
    m, n, k = c.mnk
    return Plan(GemmProblem(m, n, k, out="float32").config(SM_100A, swap, **tiling), swap, workers)


@dataclass(frozen=True)
class Ran:
    """A finished run: its plan, its output and error, and the simulator's counters."""

    plan: Plan
    out: torch.Tensor
    error: float
    result: Result

    @property
    def config(self) -> GemmConfig:
        return self.plan.config

    @property
    def loaded(self) -> int:
        """Bytes that TMA requested from L2; a multicast requests once."""
        return sum(e.global_read for e in self.result.engines if e.engine == "tma")

    @property
    def brought(self) -> int:
        """Bytes that TMA's loads wrote to the shared memory of all CTAs."""
        return sum(e.shared_written for e in self.result.engines if e.engine == "tma" and e.global_read)

    @property
    def exchanged(self) -> int:
        """Bytes of partial sums that CTAs exchanged, through distributed shared memory or global memory."""
        sent = sum(e.shared_written for e in self.result.engines if e.instruction.startswith("st.async"))
        workspace = sum(x.bytes for x in self.result.memory if x.instruction.startswith("st.global"))
        return sent + workspace

    @property
    def multiply_adds(self) -> int:
        return sum(x.multiply_adds for x in self.result.mma)


def error_of(c: Case, out: torch.Tensor) -> float:
    """The largest |out - exact| relative to |exact|, or to a 4096th of the sum of magnitudes where terms cancel."""
    scale = c.expected.abs() + _SMALL_TERMS * c.magnitude
    return float(((out.double() - c.expected).abs() / scale).max())


def simulate(c: Case, plan: Plan, kernel: CompiledKernel | None = None, **options: Any) -> Ran:
    """Runs ``gemm`` on ``c`` with ``plan``, into an output poisoned with NaN; raises unless the result is right.

    kernel: code to run instead of what ``gemm`` compiles. options: those of ``simulating`` (trace, counters, schedule,
    checks).
    """
    m, n, _ = c.mnk
    out = torch.full((m, n), torch.nan, dtype=getattr(torch, plan.config.out))
    with simulating(
        SM_100A.name, kernel=(lambda own: own) if kernel is None else (lambda own: kernel), **options
    ) as runs:
        gemm(c.a, c.b, out=out, config=plan)
    error = error_of(c, out)
    if not error <= ERROR_BOUND:  # this form also rejects NaN, which unwritten elements have
        raise AssertionError(f"{plan}: error {error:.1e}")
    (only,) = runs
    return Ran(plan, out, error, only.result)


# ---- the compiled code ---------------------------------------------------------------------------------------------

_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_BACK = re.compile(r"\bBRA.*`\((\.L_x_\d+)\)")


def mma_loop(kernel: CompiledKernel) -> list[str]:
    """The instructions of the shortest loop of the SASS that issues MMAs, branch included."""
    lines = disassemble(kernel.cubin).splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := _LABEL.match(line))}
    loops = []
    for i, line in enumerate(lines):
        back = _BACK.search(line)
        if back and labels[back[1]] < i:
            body = [found[1] for x in lines[labels[back[1]] : i + 1] if (found := _SASS.match(x))]
            if any(opcode(x) in MMA_OPCODES for x in body):
                loops.append(body)
    return min(loops, key=len)


MMA_OPCODES = ("UTCOMMA", "UTCQMMA")


def opcode(instruction: str) -> str:
    """The opcode: ``UTCOMMA`` for ``@P0 UTCOMMA.4X gdesc[UR4], …``."""
    return next(word for word in instruction.split() if not word.startswith("@")).split(".")[0]


def reading_of(loop: list[str]) -> list[tuple[str, list[str]]]:
    """What the instructions of a loop do: (purpose, opcodes)."""
    groups: dict[str, list[str]] = {purpose: [] for purpose in PURPOSES} | {"addresses, counters, branches": []}
    for instruction in loop:
        name = opcode(instruction)
        purpose = next((p for p, opcodes in PURPOSES.items() if name in opcodes), "addresses, counters, branches")
        groups[purpose].append(name)
    return list(groups.items())


PURPOSES = {
    "multiplies": MMA_OPCODES,
    "scales to tensor memory": ("UTCCP",),
    "commits": ("UTCBAR",),
    "waits for a stage": ("SYNCS",),
}


# ---- mistakes ------------------------------------------------------------------------------------------------------


def with_mistake(config: GemmConfig, edge: str, which: str, **changed: Any) -> CompiledKernel:
    """Compiles the kernel of ``config`` with a wrong count on one barrier of the graph. which: "full" or "empty";
    changed: fields of its ``Arrivals``."""
    right = graph.pipeline_graph

    def wrong(c: GemmConfig, rings: graph.Rings) -> tuple[graph.Edge, ...]:
        return tuple(
            dataclasses.replace(e, **{which: dataclasses.replace(getattr(e, which), **changed)})
            if e.name == edge
            else e
            for e in right(c, rings)
        )

    with contextlib.ExitStack() as patches:
        for module in [m for name, m in sys.modules.items() if name.startswith("cute_nvfp4.kernels")]:
            if getattr(module, "pipeline_graph", None) is right:
                patches.enter_context(mock.patch.object(module, "pipeline_graph", wrong))
        return KERNEL.build(config)  # uses no cache


def arrivals(count: int, what: str) -> tuple[tuple[str, int], ...]:
    """The ``terms`` of ``Arrivals`` with this count."""
    return ((what, count),)


def outcomes(c: Case, plan: Plan, kernel: CompiledKernel | None, schedules: list, **options: Any) -> Counter:
    """How often a kernel is right, wrong, or stopped by which hazard, over schedules."""
    found: Counter = Counter()
    for schedule in schedules:
        try:
            simulate(c, plan, kernel, schedule=schedule, **options)
            found["right"] += 1
        except SimError as error:
            found[type(error).__name__] += 1
        except AssertionError:
            found["wrong"] += 1
    return found


def caught(call: Callable[[], Any]) -> SimError:
    """The hazard that ``call`` raises; raises AssertionError if it raises none."""
    try:
        call()
    except SimError as error:
        return error
    raise AssertionError("no hazard was reported")


def first_hazard(c: Case, plan: Plan, kernel: CompiledKernel, schedules: list) -> SimError:
    """The hazard of the first schedule that reports one."""
    for schedule in schedules:
        try:
            simulate(c, plan, kernel, schedule=schedule)
        except SimError as error:
            return error
    raise AssertionError("no hazard was reported")


def barrier_name(config: GemmConfig, address: int) -> str:
    """The barrier's name for a shared address, such as ``operands.empty[1]``; the barriers are the last part of the
    plan."""
    plan = Tcgen05SharedPlan(config)
    first = SHARED_BASE + plan.stages * plan.stage.bytes + plan.staged_output + plan.partials
    index = (address - first) // 8
    for edge in pipelines(config):
        for which in ("full", "empty"):
            if index < edge.stages:
                return f"{edge.name}.{which}[{index}]"
            index -= edge.stages
    raise ValueError(f"no barrier at {address:#x}")


def tell(error: SimError, config: GemmConfig, lines: int = 12) -> None:
    """Prints the first lines of a hazard, with barriers by name, without the kernel's mangled name."""
    text = re.sub(r"kernel_cutlass_\w+", "gemm", str(error))
    text = re.sub(r"mbarrier at shared address (0x[0-9a-f]+)", lambda m: barrier_name(config, int(m[1], 16)), text)
    print(type(error).__name__)
    told = text.splitlines()
    for line in told[:lines]:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        print(textwrap.fill(line.strip(), 116, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False))
    if len(told) > lines:
        print(f"  and {len(told) - lines} lines more")
