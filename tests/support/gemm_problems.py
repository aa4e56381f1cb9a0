"""Random GEMM problems, and the check of an output; the same for the simulator and for a GPU.

Data is of full range: every E2M1 code, every finite code of E4M3 and E5M2, scales over the range that fp32 sums bear
(those of NVFP4 not negative, as block-scaled MMAs read them). With "exact" data, sums have so few bits that any order
of summation gives the same, exact result. Outputs start as NaN, among elements that must not change. Memory is exactly
as large as the operand says, so that the simulator reports every byte read beyond.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from cute_nvfp4 import gemm
from cute_nvfp4.formats import FORMATS, Format
from cute_nvfp4.kernels.gemm.arguments import data_alignment
from cute_nvfp4.kernels.gemm.config import UNPACKED_K, GemmConfig, kind_of
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.planning.gemm_problem import Plan
from cute_nvfp4.reference import gemm_reference
from cute_nvfp4.runtime.backend import resolve
from cute_nvfp4.scale_layout import to_blocked
from support import backends
from support.gemv_problems import exact_storage

FORMAT_PAIRS = (
    ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8"),
    ("mxfp8", "mxfp8_e5m2"), ("mxfp8_e5m2", "mxfp8"), ("mxfp8_e5m2", "mxfp8_e5m2"),
    ("mxfp8", "mxfp4"), ("mxfp8_e5m2", "mxfp4"), ("mxfp4", "mxfp8"), ("mxfp4", "mxfp8_e5m2"),
)  # fmt: skip
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
OUTPUTS = ("new", "rows", "strided", "sliced", "columns", "strided columns", "sliced columns")
"""The caller's output: none; contiguous; rows (or columns) with room between them, aligned or not to 16 bytes."""
GUARD = 12345.0
"""The value around an output, which must stay."""
TOLERANCE, CANCELLED = 2.0**-10, 2.0**-12
"""Relative error of a sum, and the least fraction of the sum of magnitudes that it is relative to."""
FINISH_TOLERANCE = 2.0**-21
"""Relative error of the later steps in fp32: alpha, two global scales, bias."""
_UE8M0 = 117, 138
"""Range of random scale codes: 2⁻¹⁰ to 2¹⁰."""


@dataclass(frozen=True)
class Case:
    """One problem and the plan to run it with; ``str`` and ``parse`` convert it to text and back.

    batch 0: operands without a batch dimension. workers 0: planning chooses. pitch: bytes between rows of the operands
    beyond K's. repeat_a, repeat_b: batch stride 0. alpha_tensor: alpha in memory. bias: "" | "n" | "batch".
    """

    m: int = 200
    n: int = 136
    k: int = 544
    batch: int = 1
    a_format: str = "nvfp4"
    b_format: str = "nvfp4"
    tile_n: int = 128
    pair: bool = False
    cluster_m: int = 1
    cluster_n: int = 1
    split_k: int = 1
    stages: int = 0
    acc_stages: int = 0
    scheduler: str = "static"
    raster: str = "m"
    store: str = "tma"
    swap: bool = False
    workers: int = 2
    dtype: str = "float32"
    out: str = "rows"
    alpha: float | None = None
    alpha_tensor: bool = False
    a_global: float | None = None
    b_global: float | None = None
    bias: str = ""
    bias_dtype: str = "float32"
    pitch: int = 0
    repeat_a: bool = False
    repeat_b: bool = False
    exact: bool = False
    seed: int = 0

    def __str__(self) -> str:
        """The fields that differ from the defaults: ``m=3,k=64,out=sliced``."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(f"{name}={value}" for name, value in changed)

    @staticmethod
    def parse(text: str) -> Case:
        values: dict[str, object] = {}
        types = {f.name: str(f.type).split(" ")[0] for f in fields(Case)}
        convert = {"int": int, "str": str, "bool": lambda x: x == "True", "float": float}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            values[name] = convert[types[name]](value)
        return Case(**values)  # type: ignore[arg-type]

    def plan(self) -> Plan | None:
        """The plan, whose other fields follow from the problem. None on sm_90a, which has other kernels."""
        if not self.workers or resolve(backends.backend(), backends.device()).arch.generation == "sm90":
            return None
        return Plan(self.tiling(), self.swap, self.workers)

    def tiling(self) -> GemmConfig:
        """The structure of the tcgen05 kernel."""
        return GemmConfig(
            tile_n=self.tile_n, pair=self.pair, cluster=(self.cluster_m, self.cluster_n), split_k=self.split_k,
            stages=self.stages, acc_stages=self.acc_stages, scheduler=self.scheduler, raster=self.raster,
            store=self.store,
        )  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """Operands of a case, and the caller's output with the memory around it, or None."""

    case: Case
    a: BlockScaledTensor
    b: BlockScaledTensor
    alpha: float | torch.Tensor | None
    bias: torch.Tensor | None
    out: torch.Tensor | None
    room: torch.Tensor | None

    @functools.cached_property
    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(result, its tolerance before it is rounded), float64."""
        alpha = 1.0 if self.alpha is None else float(self.alpha)
        product = gemm_reference(self.a, self.b, alpha=alpha, out_dtype=torch.float64)
        bias = 0.0 if self.bias is None else self.bias.double().unsqueeze(-2)
        result = product + bias
        if self.case.exact:
            return result, torch.zeros_like(result)
        sizes = _magnitudes(self.a), _magnitudes(self.b)
        total = gemm_reference(*sizes, alpha=abs(alpha), out_dtype=torch.float64)
        error = TOLERANCE * (product.abs() + CANCELLED * total) + FINISH_TOLERANCE * (product.abs() + abs(bias))
        return result, error + 2.0**-149

    @functools.cached_property
    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest and highest right output, in the output's dtype."""
        result, error = self.expected
        low, high = (rounded(x, DTYPES[self.case.dtype]) for x in (result - error, result + error))
        return low, high

    def run(self, backend: str = "") -> torch.Tensor:
        """The output of the kernel; the output and all scratch memory are NaN before."""
        options = {
            "alpha": self.alpha,
            "bias": self.bias,
            "config": None if backend == "reference" else self.case.plan(),
            "backend": backend or backends.backend(),
        }
        with poisoned_memory():
            if self.out is None:
                return gemm(self.a, self.b, out_dtype=DTYPES[self.case.dtype], **options)
            self.room.fill_(GUARD)
            self.out.fill_(math.nan)
            c = gemm(self.a, self.b, out=self.out, **options)
        assert c is self.out
        return c

    def untouched(self) -> bool:
        """Whether everything around the output is unchanged."""
        if self.room is None:
            return True
        inside = torch.zeros(self.room.shape, dtype=torch.bool, device=self.room.device)
        inside.as_strided(self.out.shape, self.out.stride(), self.out.storage_offset()).fill_(True)
        return bool((self.room[~inside] == GUARD).all())


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within this block ``torch.empty`` returns NaNs."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# --- data


