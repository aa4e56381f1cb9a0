"""Compiles, runs, checks and counts the rungs of the GEMV ladder, the final kernel included.

The same code serves the notebook, the tests and ``benchmarks/gemv_ladder.py``.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import cells
import torch

from cute_nvfp4 import gemv, simulating
from cute_nvfp4.errors import OperandError, explain
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.gemv import plan_for
from cute_nvfp4.reference import gemv_reference
from cute_nvfp4.runtime.backend import resolve
from cute_nvfp4.runtime.inspection import inspect_cubin
from cute_nvfp4.runtime.kernel import Kernel
from cute_nvfp4.runtime.signature import INT32, Pointer, Scalar
from cute_nvfp4.runtime.simulating import SimulatedLaunch
from cute_nvfp4.scale_layout import to_blocked
from cute_nvfp4.sim import MemoryCounter, Result
from cute_nvfp4.target import Architecture, architecture

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
FINAL = ("f", "the final kernel")

# Figures for the modelled bounds. H200 SXM datasheet: 4.8 TB/s, boost 1.98 GHz. Hopper tuning guide: four schedulers a
# multiprocessor, each issues one warp instruction a clock; L1 serves 128 bytes (four sectors) a clock.
DRAM_BYTES_S = 4.8e12
CLOCK_HZ = 1.98e9
SM_COUNT = 132
SM_ISSUES, SM_SECTORS = 4, 4


@dataclass(frozen=True)
class Case:
    """One problem, c (L, M) = A (L, M, K) · b (L, 1, K), its scales in both layouts.

    expected: exact, in float64; magnitude: the sum of |a·b|, which rounding errors are measured against.
    """

    a: dict[str, BlockScaledTensor]
    b: dict[str, BlockScaledTensor]
    expected: torch.Tensor
    magnitude: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, K, L)."""
        a = self.a["blocked"]
        return a.rows, a.k, a.batch

    @property
    def useful_bytes(self) -> int:
        """Bytes that any kernel must move: A, b and their scales once, c once."""
        m, k, batch = self.shape
        return batch * ((m + 1) * (k // 2 + k // 16) + 4 * m)

    @property
    def elements(self) -> int:
        """Elements of A."""
        m, k, batch = self.shape
        return m * k * batch


def make_case(m: int, k: int, batch: int = 1, *, seed: int = 0, device: str = "cpu", nan: bool = False) -> Case:
    """Random data over all E2M1 codes and all finite E4M3 scales, including negative ones and zeros.

    nan: whether to scatter some NaN scales, too.
    """
    generator = torch.Generator().manual_seed(seed)

    def operand(rows: int) -> dict[str, BlockScaledTensor]:
        data = torch.randint(0, 256, (batch, rows, k // 2), generator=generator, dtype=torch.uint8)
        scale = torch.randint(0, 256, (batch, rows, k // 16), generator=generator, dtype=torch.uint8)
        scale[(scale & 0x7F) == 0x7F] = 0x38  # NaN becomes 1
        if nan:
            scale[:, 3::37, -1] = 0x7F
        data, scale = data.to(device), scale.to(device)
        return {
            "rowmajor": BlockScaledTensor(data, scale.view(torch.float8_e4m3fn)),
            "blocked": BlockScaledTensor(data, to_blocked(scale).view(torch.float8_e4m3fn)),
        }

    a, b = operand(m), operand(1)
    exact = gemv_reference(a["rowmajor"], b["rowmajor"], out_dtype=torch.float64)
    absolute = [
        BlockScaledTensor(x["rowmajor"].data & 0x77, x["rowmajor"].scale.view(torch.uint8) & 0x7F) for x in (a, b)
    ]
    return Case(a, b, exact, gemv_reference(*absolute, out_dtype=torch.float64))


def check(case: Case, out: torch.Tensor) -> float:
    """The largest error of ``out`` (fp32) over the sum of magnitudes. Raises AssertionError if fp32 sums cannot explain
    it.

    Products and the sums of blocks are exact. Only the fp32 sum over K/16 blocks rounds, and none of the ladder's
    orders of summation is worse than K/16 steps of half a unit in the last place.
    """
    bound = case.shape[1] // 16 * 2.0**-24
    wanted, nan = case.expected, torch.isnan(case.expected)
    if not torch.equal(torch.isnan(out), nan):
        raise AssertionError("NaN in other places than the reference has them (or never written)")
    error = ((out.double() - wanted).abs() / case.magnitude)[~nan]
    worst = float(error.max())
    if worst > bound:
        bad = int((error > bound).sum())
        raise AssertionError(f"{bad} of {out.numel()} results are wrong: error {worst:.2e} of the sum of magnitudes")
    return worst


class RungArguments(NamedTuple):
    """The arguments of every rung: c (L, M) = A (L, M, K) · b (L, 1, K)."""

    a: Pointer = Pointer("Uint8", 16)
    sfa: Pointer = Pointer("Uint8", 16)
    b: Pointer = Pointer("Uint8", 16)
    sfb: Pointer = Pointer("Uint8", 16)
    c: Pointer = Pointer("Float32", 4)
    m: Scalar = INT32
    batch: Scalar = INT32


@dataclass(frozen=True)
class RungConfig:
    """Everything that the compiled code depends on, including the text of the rung's module."""

    arch: Architecture
    k: int
    rung: type = field(repr=False)
    source: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.rung.__name__)


KERNEL = Kernel("ladder", RungArguments, lambda config: config.rung(config.arch, config.k))


def source_of(rung: type) -> str:
    """A digest of the file that the rung is compiled from."""
    return hashlib.sha256(Path(sys.modules[rung.__module__].__file__).read_bytes()).hexdigest()


@dataclass(frozen=True)
class Ran:
    """A simulated rung: its output (L, M) fp32, and its launch with the kernel and the counters."""

    out: torch.Tensor
    launch: SimulatedLaunch


def runs_on(rung: type | None, arch: Architecture) -> bool:
    """Whether ``rung`` (None: the final kernel) is a step up on ``arch``."""
    return rung is None or arch.vector_bytes <= rung.widest_loads


def prepare(rung: type | None, case: Case, arch: Architecture, sms: int | None = None) -> tuple[Callable, torch.Tensor]:
    """(a call that launches ``rung`` on ``case``, its output, poisoned with NaN).

    sms: multiprocessors that the final kernel spreads its work over (default: those of the device).
    """
    m, k, batch = case.shape
    layout = "blocked" if rung is None else rung.scales
    a, b = case.a[layout], case.b[layout]
    out = torch.full((batch, m), float("nan"), device=a.device)
    if rung is None:
        plan = plan_for(a, b, out, sms=sms)
        return lambda: gemv(a, b, out=out, config=plan), out
    if m % 128 or k % 1024:
        raise OperandError(explain("M, K of a rung", got=(m, k), expected="multiples of 128 and 1024"))
    config = RungConfig(arch, k, rung, source_of(rung))
    tensors = {"a": a.data, "sfa": a.scale, "b": b.data, "sfb": b.scale, "c": out}
    arguments = RungArguments(*(x.data_ptr() for x in tensors.values()), m, batch)
    touched = {name: (tensor, tensor is out) for name, tensor in tensors.items()}
    target = resolve("auto", a.device)
    return lambda: KERNEL.run(config, target, a.device, arguments, lambda: touched), out


def simulate(rung: type | None, case: Case, arch: str, sms: int | None = None, **options: Any) -> Ran:
    """Runs ``rung`` in the simulator, which counts every access to memory."""
    with simulating(arch, counters=True, **options) as runs:
        call, out = prepare(rung, case, architecture(arch), sms)
        call()
    return Ran(out, *runs)


@dataclass(frozen=True)
class Figures:
    """What the simulator counted in one run, and what the cubin shows. Nothing here is measured on a GPU.

    instructions: PTX instructions issued by warps, without moves between registers, since the assembler renames
    registers and keeps few of them; requests: loads (and copies) of global memory by warps; sectors: the 32-byte
    sectors they touch, request by request; distinct_bytes: of all sectors touched, each counted once, which is what
    DRAM must give or take at least; sass: instructions of the compiled code, each counted once.
    """

    elements: int
    useful_bytes: int
    instructions: int
    requests: int
    sectors: int
    distinct_bytes: int
    registers: int
    spills: int
    sass: int

    @property
    def instructions_per_element(self) -> float:
        """Instructions of a thread for each element of A (a warp's instruction counts for each of its 32 threads)."""
        return 32 * self.instructions / self.elements

    @property
    def sectors_per_request(self) -> float:
        return self.sectors / self.requests

    @property
    def sector_use(self) -> float:
        """Useful bytes / bytes of the sectors that loads touch: 1 if every sector is requested once and used whole."""
        return self.useful_bytes / (32 * self.sectors)

    def bounds_us(self, elements: int) -> dict[str, float]:
        """Modelled lower bounds on an H200, in µs, for a problem of ``elements`` with these figures for each element.

        dram: distinct bytes at 4.8 TB/s; l1: sectors at four a clock and multiprocessor; issue: instructions at four a
        clock and multiprocessor. PTX instructions: the assembler merges some and adds others. No measurement.
        """
        times = elements / self.elements
        clocks = SM_COUNT * CLOCK_HZ
        return {
            "dram": 1e6 * times * self.distinct_bytes / DRAM_BYTES_S,
            "l1": 1e6 * times * self.sectors / (SM_SECTORS * clocks),
            "issue": 1e6 * times * self.instructions / (SM_ISSUES * clocks),
        }


def figures(run: Ran, case: Case) -> Figures:
    """Combines the simulator's counters with what inspection finds in the cubin."""
    result, kernel = run.launch.result, run.launch.kernel
    report = inspect_cubin(kernel.cubin, kernel.ptx).kernel
    loads = global_loads(result)
    return Figures(
        elements=case.elements,
        useful_bytes=case.useful_bytes,
        instructions=result.instructions - result.classes.get("move", 0),
        requests=sum(x.requests for x in loads),
        sectors=sum(x.sectors for x in loads),
        distinct_bytes=sum(result.distinct_bytes.values()),
        registers=report.registers,
        spills=report.spill_loads + report.spill_stores,
        sass=report.instructions,
    )


def global_loads(result: Result) -> list[MemoryCounter]:
    """Counters of the instructions that read global memory, copies to shared memory included."""
    return [x for x in result.memory if x.space == "global" and x.kind == "load"]


def ladder(arch: Architecture) -> list[tuple[str, str, type | None]]:
    """(letter, title, class) of the rungs for ``arch``, the final kernel (None) last."""
    rungs = [x for x in vars(cells.module("01_gemv.ipynb", "gemv_ladder")).values() if getattr(x, "letter", "")]
    return [*((r.letter, r.title, r) for r in rungs if runs_on(r, arch)), (*FINAL, None)]
