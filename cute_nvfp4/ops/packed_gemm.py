"""gemm with a prepared weight: check, plan, launch. Numbers (bfloat16, float16) or NVFP4 times packed NVFP4."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..errors import OperandError
from ..kernels.gemm.arguments import PartialSums
from ..kernels.gemm.sm90.arguments import Activations, Bias, Result, Weight, WgmmaArguments
from ..kernels.gemm.sm90.config import WgmmaConfig, can_implement
from ..kernels.gemm.sm90.stream_arguments import FewRows, PackedWeight, StreamArguments
from ..operand import BlockScaledTensor, row_alignment, span_bytes
from ..planning.packed import PackedPlan, PackedProblem, choose
from ..prepared_weight import PreparedWeight
from ..runtime.apart import Apart
from ..runtime.backend import Backend, resolve, sm_count
from ..runtime.bounded import Bounded
from ..runtime.kernel import Kernel
from ..runtime.simulating import world
from ..target import Target
from .calls import Preparation, as_alpha, output_key, preparable, tensor_key
from .checks import (
    DTYPE_NAMES,
    check_overlap,
    checked_output,
    refuse_config,
    split_alpha,
    tensors,
)
from .dequantize import DecodedFirst, DequantizeCall
from .packed_operands import X, check_bias, check_x, device_scalars, everything_read, x_parts
from .scratch import Scratch, new_scratch, scratch_of
from .streamed import KERNEL as STREAM


def packed_gemm(
    x: X,
    weight: PreparedWeight,
    alpha: float | torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    config: PackedPlan | None,
    backend: Backend,
) -> torch.Tensor:
    """``gemm`` of a prepared weight: out (M, N) = alpha · x · weightᵀ + bias."""
    return planned(x, weight, alpha, bias, out, out_dtype, config, backend)(x, weight, alpha, bias, out)


def planned(
    x: X,
    weight: PreparedWeight,
    alpha: Any,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    config: PackedPlan | None,
    backend: Backend,
) -> Callable[..., torch.Tensor]:
    """The call for these operands: the one that was planned for others like them, or a new one."""
    kept = weight.key
    key = (
        x.key if isinstance(x, BlockScaledTensor) else tensor_key(x),
        kept,
        None if out is None else output_key(out),
        out_dtype,
        None if alpha is None else tensor_key(alpha),
        None if bias is None else tensor_key(bias),
        backend,
        config,
        world(kept.on_cpu),
    )
    call = _calls.find(key)
    if call is None:
        call = _calls[key] = _plan(x, weight, alpha, bias, out, out_dtype, config, backend)
    return call


def prepared(
    x: X,
    weight: PreparedWeight,
    alpha: Any,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    config: PackedPlan | None,
    backend: Backend,
) -> Preparation:
    """``gemm`` of a prepared weight planned, for ``prepare``."""
    call = preparable(planned(x, weight, alpha, bias, out, out_dtype, config, backend), _Call)
    scalar, alpha = as_alpha(alpha)
    out = call.new() if out is None else out
    scratch = call.scratch(kept=False)
    count = len(x_parts(x))
    slots = {"a": [(None, 1)] if count == 1 else [("data", 1), ("scale", 2)], "b": [("packed", 0)]}
    # weight, x, out; then bias, alpha, and the device scalars: alpha's tensor, global scales of x and of the weight
    at = count + 2 + (bias is not None) + 1
    sizes = {0: span_bytes(weight.packed)} | {1 + i: span_bytes(part) for i, part in enumerate(x_parts(x))}
    if bias is not None:
        sizes[count + 2] = span_bytes(bias)
    named = {"alpha": alpha, "a": getattr(x, "global_scale", None), "b": weight.global_scale}
    for name, factor in named.items():
        if factor is not None:
            sizes[at] = 4
            if name != "alpha":
                slots[name].append(("global_scale", at))
            at += 1
    values = call.values(x, weight, scalar, alpha, bias, out, scratch)
    return Preparation(
        call.launch,
        values,
        {"a": x, "b": weight, "out": out},
        slots | {"out": [(None, count + 1)]},
        Apart(sizes, ((count + 1, span_bytes(out)),)),
        lambda given: (given["a"], given["b"], alpha, bias, given["out"], scratch),
    )


_calls = Bounded()


def _plan(
    x: X,
    weight: PreparedWeight,
    alpha: Any,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    config: PackedPlan | None,
    backend: Backend,
) -> Callable[..., torch.Tensor]:
    """The call for these operands and all like them, which it checks."""
    m = check_x(x, weight)
    _, scalar = split_alpha(alpha, weight.device)
    check_bias(bias, weight)
    if out is None and out_dtype is None:
        out_dtype = weight.dtype
    out = checked_output(everything_read(x, weight, scalar, bias), weight.device, (m, weight.rows), out, out_dtype)
    if weight.rows > 1 and out.stride(1) != 1:
        raise OperandError.of("strides of out", got=out.stride(), expected="1 along N, the rows of a prepared weight")
    target = resolve(backend, weight.device)
    if target.backend == "reference":
        refuse_config(config)
        return functools.partial(_reference, dtype=out.dtype)
    return _Call(x, weight, scalar, bias, out, target, config)


class _Call:
    """A planned call: the kernel, and what to check before it runs."""

    def __init__(
        self,
        x: X,
        weight: PreparedWeight,
        alpha: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        target: Target,
        config: PackedPlan | None,
    ) -> None:
        quantized = isinstance(x, BlockScaledTensor)
        m = out.shape[0]
        problem = PackedProblem(
            m=m,
            n=weight.rows,
            k=weight.k,
            dtype=DTYPE_NAMES[weight.dtype],
            out=DTYPE_NAMES[out.dtype],
            quantized=quantized,
            vector=row_alignment(out, 16) >= 16,
            factors=len(device_scalars(x, weight, alpha)),
            bias="" if bias is None else DTYPE_NAMES[bias.dtype],
        )
        self._plan = choose(problem, target.arch, sm_count(target, weight.device), config)
        self._target, self._device = target, weight.device
        # NVFP4 of more rows than the streaming kernel takes is decoded first, exactly; its global scale is a factor
        self._decodes = quantized and not self._plan.streams
        arguments = self._arguments(x, weight, bias, out)
        kernel = STREAM if self._plan.streams else WGMMA
        self.launch = kernel.launcher(self._plan.config, target, weight.device, arguments, _touched)
        if self._decodes:
            self.launch = DecodedFirst(DequantizeCall(x.key, weight.dtype, target, scaled=False), self.launch, 1)
        self._shape, self._options = out.shape, {"dtype": out.dtype, "device": out.device}
        self._out_bytes = span_bytes(out)
        self._needs, self._numbers = self._plan.scratch, not quantized
        # among the values: weight, x, out, bias, alpha, device scalars
        operands = (weight.packed, *x_parts(x))
        self._out_at = len(operands)
        rest = [*(() if bias is None else (bias,)), None, *device_scalars(x, weight, alpha)]
        places = [*enumerate(operands), *enumerate(rest, self._out_at + 1)]
        self._read_at = tuple((i, span_bytes(t)) for i, t in places if t is not None)

    def _arguments(self, x: X, weight: PreparedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> Any:
        """The kernel's record, without addresses."""
        config, m, k_tiles = self._plan.config, out.shape[0], weight.packed.shape[1]
        factors = (0,) * config.factors
        # one row has no stride of its own, but tensor maps want one, of whole 16 bytes
        stride = x_parts(x)[0].stride(0) if m > 1 else -(-weight.k // 32) * 32
        if self._plan.streams:
            return StreamArguments(
                weight=PackedWeight(0, weight.rows, k_tiles),
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
            weight=Weight(0, weight.rows, k_tiles, 0),
            x=Activations(0, m, weight.k if self._decodes else stride, 0),
            out=Result(0, out.stride(0), 0),
            bias=None if bias is None else Bias(0),
            alpha=1.0,
            factors=factors,
            partials=PartialSums(0, 0) if config.scheduler == "stream_k" else None,
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
        scratch = self.scratch()
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
            if values[i] < end and start < values[i] + size:
                return True
        return False

    def new(self) -> torch.Tensor:
        """A result that is not written yet."""
        return torch.empty(self._shape, **self._options)

    def values(
        self,
        x: X,
        weight: PreparedWeight,
        scalar: float,
        alpha: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        scratch: Scratch | tuple[()],
    ) -> tuple:
        """What varies, in the order of both kernels' arguments."""
        values = [weight.packed.data_ptr()]
        if self._numbers:
            values.append(x.data_ptr())
        else:
            values += x.data.data_ptr(), x.scale.data_ptr()
        values.append(out.data_ptr())
        if bias is not None:
            values.append(bias.data_ptr())
        values.append(scalar)
        for factor in (alpha, None if self._numbers else x.global_scale, weight.global_scale, *scratch):
            if factor is not None:
                values.append(factor.data_ptr())
        return tuple(values)

    def scratch(self, kept: bool = True) -> Scratch | tuple[()]:
        """That of a launch; kept: of the stream or graph, else of its own."""
        floats, words = self._needs
        if not words:
            return ()
        device = self._device
        return scratch_of(floats, words, self._target, device) if kept else new_scratch(floats, words, device)


def _touched(
    x: X,
    weight: PreparedWeight,
    alpha: Any,
    bias: Any,
    out: torch.Tensor,
    scratch: tuple,
    decoded: torch.Tensor | None = None,
) -> dict[str, tuple[torch.Tensor, bool]]:
    read = everything_read(x, weight, alpha, bias) | {"decoded a": decoded}
    return tensors(read, {"out": out} | dict(zip(Scratch._fields, scratch)))


def _reference(
    x: X, weight: PreparedWeight, alpha: Any, bias: torch.Tensor | None, out: torch.Tensor | None, *, dtype: torch.dtype
) -> torch.Tensor:
    scalar, alpha = as_alpha(alpha)
    if out is not None:
        check_overlap(everything_read(x, weight, alpha, bias), out)
    wide = x.to(torch.float64) if isinstance(x, torch.Tensor) else x.dequantize(torch.float64)
    exact = wide @ weight.dequantize(torch.float64).t() * (scalar if alpha is None else alpha.double())
    if bias is not None:
        exact = exact + bias.double()
    exact = exact.to(dtype)
    return exact if out is None else out.copy_(exact)


def _wgmma(config: WgmmaConfig) -> Callable[..., Any]:
    from ..kernels.gemm.sm90.wgmma import WgmmaGemm

    return WgmmaGemm(config)


WGMMA = Kernel("wgmma_gemm", WgmmaArguments, _wgmma, can_implement)