def _elements(generator: np.random.Generator, fmt: Format, shape: tuple[int, ...], exact: bool) -> np.ndarray:
    """Bytes of data: any finite codes; "exact" ones are small integers or halves."""
    if exact and fmt.element == "e2m1":
        return generator.integers(0, 256, shape, dtype=np.uint8)
    if exact:
        # 0, ±1, ±1.5, ±2, ±3
        values = [0x00, 0x38, 0x3C, 0x40, 0x44] if fmt.element == "e4m3" else [0x00, 0x3C, 0x3E, 0x40, 0x42]
        signs = generator.integers(0, 2, shape, dtype=np.uint8) << 7
        return np.array(values, np.uint8)[generator.integers(0, 5, shape)] | signs
    codes = generator.integers(0, 256, shape, dtype=np.uint8)
    if fmt.element == "e4m3":
        return np.where(codes & 0x7F == 0x7F, codes ^ 0x01, codes)
    if fmt.element == "e5m2":
        return np.where(codes & 0x7C == 0x7C, codes ^ 0x04, codes)
    return codes


def _scales(generator: np.random.Generator, fmt: Format, shape: tuple[int, ...], exact: bool) -> np.ndarray:
    if fmt.scale == "e4m3":
        # scales 1, 2 and 4, or all scales
        return generator.choice(np.array([0x38, 0x40, 0x48], np.uint8), shape) if exact else \
            generator.integers(0, 0x7F, shape, dtype=np.uint8)  # fmt: skip
    low, high = (127, 130) if exact else _UE8M0
    return generator.integers(low, high, shape, dtype=np.uint8)


