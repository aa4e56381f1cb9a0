"""gemv: validate, choose a backend and a variant, compile once, launch."""

from __future__ import annotations

import contextlib
import ctypes
import functools

import torch

from .. import target as targets
from ..errors import OperandError, explain
from ..formats import NVFP4
from ..kernels.gemv.config import GemvConfig
from ..operand import BlockScaledTensor, check_pair
from ..planning.gemv import GemvProblem, choose
from ..reference import gemv_reference
from ..runtime.compile import CompiledKernel, build, compile_cached
from ..runtime.launch import Launcher, launcher
from .checks import DTYPE_NAMES, check_dtype, check_format, checked_output, number, parts

__all__ = ["compile_gemv", "gemv"]

_NOTHING = contextlib.nullcontext()
_POINTER, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
# a, sfa, b, sfb, c, a_global, b_global | alpha | m, k, batch | strides | blocks, stream
_GEMV_TYPES = (*[_POINTER] * 7, _F32, *[_I32] * 3, *[_I64] * 8, _I32, _POINTER)


def gemv(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    *,
    alpha: float | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: targets.Backend = "auto",
) -> torch.Tensor:
    """c = alpha · A · b for NVFP4 operands: (L, M), or (M,) if ``a`` has no batch dimension.

    Args:
        a: (L, M, K) or (M, K), scales blocked or row-major, with or without a global scale.
        b: (L, N, K) or (N, K) with N ≥ 1, of which row 0 is the vector (the padding of a 128-row b is not read).
        alpha: a number that multiplies the result; None is 1.
        out: where to put the result, of that shape and of dtype float16, bfloat16 or float32; any strides, but no
            element may be written twice and nothing may overlap the operands. Every element is written.
        out_dtype: dtype of a new result (float16 by default); with ``out`` it must be None or that of ``out``.
        backend: ``auto`` (CUDA tensors on their GPU, CPU tensors in the simulator), ``cuda``, ``sim``, ``reference``.

    Products and the sums of each block of 16 are exact; sums over blocks are in float32, in a fixed order, so the
    result repeats bit for bit. It is rounded once to the output's dtype. NaN scales make their row NaN.

    Runs on the current stream, without synchronising the device or allocating anything but the result.

    Raises:
        OperandError, OperandTypeError: operands that do not fit together, or cannot be computed with.
        TargetError: the backend cannot run tensors of this device, or is unknown.
    """
    check_pair(a, b)
    check_format("a", a, (NVFP4,))
    check_format("b", b, (NVFP4,))
    if a.is_batched != b.is_batched:
        raise OperandError(explain("batch dimension", got=f"a {a.data.ndim}-d, b {b.data.ndim}-d", expected="the same"))
    shape = (a.batch, a.rows) if a.is_batched else (a.rows,)
    inputs = {} if out is None else parts({"a": a, "b": b})
    out = checked_output(inputs, a.device, shape, out, out_dtype)
    scalar = number("alpha", alpha)
    resolved = targets.resolve(backend, a.device)
    if resolved.backend == "reference":
        return out.copy_(gemv_reference(a, b, alpha=scalar, out_dtype=out.dtype))
    run, blocks = _plan(_problem(a, b, out), resolved, targets.sm_count(resolved, a.device))
    if resolved.backend == "sim":
        run(_arguments(a, b, out, scalar, blocks, 0), _tensors(a, b, out))
        return out
    # the DSL's host code launches on the current device
    with torch.cuda.device(a.device) if a.device.index != torch.cuda.current_device() else _NOTHING:
        run(_arguments(a, b, out, scalar, blocks, torch.cuda.current_stream(a.device).cuda_stream), {})
    return out


@functools.lru_cache(maxsize=4096)
def _plan(problem: GemvProblem, target: targets.Target, sm_count: int) -> tuple[Launcher, int]:
    """The launcher of the kernel that runs ``problem``, and its blocks of threads for each matrix."""
    config, blocks = choose(problem, target.arch, sm_count)
    return launcher(_compile(config), target, _GEMV_TYPES), blocks


def _tensors(a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor) -> dict[str, tuple[torch.Tensor, bool]]:
    """Every tensor that the kernel may touch, by name, and whether it may write it."""
    tensors = {"a": (a.data, False), "sfa": (a.scale, False), "b": (b.data, False), "sfb": (b.scale, False)}
    tensors["c"] = (out, True)
    for name, operand in (("a_global", a), ("b_global", b)):
        if operand.global_scale is not None:
            tensors[name] = (operand.global_scale, False)
    return tensors


