"""gemm: validate, choose a backend and a plan, compile once, launch."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError, explain
from ..formats import FORMATS
from ..kernels.gemm.config import CTA_ROWS, GemmConfig, can_implement
from ..operand import BlockScaledTensor, check_pair
from ..planning.gemm import GemmProblem, Plan, can_run, choose
from ..reference import gemm_reference
from ..runtime.backend import Backend, resolve, sm_count
from ..runtime.compile import CompiledKernel, build, compile_cached
from ..runtime.launch import Launcher, launcher
from ..target import Target
from .checks import DTYPE_NAMES, check_dtype, check_format, checked_output, number, parts
from .operands import FACTORS, OPERAND_TYPES, arguments_of, check_scales, example_operand, example_pointer

_POINTER, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
# a | b | c, its strides | bias, its batch stride | alpha, factors | workspace, flags | k, batch, workers | stream
_TYPES = (
    *OPERAND_TYPES, *OPERAND_TYPES, _POINTER, _I64, _I64, _POINTER, _I64, _F32, *[_POINTER] * FACTORS,
    _POINTER, _POINTER, *[_I32] * 3, _POINTER,
)  # fmt: skip
# what a plan decides of a configuration; the problem decides the rest
_TILING = ("tile_n", "pair", "cluster", "split_k", "stages", "acc_stages", "scheduler", "raster")
_NOTHING = contextlib.nullcontext()


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
        config: a plan of ``kernels.gemm_choose``; None has one chosen.
        backend: ``auto`` (CUDA tensors on their GPU, CPU tensors in the simulator), ``cuda``, ``sim``, ``reference``.

    Sums are in float32; times alpha and the global scales, plus bias, in float32; rounded once to the output's dtype.
    Partial sums of split-K and stream-K are added in an order that depends on the plan, never on timing. Runs on the
    current stream, without synchronising the device.

    Raises:
        OperandError, OperandTypeError: operands that do not fit together or cannot be computed with; a plan that
            cannot be.
        TargetError: the backend cannot run tensors of this device, or is unknown.
    """
    check_pair(a, b)
    for name, operand in (("a", a), ("b", b)):
        check_format(name, operand, tuple(FORMATS.values()))
    if a.is_batched != b.is_batched:
        raise OperandError(explain("batch dimension", got=f"a {a.data.ndim}-d, b {b.data.ndim}-d", expected="the same"))
    scalar, alpha_tensor = _split_alpha(alpha, a.device)
    _check_bias(bias, a, b)
    extra = {"alpha": alpha_tensor, "bias": bias}
    shape = (a.batch, a.rows, b.rows) if a.is_batched else (a.rows, b.rows)
    inputs = {} if out is None else parts({"a": a, "b": b}) | extra
    out = checked_output(inputs, a.device, shape, out, out_dtype)
    resolved = resolve(backend, a.device)
    if resolved.backend == "reference":
        return out.copy_(_reference(a, b, scalar, alpha_tensor, bias, out.dtype))
    check_scales({"a": a, "b": b}, resolved.backend)
    factors = [x for x in (alpha_tensor, a.global_scale, b.global_scale) if x is not None]
    problem = _problem(a, b, out, bias, len(factors))
    plan, run = _plan(problem, resolved, sm_count(resolved, a.device), config)
    stream = torch.cuda.current_stream(a.device).cuda_stream if resolved.backend == "cuda" else 0
    workspace, flags = _workspace(plan, a.device, stream)
    values = _arguments(plan, a, b, out, bias, scalar, factors, (workspace, flags), stream)
    _launch(run, values, a.device, lambda: _tensors({"a": a, "b": b}, {"out": out}, extra, workspace, flags))
    return out


def _launch(run: Launcher, values: list, device: torch.device, tensors: Callable[[], dict]) -> None:
    """Runs a kernel; ``tensors`` are only asked for in the simulator."""
    if device.type != "cuda":
        run(values, tensors)
        return
    # the DSL's host code launches on the current device
    with torch.cuda.device(device) if device.index != torch.cuda.current_device() else _NOTHING:
        run(values, dict)


def compile_gemm(config: GemmConfig) -> CompiledKernel:
    """The kernel of ``config``, compiled once. Needs no GPU and no tensors.

    Raises:
        OperandError: the configuration cannot be; the message says which limit, and by how much.
    """
    reason = can_implement(config)
    if reason:
        raise OperandError(reason)
    return compile_cached(("gemm", config), lambda: _build(config))