def blocked_scales(scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Row-major scales (L, rows, columns) in the blocked layout: NaN in padding rows, the largest finite value in
    padding columns (K ends there, so that those scales multiply zeros)."""
    nan, large = (0x7F, 0x7E) if fmt.scale == "e4m3" else (0xFF, 0x8A)
    batch, rows, columns = scale.shape
    shape = (batch, -(-rows // 128) * 128, -(-columns // 4) * 4)
    full = torch.full(shape, nan, dtype=torch.uint8, device=scale.device)
    full[:, :rows, columns:] = large
    full[:, :rows, :columns] = scale
    return to_blocked(full)


def k_multiple(a_format: str, b_format: str) -> int:
    """What K must be a multiple of."""
    return UNPACKED_K if unpacked(a_format, b_format) else 32


def unpacked(*formats: str) -> set[str]:
    """The formats among these whose elements TMA unpacks."""
    kind = kind_of(*formats)
    return {name for name in formats if kind and kind.unpacks(name)}


def _operand(
    generator: np.random.Generator, case: Case, rows: int, fmt: Format, repeat: bool, value: float | None, device: str
) -> BlockScaledTensor:
    """An operand (L, rows, K) or (rows, K). Rows are ``pitch`` bytes apart, rounded up to their alignment; memory ends
    with the last row."""
    width, batch = fmt.data_columns(case.k), max(case.batch, 1)
    aligned = data_alignment(fmt.name in unpacked(case.a_format, case.b_format))
    row, matrices = width + -(-case.pitch // aligned) * aligned, 1 if repeat else batch
    flat = exact_storage(((matrices - 1) * rows + rows - 1) * row + width, aligned, device)
    flat.copy_(torch.from_numpy(_elements(generator, fmt, flat.shape, case.exact)))
    shape, strides = (batch, rows, width), (0 if repeat else rows * row, row, 1)
    if case.batch == 0:
        shape, strides = shape[1:], strides[1:]
    data = flat.as_strided(shape, strides, flat.storage_offset())
    codes = torch.from_numpy(_scales(generator, fmt, (batch, rows, fmt.scale_columns(case.k)), case.exact))
    blocked = blocked_scales(codes, fmt)
    storage = exact_storage(blocked.numel(), 16, device)
    storage.copy_(blocked.permute(5, 2, 4, 0, 1, 3).reshape(-1))
    scale = storage.as_strided(blocked.shape, blocked.stride(), storage.storage_offset())
    return BlockScaledTensor(data, scale, None if value is None else torch.tensor(value, device=device), fmt)


def _bias(generator: np.random.Generator, case: Case, device: str) -> torch.Tensor | None:
    if not case.bias:
        return None
    size = (case.n,) if case.bias == "n" or case.batch == 0 else (case.batch, case.n)
    values = generator.integers(-64, 65, size) / 2 if case.exact else generator.standard_normal(size) * 100
    # rows of a batch of biases lie three elements apart
    room = torch.zeros((*size[:-1], case.n + 3), dtype=DTYPES[case.bias_dtype], device=device)
    bias = room[..., : case.n]
    bias.copy_(torch.from_numpy(values))
    return bias


def _output(case: Case, device: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(output, memory around it)."""
    if case.out == "new":
        return None, None
    columns = case.out.endswith("columns")
    outer, inner = (case.n, case.m) if columns else (case.m, case.n)
    dtype, batch = DTYPES[case.dtype], max(case.batch, 1)
    unit = 16 // dtype.itemsize
    # (rows before and after, elements before, distance of rows)
    before, first, pitch = 0, 0, inner
    if case.out.startswith("strided"):
        before, first, pitch = 2, unit, -(-inner // unit) * unit + 3 * unit
    elif case.out.startswith("sliced"):
        before, first, pitch = 1, 1, inner + 3
    room = torch.empty((batch, outer + 2 * before, pitch), dtype=dtype, device=device)
    out = room[:, before : before + outer, first : first + inner]
    out = out.transpose(1, 2) if columns else out
    return (out[0] if case.batch == 0 else out), room


def make(case: Case, device: str | None = None) -> Problem:
    """The operands of ``case``, always the same, on the test's device or on ``device``."""
    device = device or str(backends.device())
    generator = np.random.default_rng([case.seed, case.m, case.n, case.k, case.batch])
    a = _operand(generator, case, case.m, FORMATS[case.a_format], case.repeat_a, case.a_global, device)
    b = _operand(generator, case, case.n, FORMATS[case.b_format], case.repeat_b, case.b_global, device)
    alpha: float | torch.Tensor | None = case.alpha
    if case.alpha_tensor:
        alpha = torch.tensor([1.0 if case.alpha is None else case.alpha], device=device)
    return Problem(case, a, b, alpha, _bias(generator, case, device), *_output(case, device))


# --- judgement


def _magnitudes(x: BlockScaledTensor) -> BlockScaledTensor:
    mask = 0x77 if x.format.element == "e2m1" else 0x7F
    scale = None if x.global_scale is None else x.global_scale.abs()
    return replace(x, data=x.data.view(torch.uint8) & mask, global_scale=scale)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds float64 to ``dtype`` once: by numpy to float16, through float32 rounded to odd to bfloat16."""
    if dtype is torch.float16:
        with np.errstate(over="ignore"):
            return torch.from_numpy(x.cpu().numpy().astype(np.float16)).to(x.device)
    if dtype is torch.bfloat16:
        near = x.float()
        bits = near.view(torch.int32)
        down = torch.where(near.double().abs() > x.abs(), bits - 1, bits)
        return torch.where(near.double() != x, down | 1, bits).view(torch.float32).bfloat16()
    return x.to(dtype)


def wrong(problem: Problem, c: torch.Tensor) -> torch.Tensor:
    """Which elements of the output are wrong."""
    low, high = (x.to(c.device) for x in problem.bounds)
    return ~((low <= c) & (c <= high))


def check(problem: Problem, c: torch.Tensor) -> None:
    """Raises AssertionError unless every element of ``c`` is right, and everything around it is unchanged."""
    case = problem.case
    shape = (case.m, case.n) if case.batch == 0 else (case.batch, case.m, case.n)
    assert c.shape == shape and c.dtype is DTYPES[case.dtype]
    bad = wrong(problem, c)
    if bad.any():
        result, error = problem.expected
        where = [tuple(i) for i in bad.nonzero()[:5].tolist()]
        got = [(i, c[i].item(), result[i].item(), error[i].item()) for i in where]
        raise AssertionError(f"{case}: {int(bad.sum())} of {bad.numel()} wrong: (index, got, right, allowed) {got}")
    assert problem.untouched(), f"{case}: memory around the output was written"
