"""gemm: validate, choose a backend and a plan, launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..kernels.gemm.arguments import Bias, GemmArguments
from ..kernels.gemm.config import GemmConfig
from ..kernels.gemm.limits import can_implement
from ..operand import BlockScaledTensor, span_bytes
from ..planning.gemm import GemmProblem, Plan
from ..prepared_weight import PreparedWeight
from ..reference import gemm_reference
from ..runtime.apart import Apart, near
from ..runtime.backend import Backend, resolve
from ..runtime.bounded import Bounded
from ..runtime.kernel import Kernel
from ..runtime.launch import Tensors
from ..runtime.simulating import world
from ..target import Target
from .calls import Preparation, addresses, allocator, as_alpha, output_key, preparable, tensor_key
from .checks import (
    DTYPE_NAMES,
    check_dtype,
    check_overlap,
    check_product,
    check_types,
    checked_output,
    parts,
    refuse_config,
    split_alpha,
    tensors,
)
from .dispatch import by_operator, written_to
from .gemm_launch import GemmCall, output_record
from .library import products as operators
from .operands import check_operands, check_signs, operand_record
from .packed_gemm import packed_gemm
from .packed_gemm import prepared as prepared_packed
from .packed_operands import Request
from .plain_gemm import PlainGemm


def gemm(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    *,
    alpha: float | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Plan | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """C = alpha · A · Bᵀ + bias for block-scaled operands: (L, M, N), or (M, N) if they have no batch dimension.

    Args:
        a, b: (L, M, K) and (L, N, K), or (M, K) and (N, K): both NVFP4, both MXFP4, or both MXFP8 (E4M3 and E5M2 may
            be mixed). K is a multiple of 32, scales are blocked (``scale_layout.to_blocked``). A block-scaled MMA reads
            scales of NVFP4 as unsigned: they must not be negative. Padding of scales along K meets zeros, so it must be
            finite (``to_blocked`` writes zeros). Global scales multiply the result. Or b is a
            ``PreparedWeight`` (N, K) on sm_90a, and a (M, K) is numbers of its dtype, or block-scaled. Where b is none,
            each call packs b there.
        alpha: a number, or a float32 tensor of one element on the operands' device; None is 1.
        bias: (N,), or (L, N) for a batch: float16, bfloat16 or float32, contiguous along N; added in float32.
        out: where to put the result: of that shape, float16, bfloat16 or float32, contiguous along N or along M, rows
            and batches anywhere. Nothing may overlap the operands. Every element is written.
        out_dtype: dtype of a new result (float16 by default); with ``out`` it must be None or that of ``out``.
        config: a plan of ``planning.gemm``; None has one chosen. Refused where exact torch runs.
        backend: ``auto`` (the kernels for CUDA tensors, exact torch for CPU tensors), ``cuda``, ``sim``, ``reference``
            (:mod:`cute_nvfp4.runtime.backend`).

    Sums are in float32; times alpha and the global scales, plus bias, in float32; rounded once to the output's dtype.
    Partial sums of split-K and stream-K are added in an order that depends on the plan, never on timing. Runs on the
    current stream, without synchronising the device.

    Raises:
        OperandError, OperandTypeError: operands that do not fit together or cannot be computed with; a plan that
            cannot be.
        TargetError: the backend cannot run tensors of this device, or is unknown.
    """
    if isinstance(b, PreparedWeight):
        return packed_gemm(a, b, alpha, bias, out, out_dtype, config, backend)
    if by_operator((a, b), alpha, bias, out):
        return operators.gemm(a, b, alpha, bias, out, out_dtype, config, backend)
    result = planned(a, b, alpha, bias, out, out_dtype, config, backend)(a, b, alpha, bias, out)
    if out is not None and torch.is_grad_enabled():
        written_to(out)
    return result


def planned(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    alpha: Any,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    config: Plan | None,
    backend: Backend,
) -> Callable[..., torch.Tensor]:
    """The call for these operands: the one that was planned for others like them, or a new one."""
    check_types(a, b)
    key = (
        *(a.key, b.key, output_key(out), out_dtype, tensor_key(alpha), tensor_key(bias)),
        *(backend, config, world(a.key.on_cpu)),
    )
    call = _calls.find(key)
    if call is None:
        call = _calls[key] = _plan(a, b, alpha, bias, out, out_dtype, backend, config)
    return call


def prepared(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    *,
    alpha: float | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Plan | None = None,
    backend: Backend = "auto",
) -> Preparation:
    """``gemm`` planned, for ``prepare``."""
    if isinstance(b, PreparedWeight):
        return prepared_packed(Request(a, b, alpha, bias, out, out_dtype, config, backend))
    call = planned(a, b, alpha, bias, out, out_dtype, config, backend)
    if isinstance(call, PlainGemm):
        raise OperandError.of(
            "b of a prepared call on sm_90a",
            got="an operand that each call packs",
            expected="a PreparedWeight",
            hint="prepare_weight(b) packs it once.",
        )
    call = preparable(call, _Call)
    out = call.new() if out is None else out
    scalar, alpha = as_alpha(alpha)
    made, scratch = call.gemm, call.gemm.scratch(kept=False)
    first, second = (2, 0) if made.swap else (0, 2)
    places = {"a": [("data", first), ("scale", first + 1)], "b": [("data", second), ("scale", second + 1)]}
    # after the output, the bias, alpha and its tensor
    factor = 5 + sum(x is not None for x in (bias, alpha)) + 1
    sizes = {} if bias is None else {5: span_bytes(bias)}
    if alpha is not None:
        sizes[factor - 1] = 4
    for name, x in (("a", a), ("b", b)):
        sizes |= zip((place for _, place in places[name]), (x.key.data_bytes, x.key.scale_bytes))
        if x.global_scale is not None:
            places[name].append(("global_scale", factor))
            sizes[factor] = 4
            factor += 1
    return Preparation(
        made.launch,
        made.values(
            addresses(a.data, a.scale), addresses(b.data, b.scale), call.rest(a, b, scalar, alpha, bias, out), scratch
        ),
        {"a": a, "b": b, "out": out},
        places | {"out": [(None, 4)]},
        Apart(sizes, ((4, span_bytes(out)),)),
        lambda x: (x["a"], x["b"], alpha, bias, x["out"], scratch),
    )


class _Call:
    """A planned call: the kernel, and what to check before it runs."""

    def __init__(
        self,
        a: BlockScaledTensor,
        b: BlockScaledTensor,
        alpha: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        target: Target,
        config: Plan | None,
    ) -> None:
        check_operands({"a": a, "b": b}, target.backend)
        output, described = output_record(out)
        factors = addresses(alpha, a.global_scale, b.global_scale)
        problem = GemmProblem(
            m=a.rows,
            n=b.rows,
            k=a.k,
            batch=a.batch,
            a_format=a.format.name,
            b_format=b.format.name,
            bias="" if bias is None else "n",
            bias_dtype="float32" if bias is None else DTYPE_NAMES[bias.dtype],
            factors=len(factors),
            **described,
        )
        arguments = GemmArguments(
            a=(operand_record(a),),
            b=(operand_record(b),),
            out=output,
            bias=None if bias is None else Bias(0, bias.stride(0) if bias.ndim == 2 else 0),
            alpha=1.0,
            factors=(factors,),
            k=a.k,
            batch=a.batch,
        )
        self.gemm = GemmCall(KERNEL, problem, config, target, a.device, arguments, _touched)
        self.new = allocator(torch.empty(out.shape, dtype=out.dtype, device=out.device))
        self._out_bytes = span_bytes(out)
        inputs = (a.data, a.scale, b.data, b.scale, alpha, bias, a.global_scale, b.global_scale)
        self._sizes = tuple(span_bytes(x) for x in inputs if x is not None)
        self._simulated = target.backend == "sim"

    def __call__(
        self, a: BlockScaledTensor, b: BlockScaledTensor, alpha: Any, bias: Any, out: torch.Tensor | None
    ) -> torch.Tensor:
        scalar, alpha = as_alpha(alpha)
        first, second = (a.data.data_ptr(), a.scale.data_ptr()), (b.data.data_ptr(), b.scale.data_ptr())
        if out is None:
            out = self.new()
        else:
            start = out.data_ptr()
            places = (*first, *second, *addresses(alpha, bias, a.global_scale, b.global_scale))
            if near(start, start + self._out_bytes, places, self._sizes):
                check_overlap(parts({"a": a, "b": b}) | {"alpha": alpha, "bias": bias}, out)
        if self._simulated:
            check_signs("a", a)
            check_signs("b", b)
        self.gemm(first, second, self.rest(a, b, scalar, alpha, bias, out), (a, b, alpha, bias, out))
        return out

    def rest(self, a: Any, b: Any, scalar: float, alpha: Any, bias: Any, out: torch.Tensor) -> tuple:
        """What varies after the operands."""
        return (out.data_ptr(), *addresses(bias), scalar, *addresses(alpha, a.global_scale, b.global_scale))


def _touched(a: Any, b: Any, alpha: Any, bias: Any, out: torch.Tensor, scratch: dict[str, torch.Tensor]) -> Tensors:
    return tensors(parts({"a": a, "b": b}) | {"alpha": alpha, "bias": bias}, {"out": out} | scratch)


_calls = Bounded()


def _plan(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    alpha: Any,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    backend: Backend,
    config: Plan | None,
) -> Callable[..., torch.Tensor]:
    """The call for these operands and all like them, which it checks."""
    check_product(a, {"b": b})
    _, alpha = split_alpha(alpha, a.device)
    _check_bias(bias, a, b)
    shape = (a.batch, a.rows, b.rows) if a.is_batched else (a.rows, b.rows)
    inputs = parts({"a": a, "b": b}) | {"alpha": alpha, "bias": bias}
    out = checked_output(inputs, a.device, shape, out, out_dtype)
    target = resolve(backend, a.device)
    if target.backend == "reference":
        refuse_config(config)
        return functools.partial(_reference_call, dtype=out.dtype)
    if target.arch.generation == "sm90":
        return PlainGemm(a, b, out, target, config, backend)
    return _Call(a, b, alpha, bias, out, target, config)


def _reference_call(
    a: BlockScaledTensor, b: BlockScaledTensor, alpha: Any, bias: Any, out: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    scalar, alpha = as_alpha(alpha)
    if out is not None:
        check_overlap(parts({"a": a, "b": b}) | {"alpha": alpha, "bias": bias}, out)
    exact = _reference(a, b, scalar, alpha, bias, dtype)
    return exact if out is None else out.copy_(exact)


def _check_bias(bias: torch.Tensor | None, a: BlockScaledTensor, b: BlockScaledTensor) -> None:
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor):
        raise OperandTypeError.of("bias", got=type(bias).__name__, expected="torch.Tensor")
    check_dtype("dtype of bias", bias.dtype)
    shapes = [(b.rows,)] + ([(a.batch, b.rows)] if a.is_batched else [])
    if bias.shape not in shapes:
        raise OperandError.of("shape of bias", got=tuple(bias.shape), expected=" or ".join(map(str, shapes)))
    if b.rows > 1 and bias.stride(-1) != 1:
        raise OperandError.of("stride of bias along N", got=bias.stride(-1), expected="1")
    if bias.device != a.device:
        raise OperandError.of("device of bias", got=bias.device, expected=a.device)


def _reference(a, b, scalar: float, alpha: torch.Tensor | None, bias: torch.Tensor | None, dtype) -> torch.Tensor:
    factor: Any = scalar if alpha is None else alpha.reshape(()).double()
    if bias is None:
        return gemm_reference(a, b, alpha=factor, out_dtype=dtype)
    total = gemm_reference(a, b, alpha=factor, out_dtype=torch.float64)
    return total.add_(bias.double().unsqueeze(-2)).to(dtype)


def host(config: GemmConfig) -> Callable[..., Any]:
    """The host function of ``config``, of one product or of two."""
    if config.arch.generation == "sm120":
        from ..kernels.gemm.sm120 import host as sm120

        return sm120.Gemm(config)
    from ..kernels.gemm.sm100 import host as sm100

    return sm100.Gemm(config)


KERNEL = Kernel("gemm", GemmArguments, host, can_implement)
compile_gemm = KERNEL.compile
