"""gemm with a prepared weight: check, plan, launch. Numbers (bfloat16, float16) or NVFP4 times packed NVFP4."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..formats import NVFP4
from ..kernels.gemm.arguments import PartialSums
from ..kernels.gemm.sm90.arguments import Activations, Bias, Result, Weight, WgmmaArguments
from ..kernels.gemm.sm90.config import WgmmaConfig, can_implement
from ..kernels.gemm.sm90.stream_arguments import FewRows, PackedWeight, StreamArguments
from ..operand import BlockScaledTensor, row_alignment, span_bytes
from ..planning.packed import STREAM_ROWS, PackedPlan, PackedProblem, choose
from ..prepared_weight import PreparedWeight
from ..runtime.apart import Apart, near
from ..runtime.backend import Backend, resolve, sm_count
from ..runtime.bounded import Bounded
from ..runtime.kernel import Kernel
from ..runtime.simulating import world
from ..target import Target
from .calls import Preparation, addresses, as_alpha, output_key, preparable, tensor_key
from .checks import DTYPE_NAMES, check_dtype, check_format, check_overlap, checked_output, refuse_config, split_alpha
from .flags import lowered_flags
from .streamed import KERNEL as STREAM

X = torch.Tensor | BlockScaledTensor


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
    x_key = x.key if isinstance(x, BlockScaledTensor) else tensor_key(x)
    on_cpu = weight.packed.device.type == "cpu"
    key = (
        *(x_key, weight.key, output_key(out), out_dtype, tensor_key(alpha), tensor_key(bias)),
        *(backend, config, world(on_cpu)),
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
    if call.decodes:
        raise OperandError.of(
            "rows of NVFP4 in a prepared call",
            got=x.rows,
            expected=f"at most {STREAM_ROWS}: more are decoded by another launch",
            hint="Use bfloat16 or float16.",
        )
    scalar, alpha = as_alpha(alpha)
    out = call.new() if out is None else out
    partials = call.partials(kept=False)
    count = len(_x_parts(x))
    slots = {"a": [(None, 1)] if count == 1 else [("data", 1), ("scale", 2)], "b": [("packed", 0)]}
    # weight, x, out; then bias, alpha, and the device scalars: alpha's tensor, global scales of x and of the weight
    at = count + 2 + (bias is not None) + 1
    sizes = {0: span_bytes(weight.packed)} | {1 + i: span_bytes(part) for i, part in enumerate(_x_parts(x))}
    if bias is not None:
        sizes[count + 2] = span_bytes(bias)
    named = {"alpha": alpha, "a": getattr(x, "global_scale", None), "b": weight.global_scale}
    for name, factor in named.items():
        if factor is not None:
            sizes[at] = 4
            if name != "alpha":
                slots[name].append(("global_scale", at))
            at += 1
    values = call.values(x, weight, scalar, alpha, bias, out, partials)
    return Preparation(
        call.launch,
        values,
        {"a": x, "b": weight, "out": out},
        slots | {"out": [(None, count + 1)]},
        Apart(sizes, ((count + 1, span_bytes(out)),)),
        lambda given: (given["a"], given["b"], alpha, bias, given["out"], partials),
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
    m = _check_x(x, weight)
    _, scalar = split_alpha(alpha, weight.device)
    _check_bias(bias, weight)
    if out is None and out_dtype is None:
        out_dtype = weight.dtype
    out = checked_output(_read(x, weight, scalar, bias), weight.device, (m, weight.rows), out, out_dtype)
    if weight.rows > 1 and out.stride(1) != 1:
        raise OperandError.of("strides of out", got=out.stride(), expected="1 along N, the rows of a prepared weight")
    target = resolve(backend, weight.device)
    if target.backend == "reference":
        refuse_config(config)
        return functools.partial(_reference, dtype=out.dtype)
    return _Call(x, weight, scalar, bias, out, target, config)


def _check_x(x: X, weight: PreparedWeight) -> int:
    """Raises unless x (M, K) can be multiplied with ``weight``; M."""
    if isinstance(x, BlockScaledTensor):
        check_format("a", x, (NVFP4,))
        shape, device = ((x.batch,) if x.is_batched else ()) + (x.rows, x.k), x.device
        if weight.dtype is not torch.float16:
            raise OperandTypeError.of(
                "dtype of a weight prepared for NVFP4",
                got=weight.dtype,
                expected="torch.float16",
                hint="prepare_weight(weight, dtype=torch.float16).",
            )
        if x.scale_layout != "blocked":
            raise OperandError.of(
                "scales of a",
                got=x.scale_layout,
                expected="blocked",
                hint="scale_layout.to_blocked(scale) makes them so.",
            )
    elif isinstance(x, torch.Tensor):
        shape, device = tuple(x.shape), x.device
        if x.dtype is not weight.dtype:
            raise OperandTypeError.of(
                "dtype of a", got=x.dtype, expected=f"{weight.dtype}, which the weight was prepared for"
            )
        if x.ndim == 2 and x.shape[1] > 1 and x.stride(1) != 1:
            raise OperandError.of("stride of a along K", got=x.stride(1), expected="1", hint=".contiguous() copies.")
        if x.ndim == 2 and x.numel() and row_alignment(x, 16) < 16:
            raise OperandError.of(
                "alignment of a",
                got=f"address {x.data_ptr():#x}, strides {x.stride()}",
                expected="rows at multiples of 16 bytes, which TMA needs",
                hint=".clone() aligns.",
            )
    else:
        raise OperandTypeError.of("a", got=type(x).__name__, expected="torch.Tensor or BlockScaledTensor")
    if len(shape) != 2 or shape[1] != weight.k or shape[0] < 1:
        raise OperandError.of("shape of a", got=shape, expected=f"(M, {weight.k}) with M ≥ 1")
    if device != weight.device:
        raise OperandError.of("device of a and b", got=f"{device} and {weight.device}", expected="the same")
    return shape[0]


def _check_bias(bias: torch.Tensor | None, weight: PreparedWeight) -> None:
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor):
        raise OperandTypeError.of("bias", got=type(bias).__name__, expected="torch.Tensor")
    check_dtype("dtype of bias", bias.dtype)
    if tuple(bias.shape) != (weight.rows,) or (weight.rows > 1 and bias.stride(0) != 1):
        got = f"shape {tuple(bias.shape)}, strides {bias.stride()}"
        raise OperandError.of("bias", got=got, expected=f"({weight.rows},), contiguous")
    if bias.device != weight.device:
        raise OperandError.of("device of bias", got=bias.device, expected=weight.device)


def _x_parts(x: X) -> tuple[torch.Tensor, ...]:
    """What x is in memory: numbers, or data and scales."""
    return (x,) if isinstance(x, torch.Tensor) else (x.data, x.scale)


def _factors(x: X, weight: PreparedWeight, alpha: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The device scalars that there are."""
    of_x = None if isinstance(x, torch.Tensor) else x.global_scale
    return tuple(f for f in (alpha, of_x, weight.global_scale) if f is not None)


