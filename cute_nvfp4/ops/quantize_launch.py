"""Launches the quantization kernels: from a checked request to its result."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from ..formats import Format
from ..kernels.quantize.arguments import AmaxArguments, Powers, QuantizeArguments, Seed, Strides
from ..kernels.quantize.config import ITEM_BYTES, QuantizeConfig
from ..operand import BlockScaledTensor, row_alignment
from ..planning.quantize import AmaxPlan, QuantizeProblem, choose
from ..quantization.rules import Rule
from ..runtime.backend import sm_count
from ..runtime.compile import CompiledKernel
from ..runtime.kernel import Kernel
from ..scale_layout import blocked_bytes, blocked_view
from ..target import Target, architecture
from .checks import DTYPE_NAMES, tensors
from .quantize_request import QuantizeRequest


def launch_quantize(
    request: QuantizeRequest,
    global_scale: torch.Tensor | str | None,
    seed: int | None,
    target: Target,
    out: BlockScaledTensor | None = None,
) -> BlockScaledTensor:
    """``request`` quantized by the kernels: (L, MN, K), the bits of the reference.

    global_scale: a float32 tensor of no dimensions: one pass; "auto": a pass over x finds its largest finite magnitude,
    and the next one computes the global scale from it; or None. seed: of stochastic rounding. out: a checked one, to
    write to.

    Runs on the current stream, without synchronising the device.
    """
    x, format = request.source.matrices, request.format
    transposed = lies_transposed(x, request.tile, request.rule.choice)
    x = x if transposed else _readable(x)
    in_memory = x.transpose(1, 2) if transposed else x
    device, (batch, rows, k) = x.device, x.shape
    # the scale that the kernel reads, and the one that it writes
    given, computed = global_scale, None
    if isinstance(global_scale, str):
        given = torch.zeros((), dtype=torch.float32, device=device)
        computed = torch.empty((), dtype=torch.float32, device=device) if out is None else out.global_scale
    elif out is not None and given is not None:
        # the kernel reads what the result will have
        if given.data_ptr() != out.global_scale.data_ptr():
            out.global_scale.copy_(given.reshape(out.global_scale.shape))
        given = out.global_scale
    problem = QuantizeProblem(
        format=format,
        rule=request.rule,
        rows=rows,
        k=k,
        batch=batch,
        dtype=DTYPE_NAMES[x.dtype],
        alignment=row_alignment(in_memory, 32),
        scale_layout=request.scale_layout,
        global_scale="none" if given is None else "given" if computed is None else "amax",
        stochastic=seed is not None,
        rotation=request.rotation_size,
        tile=request.tile,
        transposed=transposed,
    )
    plan = choose(problem, target.arch, sm_count(target, device))
    signs = 0
    if request.source.rotation is not None:
        signs = sum(1 << i for i, sign in enumerate(request.source.rotation.signs) if sign < 0)
    if plan.amax is not None:
        _launch_amax(plan.amax, x, in_memory, given, _int32(signs), target)
    columns = problem.columns
    data, scale = _new(request, rows, columns) if out is None else (out.data, out.scale)
    data = data if data.ndim == 3 else data.unsqueeze(0)
    blocked = request.scale_layout == "blocked"
    scale_strides = Strides(0 if blocked else columns, scale.numel() // batch)
    touched = tensors({"x": x, "global_in": given}, {"data": data, "scale": scale, "global_out": computed})
    arguments = QuantizeArguments(
        x=x.data_ptr(),
        data=data.data_ptr(),
        scale=scale.data_ptr(),
        global_in=0 if given is None else given.data_ptr(),
        global_out=0 if computed is None else computed.data_ptr(),
        rows=rows,
        columns=columns,
        batch=batch,
        x_strides=_byte_strides(in_memory),
        data_strides=_byte_strides(data),
        scale_strides=scale_strides,
        seed=Seed(_int32(seed or 0), _int32((seed or 0) >> 32)),
        signs=_int32(signs),
        powers=Powers(1, 1 << 16),
        ctas=plan.ctas,
        walk=plan.walk,
    )
    QUANTIZE.run(plan.config, target, device, arguments, lambda: touched)
    return BlockScaledTensor(data, scale, given if computed is None else computed, format) if out is None else out


def _new(request: QuantizeRequest, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales of matrices (L, MN, K), not written yet."""
    x, format = request.source.matrices, request.format
    batch = x.shape[0]
    data = x.new_empty((batch, rows, format.data_columns(request.source.k)), dtype=torch.uint8)
    if request.scale_layout == "rowmajor":
        return data, x.new_empty((batch, rows, columns), dtype=torch.uint8)
    flat = x.new_empty(blocked_bytes(rows, columns, batch), dtype=torch.uint8)
    return data, blocked_view(flat, rows, columns, batch)


