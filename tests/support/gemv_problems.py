"""Random GEMV problems, and the check of an output; the same for the simulator and for a GPU.

Data is of full range: every E2M1 code, every finite E4M3 code, including negative and subnormal scales. Memory is
exactly as large as the operand says, so that the simulator reports every byte read beyond.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from cute_nvfp4 import gemv
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.gemv import plan_for
from cute_nvfp4.planning.gemv import GemvPlan
from cute_nvfp4.reference import gemv_reference
from cute_nvfp4.scale_layout import to_blocked
from support import backends

TEN_SHAPES = (
    (128, 256, 1), (128, 1536, 1), (128, 3072, 1), (256, 7168, 1), (256, 7168, 1),
    (2432, 4608, 2), (384, 7168, 2), (512, 512, 2), (512, 4096, 2), (512, 1536, 2),
)  # fmt: skip
LAYOUTS = ("blocked", "flat", "rowmajor", "rowmajor strided")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# fp32 sums of scaled blocks: a few units in the last place of the sum of magnitudes
TOLERANCE = 2.0**-22


@dataclass(frozen=True)
class Case:
    """One problem.

    pitch: bytes between rows of A beyond K/2. alignment: of A's rows (8, 16 or 32, exactly).
    batch: 0 for operands without a batch dimension. repeat_a, repeat_b: batch stride 0.
    out: "" for a new tensor, else the memory layout of the caller's.
    cluster: CTAs of a cluster, with two clusters a matrix; 0: as planned. capacity: elements of b that a CTA then
        holds.
    """

    m: int
    k: int
    batch: int = 1
    a_layout: str = "blocked"
    b_layout: str = "blocked"
    a_global: float | None = None
    b_global: float | None = None
    alpha: float | None = None
    dtype: torch.dtype = torch.float32
    out: str = ""  # "" | "contiguous" | "strided" | "transposed"
    pitch: int = 0
    alignment: int = 32
    b_rows: int = 1
    repeat_a: bool = False
    repeat_b: bool = False
    seed: int = 0
    cluster: int = 0
    capacity: int = 1024

    def __str__(self) -> str:
        parts = [
            f"{self.m}x{self.k}x{self.batch}",
            self.a_layout,
            self.b_layout,
            str(self.dtype).removeprefix("torch."),
            *([f"cluster{self.cluster}"] if self.cluster else []),
        ]
        return "-".join(parts).replace(" ", "_")


@dataclass(frozen=True)
class Problem:
    """Operands of a case, and the caller's output or None."""

    case: Case
    a: BlockScaledTensor
    b: BlockScaledTensor
    out: torch.Tensor | None

    def run(self, backend: str = "") -> torch.Tensor:
        """The output of the kernel; the caller's output is NaN before."""
        options = {"alpha": self.case.alpha, "backend": backend or backends.backend(), "config": self.plan()}
        if self.out is not None:
            self.out.fill_(math.nan)
            c = gemv(self.a, self.b, out=self.out, **options)
            assert c is self.out
            return c
        return gemv(self.a, self.b, out_dtype=self.case.dtype, **options)

    def plan(self) -> GemvPlan | None:
        """A plan with two clusters for each matrix, if the case sets ``cluster``."""
        if not self.case.cluster:
            return None
        tiling = {"cluster": self.case.cluster, "tiles": 16, "warps_m": 8, "warps_k": 2, "chunked": True}
        out = torch.empty(self.a.data.shape[:-1], dtype=self.case.dtype, device=self.a.device)
        config = replace(plan_for(self.a, self.b, out).config, capacity=self.case.capacity, **tiling)
        return GemvPlan(config, 2 * self.case.cluster)


def exact_storage(num_bytes: int, alignment: int, device: str) -> torch.Tensor:
    """``num_bytes`` at an address that ``alignment`` divides and ``2 * alignment`` does not."""
    room = torch.zeros(num_bytes + 2 * alignment + 64, dtype=torch.uint8, device=device)
    start = -room.data_ptr() % (2 * alignment) + alignment
    return room[start : start + num_bytes]


