"""The problem of a GEMM, the limits of all kernels, and the plan that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import OperandTypeError, explain
from ..formats import FORMATS
from ..kernels.gemm.config import OUT_BYTES, QUANTIZED, UNPACKED_K, GemmConfig, GemmSignature
from ..kernels.gemm.limits import refused_formats
from ..target import Architecture
from .gemm_model import Minimum

K_MULTIPLE = 32
INT32_MAX = 2**31 - 1
MAX_STRIDE = (1 << 40) - 16
"""Largest stride of a tensor map, in bytes (CUDA driver API, cuTensorMapEncodeTiled)."""
_SMALLEST_TILE = 128 * 64


@dataclass(frozen=True)
class GemmProblem(GemmSignature):
    """The facts that decide the choice: C (L, M, N) = A (L, M, K) · B (L, N, K)ᵀ, and its signature."""

    m: int
    n: int
    k: int
    batch: int = 1

    def kernel_mn(self, swap: bool) -> tuple[int, int]:
        """M and N as the kernel sees them."""
        return (self.n, self.m) if swap else (self.m, self.n)

    @property
    def minimum(self) -> Minimum:
        """What any kernel must move and compute for it."""
        a, b = (1 / fmt.elements_per_byte + 1 / fmt.block for fmt in self.formats)
        operands = self.m * self.k * a + self.products * self.n * self.k * b
        num_bytes = self.batch * (operands + self.m * self.n * OUT_BYTES[self.out])
        return Minimum(num_bytes, 2.0 * self.batch * self.products * self.m * self.n * self.k)

    def config(self, arch: Architecture, swap: bool, **tiling: Any) -> GemmConfig:
        """The configuration with this tiling. TMA stores wherever it can, except on sm_120a.

        swap: whether the kernel computes Cᵀ = B · Aᵀ.
        """
        signature = self.signature(swap)
        by_tma = arch.generation != "sm120" and self.vector and signature["out_major"] == "n" and self.out != QUANTIZED
        tiling = {"store": "tma" if by_tma else "direct", **tiling}
        return GemmConfig(arch=arch, shared="b" if swap and self.products == 2 else "a", **signature, **tiling)


@dataclass(frozen=True)
class Plan:
    """A way to run a problem. config: of the kernel. swap: whether the kernel's A is the problem's B. workers: the
    clusters to launch."""

    config: GemmConfig
    swap: bool
    workers: int

    def __str__(self) -> str:
        return f"{self.config}{' swap' if self.swap else ''} on {self.workers} clusters"


def plan_tiling(plan: Plan) -> dict[str, Any]:
    """The part of a configuration that a caller's plan decides; the problem decides the rest.

    Raises:
        OperandTypeError: it is not a plan.
    """
    if not isinstance(plan, Plan):
        raise OperandTypeError.of("config", got=type(plan).__name__, expected="a Plan of planning.gemm")
    return plan.config.tiling


def can_distribute(plan: Plan, k: int) -> str:
    """Why the work cannot be distributed as ``plan`` says, or an empty string."""
    k_tiles = -(-k // plan.config.tile_k)
    if plan.config.split_k > k_tiles:
        return explain("split_k", got=plan.config.split_k, expected=f"at most {k_tiles}, the k-tiles of K = {k}")
    return explain("workers", got=plan.workers, expected="at least 1") if plan.workers < 1 else ""


def can_count(plan: Plan, problem: GemmProblem) -> str:
    """Why the k-tiles of ``plan`` do not fit 32 bits, or an empty string.

    Only a caller chooses tiles below 64 columns for a large problem; ``can_run`` does not count so many.
    """
    (m, n), c = problem.kernel_mn(plan.swap), plan.config
    work = -(-m // c.tile_m) * -(-n // c.tile_n) * problem.batch * -(-problem.k // c.tile_k)
    return explain(f"k-tiles of {c}", got=work, expected=f"at most {INT32_MAX}") if work > INT32_MAX else ""


def can_run(problem: GemmProblem) -> str:
    """Why no configuration can run ``problem`` (which limit, by how much), or an empty string."""
    p = problem
    sizes = {"M": p.m, "N": p.n, "K": p.k, "batch": p.batch}
    for name, size in sizes.items():
        if size < 1:
            return explain(name, got=size, expected="at least 1")
        if size > INT32_MAX:
            return explain(name, got=size, expected=f"at most {INT32_MAX}: {size - INT32_MAX} too many")
    for name, fmt in (("a_format", p.a_format), ("b_format", p.b_format)):
        if fmt not in FORMATS:
            return explain(name, got=fmt, expected=f"one of {', '.join(FORMATS)}")
    if reason := refused_formats(p.a_format, p.b_format):
        return reason
    multiple = UNPACKED_K if any(p.unpacked) else K_MULTIPLE
    if p.k % multiple:
        return explain("K", got=p.k, expected=f"a multiple of {multiple}: {p.k % multiple} too many")
    for name, rows, fmt in zip("AB", (p.m, p.n), p.formats):
        matrix = rows * p.k // fmt.elements_per_byte
        if matrix > MAX_STRIDE:
            return explain(f"bytes of one matrix of {name}", got=matrix, expected=f"at most {MAX_STRIDE}")
    if p.m * p.n > INT32_MAX * 16:
        return explain("elements of one output", got=p.m * p.n, expected=f"at most {INT32_MAX * 16}")
    k_tiles = -(-p.k // p.kind.tile_k)
    work = -(-p.m * p.n // _SMALLEST_TILE) * p.batch * k_tiles
    if work > INT32_MAX:
        return explain(
            "output tiles times k-tiles", got=work, expected=f"at most {INT32_MAX}: {work - INT32_MAX} too many"
        )
    return ""
