"""gemm: validate, choose a backend and a plan, launch; and what gated_gemm shares with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..kernels.gemm.arguments import Bias, GemmArguments, Output, PartialSums
from ..kernels.gemm.config import CTA_ROWS, GemmConfig
from ..kernels.gemm.limits import can_implement
from ..operand import BlockScaledTensor
from ..planning.gemm import GemmProblem, Plan, plan_for
from ..reference import gemm_reference
from ..runtime.backend import Backend, current_stream, resolve, sm_count
from ..runtime.kernel import Kernel
from ..runtime.launch import Tensors
from ..target import Target
from .checks import DTYPE_NAMES, check_dtype, check_product, checked_output, parts, refuse_config, split_alpha, tensors
from .library import products as operators
from .library.registration import by_operator
from .operands import check_operands, operand_record


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
            finite (``to_blocked`` writes zeros). Global scales multiply the result.
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
    if by_operator((a, b), alpha, bias, out):
        return operators.gemm(a, b, alpha, bias, out, out_dtype, config, backend)
    check_product(a, {"b": b})
    scalar, alpha_tensor = split_alpha(alpha, a.device)
    _check_bias(bias, a, b)
    operands = {"a": a, "b": b}
    read = parts(operands) | {"alpha": alpha_tensor, "bias": bias}
    shape = (a.batch, a.rows, b.rows) if a.is_batched else (a.rows, b.rows)
    out = checked_output({} if out is None else read, a.device, shape, out, out_dtype)
    target = resolve(backend, a.device)
    if target.backend == "reference":
        refuse_config(config)
        return out.copy_(_reference(a, b, scalar, alpha_tensor, bias, out.dtype))
    check_operands(operands, target.backend)
    result, described = output_record(out)
    factors = addresses(alpha_tensor, a.global_scale, b.global_scale)
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
        out=result,
        bias=None if bias is None else Bias(bias.data_ptr(), bias.stride(0) if bias.ndim == 2 else 0),
        alpha=scalar,
        factors=(factors,),
        k=a.k,
        batch=a.batch,
    )
    launch(KERNEL, problem, config, target, a.device, arguments, lambda: tensors(read, {"out": out}))
    return out


def launch(
    kernel: Kernel,
    problem: GemmProblem,
    config: Plan | None,
    target: Target,
    device: torch.device,
    arguments: GemmArguments,
    touched: Callable[[], Tensors],
) -> None:
    """Plans and launches. ``arguments`` are in the caller's order, and lack only what the plan decides."""
    plan = plan_for(problem, target.arch, sm_count(target, device), config)
    scratch = _workspace(plan, device, current_stream(target, device))
    partials = PartialSums(*(x.data_ptr() for x in scratch.values())) if scratch else None
    arguments = arguments._replace(partials=partials, workers=plan.workers)
    if plan.swap:
        arguments = arguments._replace(a=arguments.b, b=arguments.a)
    kernel.run(plan.config, target, device, arguments, lambda: touched() | tensors({}, scratch))


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


def strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(M, N, L) strides of (L, M, N) or (M, N); 0 where a dimension has one element."""
    m, n = (tensor.stride(i) if tensor.shape[i] > 1 else 0 for i in (-2, -1))
    batch = tensor.stride(0) if tensor.ndim == 3 and tensor.shape[0] > 1 else 0
    return m, n, batch


def output_record(out: torch.Tensor) -> tuple[Output, dict[str, Any]]:
    """The record of an output, and what a problem says of it: dtype, contiguous dimension, whether rows are aligned."""
    m, n, batch = strides(out)
    rows, columns = out.shape[-2:]
    if n in (0, 1):
        major, stride, lines, length = "n", m, rows, columns
    elif m in (0, 1):
        major, stride, lines, length = "m", n, columns, rows
    else:
        raise OperandError.of(
            "strides of out",
            got=out.stride(),
            expected="1 along M or along N",
            hint="Leave out to get a new tensor, and copy it.",
        )
    # dimensions of one element have no stride of their own, but tensor maps want one, of whole 16 bytes
    stride = stride or -(-length // 16) * 16
    batch = batch or -(-stride * lines // 16) * 16
    vector = (out.data_ptr() | (stride | batch | length) * out.element_size()) % 16 == 0
    described = {"out": DTYPE_NAMES[out.dtype], "out_major": major, "vector": vector}
    return Output(out.data_ptr(), stride, batch, None, None), described


def addresses(*scalars: torch.Tensor | None) -> tuple[int, ...]:
    """The addresses of those device scalars that there are."""
    return tuple(x.data_ptr() for x in scalars if x is not None)


_flags: dict[tuple[torch.device, int], torch.Tensor] = {}


def _workspace(plan: Plan, device: torch.device, stream: int) -> dict[str, torch.Tensor]:
    """Partial sums and flags of a stream-K launch. Kernels lower the flags they raised, so a stream's are kept."""
    config = plan.config
    if config.scheduler != "stream_k":
        return {}
    ctas = plan.workers * config.ctas
    workspace = torch.empty(ctas * config.products * config.tile_n * CTA_ROWS, dtype=torch.float32, device=device)
    words = ctas * 4
    flags = _flags.get((device, stream)) if device.type == "cuda" else None
    if flags is None or flags.numel() < words:
        flags = torch.zeros(words, dtype=torch.int32, device=device)
        if device.type == "cuda":
            _flags[device, stream] = flags
    return {"workspace": workspace, "flags": flags}


def host(config: GemmConfig) -> Callable[..., Any]:
    """The host function of ``config``, of one product or of two."""
    from ..kernels.gemm.sm100.host import Gemm

    return Gemm(config)


KERNEL = Kernel("gemm", GemmArguments, host, can_implement)
compile_gemm = KERNEL.compile
