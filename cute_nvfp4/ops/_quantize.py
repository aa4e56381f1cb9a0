"""The fused kernels of ``cute_nvfp4.quantization.quantize``: which requests they take, and how they are run."""

from __future__ import annotations

import contextlib
import ctypes
import functools

import torch

from .. import target as targets
from ..compile import CompiledKernel, build, compile_cached
from ..errors import OperandError, explain
from ..formats import Format
from ..kernels.quantize_config import ITEM_BYTES, ROW_STEP, WARP, QuantizeConfig
from ..launch import launcher
from ..operand import BlockScaledTensor
from ..quantization.rules import Rule
from ..scale_layout import ATOM_COLS, ATOM_ROWS, blocked_bytes, blocked_view
from ..target import Architecture
from ._checks import DTYPE_NAMES

__all__ = ["compile_quantize", "quantize_fused", "why_not_fused"]

_NOTHING = contextlib.nullcontext()
_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
# x, data, scale, global_in, global_out | rows, columns, batch | strides | seed | powers | blocks, steps | stream
_TYPES = (*[_POINTER] * 5, *[_I32] * 3, *[_I64] * 6, *[_I32] * 9, _POINTER)
_MAX_GRID = 65535
_CHOICES = ("", "mse", "mae", "abs_max")


def why_not_fused(shape: tuple[int, int, int], format: Format, rule: Rule, *, stochastic: bool = False) -> str:
    """Why the kernels cannot quantize matrices of ``shape`` (L, MN, K) like that, or an empty string."""
    batch, _, k = shape
    if format.name != "nvfp4":
        return explain("format for the fused kernels", got=format.name, expected="nvfp4")
    if rule.choice not in _CHOICES:
        return explain("rule for the fused kernels", got=repr(rule.name), expected="one without a search")
    if stochastic:
        return explain("rounding for the fused kernels", got="'stochastic'", expected="'nearest'")
    if k % format.block:
        return explain(f"K of {format.name}", got=k, expected=f"a multiple of {format.block}")
    if batch > _MAX_GRID:
        return explain("matrices for the fused kernels", got=batch, expected=f"at most {_MAX_GRID}")
    return ""