def compile_gemv(
    arch: str,
    *,
    m: int,
    k: int,
    batch: int = 1,
    scales: str = "blocked",
    out_dtype: torch.dtype = torch.float16,
) -> tuple[CompiledKernel, GemvConfig]:
    """The kernel that ``gemv`` would run for contiguous operands of these sizes on ``arch``, and its configuration.

    Needs no GPU and no tensors.
    """
    if min(m, k, batch) < 1 or k % NVFP4.block:
        raise OperandError(explain("m, k, batch", got=(m, k, batch), expected="positive, and k a multiple of 16"))
    if scales not in ("blocked", "rowmajor"):
        raise OperandError(explain("scales", got=repr(scales), expected="'blocked' or 'rowmajor'"))
    check_dtype("out_dtype", out_dtype)
    arch_ = targets.architecture(arch)
    alignment = min((k // 2) & -(k // 2), 32)
    problem = GemvProblem(m, k, batch, alignment, scales, scales, (k // 16) % 4 == 0, out=DTYPE_NAMES[out_dtype])
    config, _ = choose(problem, arch_, arch_.sm_count)
    return _compile(config), config


def _word_aligned(operand: BlockScaledTensor) -> bool:
    """Whether four row-major scales can be read at once: address and strides are multiples of four."""
    scale = operand.scale
    strides = [stride for size, stride in zip(scale.shape[:-1], scale.stride()) if size > 1]
    return not any(x % 4 for x in (scale.data_ptr(), *strides))


def _problem(a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor) -> GemvProblem:
    return GemvProblem(
        a.rows,
        a.k,
        a.batch,
        min(a.data_alignment, 32),
        a.scale_layout,
        b.scale_layout,
        a.scale_layout == "blocked" or _word_aligned(a),
        a.global_scale is not None,
        b.global_scale is not None,
        DTYPE_NAMES[out.dtype],
    )


def _strides(tensor: torch.Tensor) -> tuple[int, int]:
    """(row, batch) strides of (L, MN, …) or (MN, …)."""
    return (tensor.stride(1), tensor.stride(0)) if tensor.ndim == 3 else (tensor.stride(0), 0)


def _scale_strides(operand: BlockScaledTensor) -> tuple[int, int]:
    """(row, batch) strides of the scales in bytes; blocked scales have no rows of their own."""
    if operand.scale_layout == "rowmajor":
        return _strides(operand.scale)
    return 0, operand.scale.numel() // operand.batch


def _arguments(
    a: BlockScaledTensor, b: BlockScaledTensor, out: torch.Tensor, alpha: float, blocks: int, stream: int
) -> list:
    global_scales = [x.global_scale for x in (a, b)]
    return [
        a.data.data_ptr(),
        a.scale.data_ptr(),
        b.data.data_ptr(),
        b.scale.data_ptr(),
        out.data_ptr(),
        *(0 if scale is None else scale.data_ptr() for scale in global_scales),
        alpha,
        a.rows,
        a.k,
        a.batch,
        *_strides(a.data),
        *_scale_strides(a),
        _strides(b.data)[1],
        _scale_strides(b)[1],
        *((out.stride(1), out.stride(0)) if out.ndim == 2 else (out.stride(0), 0)),
        blocks,
        stream,
    ]


def _compile(config: GemvConfig) -> CompiledKernel:
    return compile_cached(("gemv", config), lambda: _build(config))


def _build(config: GemvConfig) -> CompiledKernel:
    import cuda.bindings.driver as driver
    import cutlass
    from cutlass.cute import AddressSpace
    from cutlass.cute.runtime import make_ptr

    from ..kernels.gemv.kernel import OUT_TYPES, Gemv

    def pointer(dtype: type, alignment: int) -> object:
        # an address that is never read: compiling needs only dtype, space and alignment
        return make_ptr(dtype, alignment, AddressSpace.gmem, assumed_align=alignment)

    out_type = OUT_TYPES[config.out]
    byte, i32, i64 = cutlass.Uint8, cutlass.Int32(1), cutlass.Int64(1)
    blocked = 16
    args = [
        pointer(byte, config.vector_bytes),
        pointer(byte, blocked if config.a_scale == "blocked" else 4 if config.scale_word else 1),
        pointer(byte, 8),
        pointer(byte, blocked if config.b_scale == "blocked" else 1),
        pointer(out_type, out_type.width // 8),
        pointer(cutlass.Float32, 4),
        pointer(cutlass.Float32, 4),
        cutlass.Float32(1.0),
        *[i32] * 3,
        (i64, i64),
        (i64, i64),
        i64,
        i64,
        (i64, i64),
        i32,
        driver.CUstream(0),
    ]
    return build(Gemv(config), args, name="gemv", arch=config.arch.name)