@functools.lru_cache(maxsize=4096)
def _plan(problem: GemmProblem, target: Target, sm_count: int, given: Plan | None) -> tuple[Plan, Launcher]:
    """The plan for ``problem``, and the launcher of its kernel."""
    plan = choose(problem, target.arch, sm_count) if given is None else _complete(given, problem, target, sm_count)
    return plan, launcher(compile_gemm(plan.config), target, _TYPES)


def _complete(plan: Plan, problem: GemmProblem, target: Target, sm_count: int) -> Plan:
    """The caller's plan with all that the problem decides filled in: formats, output, bias."""
    if not isinstance(plan, Plan):
        raise OperandTypeError(explain("config", got=type(plan).__name__, expected="a Plan of kernels.gemm_choose"))
    reason = can_run(problem)
    if reason:
        raise OperandError(reason)
    tiling = {name: getattr(plan.config, name) for name in _TILING}
    config = problem.config(target.arch, plan.swap, **tiling)
    if plan.config.store == "direct":
        config = dataclasses.replace(config, store="direct")
    steps = -(-problem.k // config.tile_k)
    if config.split_k > steps:
        raise OperandError(
            explain("split_k", got=config.split_k, expected=f"at most {steps}: K {problem.k} has {steps} steps")
        )
    if plan.workers < 1:
        raise OperandError(explain("workers", got=plan.workers, expected="at least 1"))
    # a cluster waits for those after it, so all must be on the device together
    if config.scheduler == "stream_k" and plan.workers * config.ctas > sm_count:
        raise OperandError(
            explain(
                "CTAs of a stream_k launch", got=plan.workers * config.ctas, expected=f"at most {sm_count} (one an SM)"
            )
        )
    return dataclasses.replace(plan, config=config)


def _split_alpha(alpha: Any, device: torch.device) -> tuple[float, torch.Tensor | None]:
    if not isinstance(alpha, torch.Tensor):
        return number("alpha", alpha), None
    if alpha.dtype is not torch.float32:
        raise OperandTypeError(explain("alpha", got=alpha.dtype, expected="torch.float32, or a Python number"))
    if alpha.numel() != 1:
        raise OperandError(explain("alpha", got=f"shape {tuple(alpha.shape)}", expected="one element"))
    if alpha.device != device:
        raise OperandError(explain("device of alpha", got=alpha.device, expected=device))
    return 1.0, alpha


def _check_bias(bias: torch.Tensor | None, a: BlockScaledTensor, b: BlockScaledTensor) -> None:
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor):
        raise OperandTypeError(explain("bias", got=type(bias).__name__, expected="torch.Tensor"))
    check_dtype("dtype of bias", bias.dtype)
    shapes = [(b.rows,)] + ([(a.batch, b.rows)] if a.is_batched else [])
    if bias.shape not in shapes:
        raise OperandError(explain("shape of bias", got=tuple(bias.shape), expected=" or ".join(map(str, shapes))))
    if b.rows > 1 and bias.stride(-1) != 1:
        raise OperandError(explain("stride of bias along N", got=bias.stride(-1), expected="1"))
    if bias.device != a.device:
        raise OperandError(explain("device of bias", got=bias.device, expected=a.device))


def _reference(a, b, scalar: float, alpha: torch.Tensor | None, bias: torch.Tensor | None, dtype) -> torch.Tensor:
    factor: Any = scalar if alpha is None else alpha.reshape(()).double()
    if bias is None:
        return gemm_reference(a, b, alpha=factor, out_dtype=dtype)
    total = gemm_reference(a, b, alpha=factor, out_dtype=torch.float64)
    return total.add_(bias.double().unsqueeze(-2)).to(dtype)


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(M, N, L) strides of (L, M, N) or (M, N); 0 where a dimension has one element."""
    m, n = (tensor.stride(i) if tensor.shape[i] > 1 else 0 for i in (-2, -1))
    batch = tensor.stride(0) if tensor.ndim == 3 and tensor.shape[0] > 1 else 0
    return m, n, batch


def _problem(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    factors: int,
    **more: Any,
) -> GemmProblem:
    m, n, batch = _strides(out)
    if n in (0, 1):
        major, step, length = "n", m, out.shape[-1]
    elif m in (0, 1):
        major, step, length = "m", n, out.shape[-2]
    else:
        raise OperandError(
            explain(
                "strides of out",
                got=out.stride(),
                expected="1 along M or along N",
                hint="Leave out to get a new tensor, and copy it.",
            )
        )
    bits = out.data_ptr() | (step | batch) * out.element_size() | length * out.element_size()
    return GemmProblem(
        m=out.shape[-2],
        n=out.shape[-1],
        k=a.k,
        batch=a.batch,
        a_format=a.format.name,
        b_format=b.format.name,
        out=DTYPE_NAMES[out.dtype],
        out_major=major,
        vector=bits % 16 == 0,
        bias="" if bias is None else "n",
        bias_dtype="float32" if bias is None else DTYPE_NAMES[bias.dtype],
        factors=factors,
        **more,
    )


_flags: dict[tuple[torch.device, int], torch.Tensor] = {}


def _workspace(plan: Plan, device: torch.device, stream: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Partial sums and flags of a stream-K launch. Kernels lower the flags they raised, so a stream's are kept."""
    config = plan.config
    if config.scheduler != "stream_k":
        return None, None
    ctas = plan.workers * config.ctas
    floats = ctas * config.products * config.tile_n * CTA_ROWS
    words = ctas * 4
    workspace = torch.empty(floats, dtype=torch.float32, device=device)
    flags = _flags.get((device, stream)) if device.type == "cuda" else None
    if flags is None or flags.numel() < words:
        flags = torch.zeros(words, dtype=torch.int32, device=device)
        if device.type == "cuda":
            _flags[device, stream] = flags
    return workspace, flags