def _data(
    generator: np.random.Generator, case: Case, rows: int, pitch: int, alignment: int, repeat: bool, device: str
) -> torch.Tensor:
    """Bytes (L, rows, K/2) or (rows, K/2) with rows ``K/2 + pitch`` apart; memory ends with the last row."""
    row = case.k // 2 + pitch
    matrices = 1 if repeat else max(case.batch, 1)
    size = ((matrices - 1) * rows + rows - 1) * row + case.k // 2
    flat = exact_storage(size, alignment, device)
    flat.copy_(torch.from_numpy(generator.integers(0, 256, size, dtype=np.uint8)))
    if case.batch == 0:
        return flat.as_strided((rows, case.k // 2), (row, 1), flat.storage_offset())
    shape = (case.batch, rows, case.k // 2)
    return flat.as_strided(shape, (0 if repeat else rows * row, row, 1), flat.storage_offset())


def _finite(codes: np.ndarray) -> np.ndarray:
    return np.where(codes & 0x7F == 0x7F, codes ^ 0x01, codes)


def _scale(
    generator: np.random.Generator, case: Case, rows: int, layout: str, repeat: bool, device: str
) -> torch.Tensor:
    columns = case.k // 16
    matrices = 1 if repeat and layout.startswith("rowmajor") else max(case.batch, 1)
    codes = _finite(generator.integers(0, 256, (matrices, rows, columns), dtype=np.uint8))
    if repeat:
        codes[1:] = codes[:1]
    scale = torch.from_numpy(codes)
    if layout in ("blocked", "flat"):
        blocked = poisoned_blocked(scale)
        storage = exact_storage(blocked.numel(), 16, device)
        storage.copy_(blocked.permute(5, 2, 4, 0, 1, 3).reshape(-1))
        return (
            storage
            if layout == "flat"
            else storage.as_strided(blocked.shape, blocked.stride(), storage.storage_offset())
        )
    # an odd pitch rules out loads of four scales
    row = columns + (3 if layout.endswith("strided") else 0)
    size = ((matrices - 1) * rows + rows - 1) * row + columns
    flat = exact_storage(size, 4, device)
    shape = (max(case.batch, 1), rows, columns)
    view = flat.as_strided(shape, (0 if repeat else rows * row, row, 1), flat.storage_offset())
    view[: len(scale)].copy_(scale)
    return view[0] if case.batch == 0 else view


def poisoned_blocked(scale: torch.Tensor) -> torch.Tensor:
    """Row-major scales in the blocked layout, with NaN in all padding."""
    padding = to_blocked(torch.ones_like(scale)) == 0
    return torch.where(padding, torch.tensor(0x7F, dtype=torch.uint8), to_blocked(scale))


def _output(case: Case, device: str) -> torch.Tensor | None:
    shape = (case.m,) if case.batch == 0 else (case.batch, case.m)
    if case.out == "":
        return None
    if case.out == "contiguous":
        return torch.empty(shape, dtype=case.dtype, device=device)
    if case.out == "transposed":
        return torch.empty(shape[::-1], dtype=case.dtype, device=device).permute(*range(len(shape))[::-1])
    return torch.empty((*shape, 3), dtype=case.dtype, device=device)[..., 1]


def make(case: Case, device: str | None = None) -> Problem:
    """The operands of ``case``, always the same, on the test's device or on ``device``."""
    device = device or str(backends.device())
    generator = np.random.default_rng([case.seed, case.m, case.k, case.batch])
    a_data = _data(generator, case, case.m, case.pitch, case.alignment, case.repeat_a, device)
    b_data = _data(generator, case, case.b_rows, 0, 32 if case.k % 64 == 0 else 8, case.repeat_b, device)
    a_scale = _scale(generator, case, case.m, case.a_layout, case.repeat_a, device)
    b_scale = _scale(generator, case, case.b_rows, case.b_layout, case.repeat_b, device)
    scales = [None if x is None else torch.tensor(x, device=device) for x in (case.a_global, case.b_global)]
    a = BlockScaledTensor(a_data, a_scale, scales[0])
    b = BlockScaledTensor(b_data, b_scale, scales[1])
    return Problem(case, a, b, _output(case, device))


def random_case(generator: np.random.Generator, max_m: int = 700, max_k: int = 5000) -> Case:
    """A random case; most are small, one in ten has a K beyond one chunk of shared memory."""

    def pick(*choices):
        return choices[generator.integers(len(choices))]

    # sizes of every magnitude
    m = int(min(max_m, 1 + generator.integers(0, 2 ** generator.integers(1, max_m.bit_length() + 1))))
    k = 16 * int(min(max_k // 16, 1 + generator.integers(0, 2 ** generator.integers(1, max_k.bit_length() - 3))))
    if generator.random() < 0.1:
        m, k = min(m, 40), 16384 + 16 * int(generator.integers(1, 1200))
    batch = int(pick(0, 1, 1, 2, 3, 4))
    alignment = int(pick(8, 16, 32))
    # pitch makes up for K, so that rows stay aligned
    pitch = -(k // 2) % alignment + alignment * int(pick(0, 0, 1, 5))
    dtype = pick(*DTYPES)
    # products reach 7e6: for 16-bit outputs, mostly scale them to about one
    alpha = pick(None, 1.0, -0.5, 3.7e-5) if dtype is torch.float32 else pick(2.0**-14, -(2.0**-17), 1e-4, 1e-6)
    return Case(
        m, k, batch, str(pick(*LAYOUTS)), str(pick(*LAYOUTS)),
        pick(None, None, 0.037, -1.5), pick(None, None, 2.5e-3),
        alpha, dtype, str(pick("", "contiguous", "strided", "transposed")), pitch, alignment,
        int(pick(1, 1, 128, 3)), bool(generator.random() < 0.15), bool(generator.random() < 0.15),
        int(generator.integers(1 << 30)),
    )  # fmt: skip


def random_cases(count: int, seed: int, **limits: int) -> list[Case]:
    generator = np.random.default_rng(seed)
    return [random_case(generator, **limits) for _ in range(count)]


def _magnitudes(x: BlockScaledTensor) -> BlockScaledTensor:
    scale = None if x.global_scale is None else x.global_scale.abs()
    return replace(
        x, data=x.data.view(torch.uint8) & 0x77, scale=x.rowmajor_scale().view(torch.uint8) & 0x7F, global_scale=scale
    )


def bounds(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest and highest right output in the output's dtype: the exact result ∓ the tolerance, rounded."""
    alpha = 1.0 if problem.case.alpha is None else problem.case.alpha
    a, b = problem.a, problem.b
    exact = gemv_reference(a, b, alpha=alpha, out_dtype=torch.float64)
    if not a.is_batched:
        a, b = (replace(x, data=x.data[None], scale=x.rowmajor_scale()) for x in (a, b))
    total = gemv_reference(_magnitudes(a), _magnitudes(b), alpha=abs(alpha), out_dtype=torch.float64)
    # results near fp32's smallest values lose bits
    error = TOLERANCE * total.reshape(exact.shape) + 2.0**-149
    return (exact - error).to(problem.case.dtype), (exact + error).to(problem.case.dtype)


def wrong(problem: Problem, c: torch.Tensor) -> torch.Tensor:
    """Which elements of the output are wrong."""
    low, high = (x.to(c.device) for x in bounds(problem))
    return ~((low <= c) & (c <= high))


def check(problem: Problem, c: torch.Tensor) -> None:
    """Raises AssertionError unless every element of ``c`` is right."""
    expected = (problem.case.m,) if problem.case.batch == 0 else (problem.case.batch, problem.case.m)
    assert c.shape == expected and c.dtype is problem.case.dtype
    bad = wrong(problem, c)
    if bad.any():
        low, high = bounds(problem)
        where = bad.nonzero()[:5].tolist()
        got = [(tuple(i), c[tuple(i)].item(), low[tuple(i)].item(), high[tuple(i)].item()) for i in where]
        raise AssertionError(f"{problem.case}: {int(bad.sum())} of {bad.numel()} wrong: (index, got, low, high) {got}")