def _launch_amax(
    plan: AmaxPlan, x: torch.Tensor, in_memory: torch.Tensor, amax: torch.Tensor, signs: int, target: Target
) -> None:
    """Raises ``amax`` to the largest finite magnitude of ``x``."""
    arguments = AmaxArguments(
        x=x.data_ptr(),
        amax=amax.data_ptr(),
        rows=plan.rows,
        row_bytes=plan.row_bytes,
        batch=x.shape[0],
        x_strides=_byte_strides(in_memory),
        chunks=plan.chunks,
        ctas=plan.ctas,
        signs=signs,
    )
    AMAX.run(plan.config, target, x.device, arguments, lambda: {"x": (x, False), "amax": (amax, True)})


def _int32(bits: int) -> int:
    """The low 32 bits as ctypes takes them."""
    return ctypes.c_int32(bits & 0xFFFFFFFF).value


def _byte_strides(tensor: torch.Tensor) -> Strides:
    """Strides of (L, MN, …) in bytes."""
    return Strides(tensor.stride(1) * tensor.element_size(), tensor.stride(0) * tensor.element_size())


def lies_transposed(x: torch.Tensor, tile: bool, choice: str) -> bool:
    """Whether ``x`` (L, MN, K) is read where it lies, K strided: MN contiguous, rows of words, whole and aligned.

    4/6 of tiles is not: its sums have an order that lanes would have to wait for. Nor are searches.
    """
    size = x.element_size()
    if x.stride(2) == 1 or x.stride(1) != 1 or x.shape[1] == 1 or (tile and choice) or choice == "optimal":
        return False
    places = [x.data_ptr(), x.shape[1] * size, x.stride(2) * size, x.stride(0) * size if x.shape[0] > 1 else 0]
    return x.stride(2) > 0 and x.shape[1] * size < 2**31 and not any(place % 4 for place in places)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """``x`` if the kernel can read it, else a copy: K contiguous, and rows that start at multiples of four bytes."""
    if (x.stride(-1) == 1 or x.shape[-1] == 1) and row_alignment(x, 4) == 4:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def compile_quantize(
    arch: str, format: Format, rule: Rule, *, rows: int, k: int, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> tuple[CompiledKernel, QuantizeConfig]:
    """The kernel that quantizes a contiguous matrix of this size on ``arch``, and its configuration.

    Needs no GPU and no tensors. ``more``: fields of :class:`QuantizeProblem`.
    """
    name, found = DTYPE_NAMES[dtype], architecture(arch)
    row_bytes = k * ITEM_BYTES[name]
    problem = QuantizeProblem(format, rule, rows, k, dtype=name, alignment=min(row_bytes & -row_bytes, 32), **more)
    config = choose(problem, found, found.sm_count).config
    return QUANTIZE.compile(config), config


def _host(config: QuantizeConfig) -> Callable[..., Any]:
    from ..kernels.quantize.row import QuantizeRow
    from ..kernels.quantize.tile import QuantizeTile
    from ..kernels.quantize.transposed import QuantizeTransposed

    kernel = QuantizeTransposed if config.transposed else QuantizeTile if config.tile else QuantizeRow
    return kernel(config)


def _amax_host(config: QuantizeConfig) -> Callable[..., Any]:
    from ..kernels.quantize.amax import Amax
    from ..kernels.quantize.transposed import AmaxTransposed

    return AmaxTransposed(config) if config.transposed else Amax(config)


QUANTIZE = Kernel("quantize", QuantizeArguments, _host)
AMAX = Kernel("amax", AmaxArguments, _amax_host)
