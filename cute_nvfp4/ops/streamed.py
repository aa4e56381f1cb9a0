"""Packed weights times few rows: plan and launch the streaming kernel of sm_90a."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..kernels.gemm.arguments import PartialSums
from ..kernels.gemm.sm90.stream_arguments import FewRows, PackedWeight, StreamArguments
from ..kernels.gemm.sm90.stream_config import StreamConfig, can_implement
from ..operand import BlockScaledTensor
from ..runtime.kernel import Kernel
from ..target import Target
from .checks import tensors


def _host(config: StreamConfig) -> Callable[..., Any]:
    from ..kernels.gemm.sm90.stream import Stream

    return Stream(config)


Activations = torch.Tensor | BlockScaledTensor

KERNEL = Kernel("stream_gemm", StreamArguments, _host, can_implement)


class StreamCall:
    """A planned call: out (M, N) = alpha · factor · x (M, K) · weightᵀ, on ``ctas`` CTAs.

    x: numbers, contiguous along K, or NVFP4 with blocked scales; global scales are factors. packed: (row tiles,
    K tiles, bytes) of ``rows`` rows (``weight_layout``). out: contiguous along N.
    """

    def __init__(
        self,
        x: Activations,
        packed: torch.Tensor,
        rows: int,
        out: torch.Tensor,
        config: StreamConfig,
        ctas: int,
        target: Target,
    ) -> None:
        k_tiles = packed.shape[-2]
        x_rows, k = x.shape if isinstance(x, torch.Tensor) else (x.rows, x.k)
        self.partials, self.flags = scratch(config, ctas, x.device)
        arguments = StreamArguments(
            PackedWeight(0, rows, k_tiles),
            FewRows(0, 0 if config.quantized_x else None, x_rows, parts(x)[0].stride(0)),
            0,
            out.stride(0),
            1.0,
            ((0,) * config.factors,) * config.products,
            PartialSums(0, 0),
            k,
            ctas,
        )
        self.launch = KERNEL.launcher(config, target, x.device, arguments, self._touched)

    def _touched(
        self, x: Activations, packed: torch.Tensor, out: torch.Tensor, factors: tuple[torch.Tensor, ...]
    ) -> Any:
        read = (
            dict(zip(("x", "x's scales"), parts(x)))
            | {"weight": packed}
            | {f"factor {i}": f for i, f in enumerate(factors)}
        )
        return tensors(read, {"out": out, "partials": self.partials, "flags": self.flags})

    def __call__(
        self,
        x: Activations,
        packed: torch.Tensor,
        out: torch.Tensor,
        alpha: float,
        factors: tuple[torch.Tensor, ...] = (),
    ) -> None:
        values = (
            packed.data_ptr(),
            *(part.data_ptr() for part in parts(x)),
            out.data_ptr(),
            alpha,
            *(f.data_ptr() for f in factors),
            self.partials.data_ptr(),
            self.flags.data_ptr(),
        )
        self.launch(values, (x, packed, out, factors))


def parts(x: Activations) -> tuple[torch.Tensor, ...]:
    """What x is in memory: numbers, or data and scales."""
    return (x,) if isinstance(x, torch.Tensor) else (x.data, x.scale)


def scratch(config: StreamConfig, ctas: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of partial sums, two a CTA, and their flags, which launches leave lowered."""
    sums = torch.empty(2 * ctas * config.columns * config.rows, dtype=torch.float32, device=device)
    return sums, torch.zeros(2 * ctas, dtype=torch.int32, device=device)
