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
    cluster: int | None = None,
) -> BlockScaledTensor:
    """``request`` quantized by the kernels: (L, MN, K), the bits of the reference.

    global_scale: a float32 tensor of no dimensions: one pass; "auto": computed from the largest finite magnitude of x,
    which the same kernel or, of a large x, one before it finds; or None. seed: of stochastic rounding. cluster: as in
    :func:`choose`.

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
        given, computed = None, torch.empty((), dtype=torch.float32, device=device)
    problem = QuantizeProblem(
        format=format,
        rule=request.rule,
        rows=rows,
        k=k,
        batch=batch,
        dtype=DTYPE_NAMES[x.dtype],
        alignment=row_alignment(in_memory, 32),
        scale_layout=request.scale_layout,
        global_scale="computed" if computed is not None else "none" if given is None else "given",
        stochastic=seed is not None,
        rotation=request.rotation_size,
        tile=request.tile,
        transposed=transposed,
    )
    plan = choose(problem, target.arch, sm_count(target, device), cluster)
    signs = 0
    if request.source.rotation is not None:
        signs = sum(1 << i for i, sign in enumerate(request.source.rotation.signs) if sign < 0)
    if plan.amax is not None:
        given = torch.zeros((), dtype=torch.float32, device=device)
        _launch_amax(plan.amax, x, in_memory, given, _int32(signs), target)
    data = torch.empty((batch, rows, format.data_columns(k)), dtype=torch.uint8, device=device)
    columns, scale_strides = problem.columns, Strides(problem.columns, rows * problem.columns)
    if request.scale_layout == "blocked":
        flat = torch.empty(blocked_bytes(rows, columns, batch), dtype=torch.uint8, device=device)
        scale, scale_strides = blocked_view(flat, rows, columns, batch), Strides(0, flat.numel() // batch)
    else:
        scale = torch.empty((batch, rows, columns), dtype=torch.uint8, device=device)
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
        chunks=plan.chunks,
    )
    QUANTIZE.run(plan.config, target, device, arguments, lambda: touched)
    return BlockScaledTensor(data, scale, given if computed is None else computed, format)


def _launch_amax(
    plan: AmaxPlan, x: torch.Tensor, in_memory: torch.Tensor, amax: torch.Tensor, signs: int, target: Target
) -> None:
    """Raises ``amax`` to the largest finite magnitude of ``x``."""
    arguments = AmaxArguments(
        x=x.data_ptr(),
        amax=amax.data_ptr(),
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
    arch: str,
    format: Format,
    rule: Rule,
    *,
    rows: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    cluster: int | None = None,
    **more: Any,
) -> tuple[CompiledKernel, QuantizeConfig]:
    """The kernel that quantizes a contiguous matrix of this size on ``arch``, and its configuration.

    Needs no GPU and no tensors. cluster: as in :func:`choose`. ``more``: fields of :class:`QuantizeProblem`.
    """
    name, found = DTYPE_NAMES[dtype], architecture(arch)
    row_bytes = k * ITEM_BYTES[name]
    problem = QuantizeProblem(format, rule, rows, k, dtype=name, alignment=min(row_bytes & -row_bytes, 32), **more)
    config = choose(problem, found, found.sm_count, cluster).config
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