def _tensors(
    operands: Mapping[str, BlockScaledTensor],
    written: Mapping[str, torch.Tensor],
    extra: Mapping[str, torch.Tensor | None],
    workspace: torch.Tensor | None,
    flags: torch.Tensor | None,
) -> dict[str, tuple[torch.Tensor, bool]]:
    """Every tensor that the kernel may touch, by name, and whether it may write it."""
    read = {**parts(operands), **extra}
    tensors = {name: (tensor, False) for name, tensor in read.items() if tensor is not None}
    tensors |= {name: (tensor, True) for name, tensor in written.items()}
    if workspace is not None and flags is not None:
        tensors |= {"workspace": (workspace, True), "flags": (flags, True)}
    return tensors


def _arguments(
    plan: Plan, a, b, out: torch.Tensor, bias: torch.Tensor | None, alpha: float, factors: list, scratch: tuple,
    stream: int,
) -> list:  # fmt: skip
    first, second = (b, a) if plan.swap else (a, b)
    bias_batch = 0 if bias is None or bias.ndim == 1 else bias.stride(0)
    pointers = [x.data_ptr() for x in factors] + [0] * (FACTORS - len(factors))
    return [
        *arguments_of(first),
        *arguments_of(second),
        out.data_ptr(),
        *_output_strides(plan, out),
        0 if bias is None else bias.data_ptr(),
        bias_batch,
        alpha,
        *pointers,
        *(0 if x is None else x.data_ptr() for x in scratch),
        a.k,
        a.batch,
        plan.workers,
        stream,
    ]


def _output_strides(plan: Plan, out: torch.Tensor) -> tuple[int, int]:
    """Elements from one row of the kernel's output (or column, if those are contiguous) to the next; of matrices."""
    m, n, batch = _strides(out)
    rows, columns = out.shape[-2:]
    # swapped, the output's columns are the kernel's rows
    (along_m, along_n), (rows, columns) = ((n, m), (columns, rows)) if plan.swap else ((m, n), (rows, columns))
    step, lines, length = (along_m, rows, columns) if plan.config.out_major == "n" else (along_n, columns, rows)
    # dimensions of one element have no stride of their own, but tensor maps want one, of whole 16 bytes
    step = step or _round_up(length, 16)
    return step, batch or _round_up(step * lines, 16)


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _build(config: GemmConfig) -> CompiledKernel:
    import cuda.bindings.driver as driver
    import cutlass

    from ..kernels.gemm.sm100.dense import Gemm
    from ..kernels.gemm.sm100.operands import ELEMENT_TYPES, OUT_TYPES

    i32, i64 = cutlass.Int32(1), cutlass.Int64(1)
    out, bias = OUT_TYPES[config.out], OUT_TYPES[config.bias_dtype]
    args = [
        example_operand(ELEMENT_TYPES[config.a_format]),
        example_operand(ELEMENT_TYPES[config.b_format]),
        example_pointer(out, 16 if config.vector else out.width // 8),
        (i64, i64),
        example_pointer(bias, bias.width // 8),
        i64,
        cutlass.Float32(1.0),
        tuple(example_pointer(cutlass.Float32, 4) for _ in range(FACTORS)),
        example_pointer(cutlass.Float32, 16),
        example_pointer(cutlass.Int32, 4),
        *[i32] * 3,
        driver.CUstream(0),
    ]
    return build(Gemm(config), args, name="gemm", arch=config.arch.name)