def _read(
    x: X, weight: PreparedWeight, alpha: torch.Tensor | None, bias: torch.Tensor | None
) -> dict[str, torch.Tensor | None]:
    """Every tensor that a call reads, by name."""
    found = dict(zip(("a", "scales of a"), _x_parts(x))) | {"b": weight.packed, "bias": bias}
    return found | {f"device scalar {i}": f for i, f in enumerate(_factors(x, weight, alpha))}


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
            factors=len(_factors(x, weight, alpha)),
            bias="" if bias is None else DTYPE_NAMES[bias.dtype],
        )
        self._plan = choose(problem, target.arch, sm_count(target, weight.device), config)
        self._target, self._device = target, weight.device
        self.decodes = quantized and not self._plan.streams
        arguments = self._arguments(x, weight, bias, out)
        kernel = STREAM if self._plan.streams else WGMMA
        self.launch = kernel.launcher(self._plan.config, target, weight.device, arguments, _touched)
        self._shape, self._options = out.shape, {"dtype": out.dtype, "device": out.device}
        self._out_bytes = span_bytes(out)
        self._sizes = tuple(span_bytes(t) for t in _read(x, weight, alpha, bias).values() if t is not None)
        self._floats, self._flags = self._plan.scratch
        self._dtype = weight.dtype

    def _arguments(self, x: X, weight: PreparedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> Any:
        """The kernel's record, without addresses."""
        config, m, k_tiles = self._plan.config, out.shape[0], weight.packed.shape[1]
        factors = (0,) * config.factors
        # one row has no stride of its own, but tensor maps want one, of whole 16 bytes
        stride = _x_parts(x)[0].stride(0) if m > 1 else -(-weight.k // 32) * 32
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
            x=Activations(0, m, weight.k if self.decodes else stride, 0),
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
        scalar, alpha = as_alpha(alpha)
        if out is None:
            out = self.new()
        else:
            start = out.data_ptr()
            factors = addresses(*_factors(x, weight, alpha))
            read = (*addresses(*_x_parts(x)), weight.packed.data_ptr(), *addresses(bias), *factors)
            if near(start, start + self._out_bytes, read, self._sizes):
                check_overlap(_read(x, weight, alpha, bias), out)
        # NVFP4 of more rows than the streaming kernel takes is decoded first, exactly
        scratch = {"decoded a": _decoded(x, self._dtype)} if self.decodes else {}
        partials = self.partials()
        values = self.values(x, weight, scalar, alpha, bias, out, partials, tuple(scratch.values()))
        self.launch(values, (x, weight, alpha, bias, out, scratch | partials))
        return out

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
        partials: dict[str, torch.Tensor],
        decoded: tuple[torch.Tensor, ...] = (),
    ) -> tuple:
        """What varies, in the order of both kernels' arguments."""
        return (
            *(weight.packed.data_ptr(), *addresses(*(decoded or _x_parts(x))), out.data_ptr(), *addresses(bias)),
            *(scalar, *addresses(*_factors(x, weight, alpha)), *addresses(*partials.values())),
        )

    def partials(self, kept: bool = True) -> dict[str, torch.Tensor]:
        """Partial sums and flags of a launch; kept: flags of the stream or graph, else of its own."""
        words, target, device = self._flags, self._target, self._device
        if not words:
            return {}
        sums = torch.empty(self._floats, dtype=torch.float32, device=device)
        flags = lowered_flags(words, target, device) if kept else torch.zeros(words, dtype=torch.int32, device=device)
        return {"workspace": sums, "flags": flags}


def _decoded(x: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of x (M, K) without its global scale, exact in either dtype."""
    return BlockScaledTensor(x.data, x.scale, None, x.format).dequantize(dtype)


def _touched(
    x: X, weight: PreparedWeight, alpha: Any, bias: Any, out: torch.Tensor, scratch: dict[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, bool]]:
    read = {name: (t, False) for name, t in _read(x, weight, alpha, bias).items() if t is not None}
    return read | {"out": (out, True)} | {name: (t, True) for name, t in scratch.items()}


def _reference(
    x: X, weight: PreparedWeight, alpha: Any, bias: torch.Tensor | None, out: torch.Tensor | None, *, dtype: torch.dtype
) -> torch.Tensor:
    scalar, alpha = as_alpha(alpha)
    if out is not None:
        check_overlap(_read(x, weight, alpha, bias), out)
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
