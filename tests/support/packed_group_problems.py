"""Problems for grouped products of prepared weights on rows of one x: full-range data, and the exact products."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from cute_nvfp4 import GroupedRows, grouped_gemm_contiguous, prepare_weight
from cute_nvfp4.formats import NVFP4, Format
from cute_nvfp4.kernels.gemm.packed.grouped_stream_config import GroupedStreamConfig
from cute_nvfp4.kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig
from cute_nvfp4.planning.packed import PackedPlan
from support import backends
from support.packed_problems import operand, within


@dataclass(frozen=True)
class Case:
    """Groups of ``sizes`` rows, each times its own (n, k). They run on ``workers`` CTAs with ``tiling`` (``slabs`` in
    it selects the streaming kernel), or by planning's choice. before: rows before the first group."""

    sizes: tuple[int, ...]
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    out: torch.dtype = torch.float32
    workers: int | None = None
    tiling: dict[str, Any] = field(default_factory=dict)
    quantized: bool = False
    before: int = 0
    format: Format = NVFP4

    def __str__(self) -> str:
        words = ["+".join(map(str, self.sizes[:6])), f"{self.n}x{self.k}", str(self.out)[6:]]
        words += [f"{name}{value}" for name, value in self.tiling.items()]
        return "-".join(words + [self.format.name] + ["nvfp4"] * self.quantized)

    @property
    def plan(self) -> PackedPlan | None:
        if self.workers is None:
            return None
        config = GroupedStreamConfig if "slabs" in self.tiling else GroupedWgmmaConfig
        return PackedPlan(config(**self.tiling), self.workers)


class Problem:
    """Operands of a case, the exact result, and the sums of the magnitudes of its products."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.n + sum(case.sizes))
        device = backends.device()
        self.case, rows, groups = case, case.before + sum(case.sizes) + 3, len(case.sizes)
        self.offsets = torch.tensor([*accumulate(case.sizes, initial=case.before)], dtype=torch.int32, device=device)
        weight = operand((groups, case.n, case.k), generator, 0.5, case.format)
        self.weight = prepare_weight(weight, dtype=case.dtype)
        self.alpha = (torch.randn(groups, generator=generator)).to(device)
        if case.quantized:
            x = operand((rows, case.k), generator)
            self.x, wide = GroupedRows.of(x, self.offsets), x.dequantize(torch.float64)
        else:
            self.x = torch.randn(rows, case.k, generator=generator).to(case.dtype).to(device)
            wide = self.x.double()
        values = weight.dequantize(torch.float64)
        self.exact = torch.full((rows, case.n), float("nan"), dtype=torch.float64, device=device)
        self.magnitude = torch.zeros_like(self.exact)
        edges = self.offsets.tolist()
        for e in range(groups):
            mine = slice(edges[e], edges[e + 1])
            self.exact[mine] = wide[mine] @ values[e].t() * self.alpha[e].double()
            self.magnitude[mine] = wide[mine].abs() @ values[e].abs().t() * self.alpha[e].double().abs()

    def run(self) -> torch.Tensor:
        """The kernel's result; an element that the kernel does not write is NaN."""
        case = self.case
        out = torch.full(self.exact.shape, float("nan"), dtype=case.out, device=backends.device())
        offsets = None if case.quantized else self.offsets
        status = torch.full((1,), 7, dtype=torch.int32, device=backends.device())
        grouped_gemm_contiguous(
            self.x, self.weight, offsets=offsets, alpha=self.alpha, out=out, status=status, config=case.plan
        )
        assert status.item() == 0
        return out

    def right(self, out: torch.Tensor) -> bool:
        """Whether the groups' rows are right, and no other row is written."""
        return within(out, self.exact, self.magnitude)
