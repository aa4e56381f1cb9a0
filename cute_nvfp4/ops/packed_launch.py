"""The planned call of gemm and gated_gemm with a prepared weight: the kernel, and what to look at before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..formats import NVFP4
from ..kernels.gemm.arguments import PartialSums
from ..kernels.gemm.packed.stream_arguments import FewRows, StreamArguments
from ..kernels.gemm.packed.stream_config import StreamConfig
from ..kernels.gemm.packed.stream_config import can_implement as can_stream
from ..kernels.gemm.sm90.arguments import Activations, Bias, PackedWeight, Result, WgmmaArguments
from ..kernels.gemm.sm90.config import WgmmaConfig
from ..kernels.gemm.sm90.config import can_implement as can_wgmma
from ..operand import BlockScaledTensor, row_alignment, span_bytes
from ..planning.packed import PackedProblem, choose
from ..planning.packed_problem import helped_steps
from ..prepared_weight import PreparedWeight
from ..runtime.backend import sm_count
from ..runtime.kernel import Kernel
from ..runtime.launch import Tensors
from ..target import Target
from .calls import allocator, as_alpha
from .checks import DTYPE_NAMES, check_overlap, tensors
from .dequantize import DecodedFirst, DequantizeCall
from .packed_operands import Request, X, device_scalars, everything_read, row_stride, x_parts
from .scratch import Scratch, new_scratch, scratch_of


class PackedCall:
    """A planned call. ``request`` has a tensor as alpha or None, and its ``out`` is the output or one like it."""

    def __init__(self, request: Request, target: Target) -> None:
        x, weight, alpha, bias, out = request[:5]
        self._numbers = not isinstance(x, BlockScaledTensor)
        # what the streaming kernel reads as it is
        quantized = not self._numbers and x.format is NVFP4 and weight.dtype is torch.float16
        problem = PackedProblem(
            m=out.shape[0],
            n=weight.rows,
            k=weight.k,
            dtype=DTYPE_NAMES[weight.dtype],
            out=DTYPE_NAMES[out.dtype],
            quantized=quantized,
            vector=row_alignment(out, 16) >= 16,
            factors=len(device_scalars(x, weight, alpha)) // len(weight.global_scales),
            bias="" if bias is None else DTYPE_NAMES[bias.dtype],
            gate=request.gate,
            packing=weight.packing,
        )
        self._problem = problem
        self._plan = plan = choose(problem, target.arch, sm_count(target, weight.device), request.config)
        # all else is decoded first, exactly; its global scale is a factor
        self._decodes = not (self._numbers or (quantized and plan.streams))
        kernel = STREAM if plan.streams else WGMMA
        self.launch = kernel.launcher(plan.config, target, weight.device, self._arguments(request), _touched)
        if self._decodes:
            self.launch = DecodedFirst(DequantizeCall(x.key, weight.dtype, target, scaled=False), self.launch, 1)
        self.new = allocator(torch.empty(out.shape, dtype=out.dtype, device=out.device))
        size = plan.scratch(weight.rows)
        self._scratch = (*size, target, weight.device) if size.flags else None
        # the streaming kernel has these arguments always
        self._no_scratch = (0, 0) if plan.streams else ()
        # among the values: weight, x, out, bias, alpha, device scalars
        operands = (weight.packed, *x_parts(x))
        self._out_at, self._out_bytes = len(operands), span_bytes(out)
        rest = [*(() if bias is None else (bias,)), None, *device_scalars(x, weight, alpha)]
        places = [*enumerate(operands), *enumerate(rest, self._out_at + 1)]
        self._read_at = tuple((i, span_bytes(t)) for i, t in places if t is not None)

    def _arguments(self, request: Request) -> StreamArguments | WgmmaArguments:
        """The kernel's record, without addresses."""
        x, weight, _, bias, out = request[:5]
        config, m, k_tiles = self._plan.config, out.shape[0], weight.packed.shape[1]
        factors = ((0,) * config.factors,) * config.products
        stride = weight.k if self._decodes else row_stride(x_parts(x)[0].stride(0), m, weight.k)
        if self._plan.streams:
            return StreamArguments(
                weight=PackedWeight(0, weight.rows, k_tiles, None),
                x=FewRows(0, 0 if config.quantized_x else None, m, stride),
                out=0,
                out_stride=out.stride(0),
                alpha=1.0,
                factors=factors,
                partials=PartialSums(0, 0),
                k=weight.k,
                ctas=self._plan.workers,
            )
        return WgmmaArguments(
            weight=PackedWeight(0, weight.rows, k_tiles, 0),
            x=Activations(0, m, stride, 0),
            out=Result(0, out.stride(0), 0),
            bias=None if bias is None else Bias(0),
            alpha=1.0,
            factors=factors,
            partials=None if config.scheduler == "static" else PartialSums(0, 0),
            helped=helped_steps(self._problem, self._plan) if config.scheduler == "helped" else None,
            k=weight.k,
            batch=1,
            workers=self._plan.workers,
        )

    def __call__(
        self, x: X, weight: PreparedWeight, alpha: Any, bias: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        scalar = 1.0
        if alpha is not None:
            scalar, alpha = as_alpha(alpha)
        given = out is not None
        if not given:
            out = self.new()
        scratch = None if self._scratch is None else scratch_of(*self._scratch)
        values = self.values(x, weight, scalar, alpha, bias, out, scratch)
        if given and self._overlaps(values):
            check_overlap(everything_read(x, weight, alpha, bias), out)
        self.launch(values, (x, weight, alpha, bias, out, scratch))
        return out

    def _overlaps(self, values: tuple) -> bool:
        """Whether the output may overlap something that is read."""
        start = values[self._out_at]
        end = start + self._out_bytes
        for i, size in self._read_at:
            at = values[i]
            if at < end and start < at + size:
                return True
        return False

    def values(
        self,
        x: X,
        weight: PreparedWeight,
        scalar: float,
        alpha: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        scratch: Scratch | None,
    ) -> tuple:
        """What varies, in the order of both kernels' arguments."""
        if self._numbers:
            values = [weight.packed.data_ptr(), x.data_ptr(), out.data_ptr()]
        else:
            values = [weight.packed.data_ptr(), x.data.data_ptr(), x.scale.data_ptr(), out.data_ptr()]
        if bias is not None:
            values.append(bias.data_ptr())
        values.append(scalar)
        for factor in weight.global_scales:
            if alpha is not None:
                values.append(alpha.data_ptr())
            if not self._numbers and x.global_scale is not None:
                values.append(x.global_scale.data_ptr())
            if factor is not None:
                values.append(factor.data_ptr())
        values += self._no_scratch if scratch is None else scratch.addresses
        return tuple(values)

    def own_scratch(self) -> Scratch | None:
        """Scratch memory that no other call uses."""
        if self._scratch is None:
            return None
        floats, words, _, device = self._scratch
        return new_scratch(floats, words, device)


def _touched(
    x: X,
    weight: PreparedWeight,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scratch: Scratch | None,
    decoded: torch.Tensor | None = None,
) -> Tensors:
    read = everything_read(x, weight, alpha, bias) | {"decoded a": decoded}
    used = {} if scratch is None else {"sums": scratch.sums, "flags": scratch.flags}
    return tensors(read, {"out": out} | used)


def _wgmma(config: WgmmaConfig) -> Callable[..., Any]:
    if config.arch.generation == "sm120":
        from ..kernels.gemm.sm120.packed import PackedGemm

        return PackedGemm(config)
    from ..kernels.gemm.sm90.overlapped import OverlappedWgmma
    from ..kernels.gemm.sm90.wgmma import WgmmaGemm

    return (OverlappedWgmma if config.overlap else WgmmaGemm)(config)


def _stream(config: StreamConfig) -> Callable[..., Any]:
    from ..kernels.gemm.packed.stream import Stream

    return Stream(config)


WGMMA = Kernel("wgmma_gemm", WgmmaArguments, _wgmma, can_wgmma)
STREAM = Kernel("stream_gemm", StreamArguments, _stream, can_stream)