def quantize_fused(
    x: torch.Tensor,
    format: Format,
    rule: Rule,
    *,
    global_scale: torch.Tensor | None = None,
    scale_layout: str = "blocked",
    backend: targets.Backend = "auto",
) -> BlockScaledTensor:
    """Quantizes ``x`` (L, MN, K) in one launch: the same bits as the torch backend.

    Args:
        x: float32, float16 or bfloat16, K contiguous (others are copied); K a multiple of the format's block.
        format, rule: what ``quantization.rules`` resolves names to.
        global_scale: None, or one float32 element on the device of ``x``.
        scale_layout: "blocked" or "rowmajor".
        backend: "cuda", "sim", or "auto", which is where ``x`` is.

    Runs on the current stream, without synchronising the device.

    Raises:
        OperandError: the kernels cannot do this (:func:`why_not_fused`).
        TargetError: the backend cannot run tensors of this device, or is unknown.
    """
    reason = why_not_fused(tuple(x.shape), format, rule)
    if reason:
        raise OperandError(reason)
    resolved = targets.resolve(backend, x.device)
    x = _readable(x)
    batch, rows, k = x.shape
    columns = format.scale_columns(k)
    data = torch.empty((batch, rows, format.data_columns(k)), dtype=torch.uint8, device=x.device)
    if scale_layout == "blocked":
        flat = torch.empty(blocked_bytes(rows, columns, batch), dtype=torch.uint8, device=x.device)
        scale = blocked_view(flat, rows, columns, batch)
        scale_strides = (0, flat.numel() // batch)
    else:
        scale = torch.empty((batch, rows, columns), dtype=torch.uint8, device=x.device)
        scale_strides = (columns, rows * columns)
    config = _config(x, rule, format, resolved.arch, scale_layout, "none" if global_scale is None else "given")
    run = launcher(_compile(config), resolved, _TYPES)
    arguments = [
        x.data_ptr(),
        data.data_ptr(),
        scale.data_ptr(),
        0 if global_scale is None else global_scale.data_ptr(),
        0,
        rows,
        columns,
        batch,
        *(stride * x.element_size() for stride in (x.stride(1), x.stride(0))),
        data.stride(1),
        data.stride(0),
        *scale_strides,
        0,
        0,
        1,
        1 << 16,
        *_grid(config, rows, columns, targets.sm_count(resolved, x.device) // batch),
    ]
    if resolved.backend == "sim":
        tensors = {"x": (x, False), "data": (data, True), "scale": (scale, True)}
        if global_scale is not None:
            tensors["global_scale"] = (global_scale, False)
        run([*arguments, 0], tensors)
    else:
        with torch.cuda.device(x.device) if x.device.index != torch.cuda.current_device() else _NOTHING:
            run([*arguments, torch.cuda.current_stream(x.device).cuda_stream], {})
    return BlockScaledTensor(data, scale, global_scale, format)


def _grid(config: QuantizeConfig, rows: int, columns: int, sm_count: int) -> tuple[int, int, int, int, int]:
    """Blocks of threads for a matrix, as many as fit on the device at once if there is work for them; and ``steps``."""
    chunks = -(-columns // WARP)
    units = chunks * -(-rows // ATOM_ROWS) * (ROW_STEP // config.warps)
    blocks = max(1, min(units, config.min_blocks * sm_count))
    return blocks, chunks, units, blocks // chunks, blocks % chunks


def _readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` if the kernel can read it, else a copy: K contiguous, and rows that start at multiples of four bytes."""
    size = x.element_size()
    strides = [stride * size for length, stride in zip(x.shape[:-1], x.stride()) if length > 1]
    plain = x.stride(-1) == 1 or x.shape[-1] == 1
    if plain and not any(place % 4 for place in (x.data_ptr(), *strides)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _alignment(x: torch.Tensor) -> int:
    """Largest power of two, up to 32 bytes, that divides the address of every row."""
    bits = x.data_ptr() | 32
    for length, stride in zip(x.shape[:-1], x.stride()):
        bits |= stride * x.element_size() if length > 1 else 0
    return bits & -bits


def _config(
    x: torch.Tensor, rule: Rule, format: Format, arch: Architecture, layout: str, global_scale: str
) -> QuantizeConfig:
    _, rows, k = x.shape
    return _choose(rule, format, arch, DTYPE_NAMES[x.dtype], rows, k, _alignment(x), layout, global_scale)


@functools.lru_cache(maxsize=1024)
def _choose(
    rule: Rule,
    format: Format,
    arch: Architecture,
    dtype: str,
    rows: int,
    k: int,
    alignment: int,
    layout: str,
    global_scale: str,
) -> QuantizeConfig:
    columns = format.scale_columns(k)
    return QuantizeConfig(
        arch=arch,
        element=format.element,
        scale=format.scale,
        block=format.block,
        top=format.max_value if rule.max_code is None else rule.max_code,
        min_scale=rule.min_scale,
        exponent=rule.exponent,
        choice=rule.choice,
        full_scale=rule.full_scale,
        dtype=dtype,
        global_scale=global_scale,
        layout=layout,
        scale_word=columns % ATOM_COLS == 0,
        ragged=rows % ATOM_ROWS != 0 or columns % WARP != 0,
        bulk=alignment >= 16,
        vector_bytes=min(arch.vector_bytes, alignment),
    )


def compile_quantize(
    arch: str,
    format: Format,
    rule: Rule,
    *,
    rows: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "blocked",
    global_scale: str = "given",
) -> tuple[CompiledKernel, QuantizeConfig]:
    """The kernel that quantizes contiguous matrices of these sizes on ``arch``, and its configuration.

    Needs no GPU and no tensors. ``global_scale``: "none" or "given".
    """
    reason = why_not_fused((1, rows, k), format, rule)
    if reason:
        raise OperandError(reason)
    name = DTYPE_NAMES[dtype]
    row_bytes = k * ITEM_BYTES[name]
    alignment = min(row_bytes & -row_bytes, 32)
    arch_ = targets.architecture(arch)
    config = _choose(rule, format, arch_, name, rows, k, alignment, scale_layout, global_scale)
    return _compile(config), config


def _compile(config: QuantizeConfig) -> CompiledKernel:
    return compile_cached(("quantize", config), lambda: _build(config))


def _build(config: QuantizeConfig) -> CompiledKernel:
    import cuda.bindings.driver as driver
    import cutlass
    from cutlass.cute import AddressSpace
    from cutlass.cute.runtime import make_ptr

    from ..kernels.quantize import Quantize

    def pointer(dtype: type, alignment: int) -> object:
        # an address that is never read: compiling needs only dtype, space and alignment
        return make_ptr(dtype, alignment, AddressSpace.gmem, assumed_align=alignment)

    byte, i32, i64 = cutlass.Uint8, cutlass.Int32(1), cutlass.Int64(1)
    args = [
        pointer(byte, config.vector_bytes),
        pointer(byte, 8),
        pointer(byte, 16 if config.layout == "blocked" else 4 if config.scale_word else 1),
        pointer(cutlass.Float32, 4),
        pointer(cutlass.Float32, 4),
        *[i32] * 3,
        *[(i64, i64)] * 3,
        (i32, i32),
        (i32, i32),
        i32,
        (i32, i32, i32, i32),
        driver.CUstream(0),
    ]
    return build(Quantize(config), args, name="quantize", arch=config.arch.name)
