"""Problems for the streaming GEMM: full-range packed weights, and the exact product."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cute_nvfp4 import weight_layout
from cute_nvfp4.kernels.gemm.arguments import PartialSums
from cute_nvfp4.kernels.gemm.packed.stream_arguments import FewRows, StreamArguments
from cute_nvfp4.kernels.gemm.packed.stream_config import StreamConfig
from cute_nvfp4.kernels.gemm.sm90.arguments import PackedWeight
from cute_nvfp4.operand import BlockScaledTensor
from cute_nvfp4.ops.checks import tensors
from cute_nvfp4.ops.prepared_weight.gemm import STREAM
from cute_nvfp4.runtime.backend import resolve
from cute_nvfp4.scale_layout import blocked_flat, to_blocked
from support import backends

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
ALPHA, FACTOR = 0.75, 2.5


@dataclass(frozen=True)
class Case:
    """out (m, n) of x (m, k) on ``ctas`` CTAs. tiling: of the configuration; padded: whether rows of out have a larger
    stride."""

    m: int
    n: int
    k: int
    ctas: int
    dtype: str = "bfloat16"
    out: str = "float32"
    tiling: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    padded: bool = False

    def __str__(self) -> str:
        tiling = "-".join(f"{name}{value}" for name, value in self.tiling.items())
        return f"{self.m}x{self.n}x{self.k}-{self.ctas}-{self.dtype}-{self.out}-{tiling}"

    @property
    def config(self) -> StreamConfig:
        """The configuration. ``tiling`` may also say that x is NVFP4."""
        columns = 8 if self.m <= 8 else 16 if self.m <= 16 else 32
        vector = self.n % 4 == 0 or self.padded
        return replace(
            StreamConfig(dtype=self.dtype, out=self.out, columns=columns, vector=vector, factors=1), **self.tiling
        )


@dataclass(frozen=True)
class Problem:
    """Operands, the exact result in float64, and the sums of the magnitudes of its products."""

    case: Case
    x: torch.Tensor | BlockScaledTensor
    packed: torch.Tensor
    exact: torch.Tensor
    magnitude: torch.Tensor

    def run(self) -> torch.Tensor:
        """The kernel's result; every element that the kernel does not write is NaN."""
        case = self.case
        device = self.packed.device
        wide = -(-case.n // 8) * 8 + 8 if case.padded else case.n
        whole = torch.full((case.m, wide), float("nan"), dtype=DTYPES[case.out], device=device)
        out = whole[:, : case.n]
        factor = torch.tensor([FACTOR], device=device)
        sums = torch.empty(2 * case.ctas * case.config.columns * case.config.rows, device=device)
        flags = torch.zeros(2 * case.ctas, dtype=torch.int32, device=device)
        x = (self.x,) if isinstance(self.x, torch.Tensor) else (self.x.data, self.x.scale)
        arguments = StreamArguments(
            weight=PackedWeight(self.packed.data_ptr(), case.n, self.packed.shape[1], None),
            x=FewRows(x[0].data_ptr(), x[1].data_ptr() if x[1:] else None, case.m, x[0].stride(0)),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            alpha=ALPHA,
            floats=None,
            factors=((factor.data_ptr(),),),
            partials=PartialSums(sums.data_ptr(), flags.data_ptr()),
            k=case.k,
            ctas=case.ctas,
        )
        read = dict(zip(("x", "x's scales"), x)) | {"weight": self.packed, "factor": factor}
        touched = tensors(read, {"out": out, "sums": sums, "flags": flags})
        STREAM.run(case.config, resolve(backends.backend(), device), device, arguments, lambda: touched)
        assert not flags.any() and whole[:, case.n :].isnan().all()
        return out

    def wrong(self, out: torch.Tensor) -> torch.Tensor:
        """Which elements are off by more than 2⁻²⁰ of the sum of magnitudes plus the rounding of the output."""
        bound = 2.0**-20 * self.magnitude + self.exact.abs() * torch.finfo(DTYPES[self.case.out]).eps
        return ~((out.double() - self.exact).abs() <= bound)


def make(case: Case) -> Problem:
    """The problem of a case: weights of every code and every scale but NaN, x normal."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype, packing = DTYPES[case.dtype], case.config.weights
    codes = torch.randint(0, 16, (1, case.n, case.k), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, (1, case.n, case.k // 16), dtype=torch.uint8, generator=generator)
    scales[scales & 0x7F == 0x7F] = 1
    packed = weight_layout.pack(codes, scales, packing)
    weight = weight_layout.unpack(packed, packing)[0, : case.n, : case.k].double()
    x = values = torch.randn(case.m, case.k, generator=generator).to(dtype)
    if case.config.quantized_x:
        x = quantized(case, generator)
        values = x.dequantize(torch.float64)
    values, factor = values.double(), ALPHA * FACTOR
    exact, magnitude = factor * values @ weight.T, factor * values.abs() @ weight.abs().T
    return Problem(case, on_device(x), *map(on_device, (packed[0], exact, magnitude)))


def on_device(x: torch.Tensor | BlockScaledTensor) -> torch.Tensor | BlockScaledTensor:
    """Moves ``x`` to the tests' device."""
    if isinstance(x, BlockScaledTensor):
        return BlockScaledTensor(backends.place(x.data), backends.place(x.scale))
    return x.to(backends.device())


def quantized(case: Case, generator: torch.Generator) -> BlockScaledTensor:
    """x (m, k) of every code and every scale but NaN; NaN in the scales' padding."""
    data = torch.randint(0, 256, (case.m, case.k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.full((128, case.k // 16), 0x7F, dtype=torch.uint8)
    scales[: case.m] = torch.randint(0, 127, (case.m, case.k // 16), dtype=torch.uint8, generator=generator)
    scales[: case.m] |= torch.randint(0, 2, (case.m, case.k // 16), dtype=torch.uint8, generator=generator) << 7
    return BlockScaledTensor(data, blocked_flat(to_blocked(scales)))
