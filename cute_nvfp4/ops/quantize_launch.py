"""Launches of the quantization kernels, for ``quantize`` and for the operations that quantize what they compute."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..formats import Format
from ..kernels.quantize.arguments import AmaxArguments, Powers, QuantizeArguments, Seed, Strides
from ..kernels.quantize.config import ITEM_BYTES, QuantizeConfig
from ..operand import BlockScaledTensor, row_alignment
from ..planning.quantize import AmaxPlan, QuantizeProblem, choose
from ..quantization.rules import Rule
from ..runtime.compile import CompiledKernel
from ..runtime.kernel import Kernel
from ..runtime.launch import Launcher
from ..scale_layout import blocked_bytes, blocked_shape, blocked_stride
from ..target import Target, architecture
from .checks import DTYPE_NAMES
from .planned import allocator
from .quantize_request import QuantizeRequest, check_out_gradient, checked_global_scale, kind_of_scale


class Results:
    """Makers of new results for one kind of request: ``data()``, ``scale()`` and ``factor()``.

    Results have two or three dimensions, as the caller's tensor has. key: the key of such a result. scale_kind: the
    kind of its global scale, from ``kind_of_scale``.
    """

    def __init__(self, request: QuantizeRequest, global_scale: Any) -> None:
        format, x = request.format, request.source.matrices
        batch, rows, k = x.shape[0], x.shape[1], request.source.k
        lead, columns = (batch, rows) if request.ndim == 3 else (rows,), format.scale_columns(k)
        options = {"dtype": torch.uint8, "device": x.device}
        data = torch.empty((*lead, format.data_columns(k)), **options)
        if request.scale_layout == "blocked":
            sizes = rows, columns, batch
            scale = torch.empty_strided(blocked_shape(*sizes), blocked_stride(*sizes), **options)
        else:
            scale = torch.empty((*lead, columns), **options)
        factor = torch.empty((), dtype=torch.float32, device=x.device)
        self.scale_kind = kind_of_scale(format, global_scale, x.device)
        self.key = BlockScaledTensor(data, scale, factor if self.scale_kind != "none" else None, format).key
        # whether the caller's global scale can be a result's without a copy or a view
        self._as_it_is = isinstance(global_scale, torch.Tensor) and not (
            global_scale.ndim or global_scale.requires_grad
        )
        self.data_strides = byte_strides(data)
        self.data, self.scale, self.factor = allocator(data), allocator(scale), allocator(factor)

    def maker(self, fields: Sequence[str]) -> Callable[..., BlockScaledTensor]:
        """A function of a call's arguments ``fields`` that makes a result to be written; its global scale is the
        caller's, or new memory."""
        key, data, scale, factor, at = self.key, self.data, self.scale, self.factor, fields.index("global_scale")
        kind, as_it_is, new = self.scale_kind, self._as_it_is, BlockScaledTensor.like
        if kind == "none":
            return lambda *args: new(key, data(), scale(), None)
        if kind == "computed":
            return lambda *args: new(key, data(), scale(), factor())
        if as_it_is:
            return lambda *args: new(key, data(), scale(), args[at])
        return lambda *args: new(key, data(), scale(), _caller_scale(args[at], args[0]))


def _caller_scale(global_scale: float | torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The caller's global scale, already checked, as a tensor of no dimensions on the device of ``x``."""
    if not isinstance(global_scale, torch.Tensor):
        return checked_global_scale(global_scale, x.device)
    changed = global_scale.ndim or global_scale.requires_grad
    return global_scale.detach().reshape(()) if changed else global_scale


def quantized_output(operation: Any, r: Any, results: Results) -> dict[str, Any]:
    """Options of ``Operation.planned`` for the output: how a call makes it, and how it stores the caller's global scale
    in ``out``."""
    options: dict[str, Any] = {"new_of": results.maker(operation.fields)}
    if results.scale_kind == "given":
        options["read_only"] = ("out.global_scale",)
        if r.out is not None and r.global_scale is not r.out.global_scale:
            options["before"] = lambda *args: _store_scale(operation, args)
    return options


def _store_scale(operation: Any, args: tuple) -> None:
    """Copies the caller's global scale to that of ``out``, which the kernel reads."""
    r = operation.request(*args)
    own = r.out.global_scale
    check_out_gradient(r.out)
    operation.overlapping(*args)
    factor = _caller_scale(r.global_scale, r[0])
    if factor.data_ptr() != own.data_ptr():
        own.copy_(factor.reshape(own.shape))


def quantize_arguments(
    request: QuantizeRequest, x: torch.Tensor, name: str, out: BlockScaledTensor, kind: str, plan: Any
) -> QuantizeArguments:
    """The arguments that all kernels of quantization have.

    x: what is read, (L, MN, K) or (MN, K) or transposed. name: that of x in the call. out: a result. kind: that of its
    global scale.
    """
    rows, batch = request.source.matrices.shape[1], request.source.matrices.shape[0]
    columns = request.format.scale_columns(request.source.k)
    scales = Strides(0, blocked_bytes(rows, columns, 1))
    return QuantizeArguments(
        x=name,
        data="out.data",
        scale="out.scale",
        global_in="out.global_scale" if kind == "given" else 0,
        global_out="out.global_scale" if kind == "computed" else 0,
        rows=rows,
        columns=columns,
        batch=batch,
        x_strides=byte_strides(x),
        data_strides=byte_strides(out.data),
        scale_strides=scales if request.scale_layout == "blocked" else Strides(columns, rows * columns),
        seed=Seed(0, 0),
        signs=0,
        powers=Powers(1, 1 << 16),
        ctas=plan.ctas,
        walk=plan.walk,
        chunks=None,
    )


class Made(NamedTuple):
    """What a call makes before its launch: the halves of the seed, and the largest magnitude of x."""

    low: int
    high: int
    amax: torch.Tensor


def made_first(seed: int | None, amax: Launcher | None) -> tuple[str, Callable[[tuple, bool], Made], Made]:
    """The ``extra`` of ``Operation.planned`` that makes ``Made`` from the arguments of ``quantize``.

    seed: the position of the seed among them. amax: the launch that finds the largest magnitude of x.
    """
    like = Made(0, 0, torch.empty((), device="meta"))

    def make(args: tuple, kept: bool) -> Made:
        low = high = 0
        if seed is not None:
            low, high = int32(args[seed]), int32(args[seed] >> 32)
        if amax is None:
            return Made(low, high, like.amax)
        x = args[0]
        largest = torch.zeros((), dtype=torch.float32, device=x.device)
        amax((x.data_ptr(), largest.data_ptr()), (x, largest))
        return Made(low, high, largest)

    return "made", make, like


def amax_launcher(
    plan: AmaxPlan, batch: int, x_strides: Strides, signs: int, target: Target, device: torch.device
) -> Launcher:
    """The launch that raises a magnitude to the largest finite one of x."""
    arguments = AmaxArguments(0, 0, batch, x_strides, plan.chunks, plan.ctas, signs)
    return AMAX.launcher(
        plan.config, target, device, arguments, lambda x, amax: {"x": (x, False), "amax": (amax, True)}
    )


def int32(bits: int) -> int:
    """The low 32 bits, as the signed number that ctypes takes."""
    return ctypes.c_int32(bits & 0xFFFFFFFF).value


def byte_strides(tensor: torch.Tensor) -> Strides:
    """The strides of (L, MN, …) or (MN, …) in bytes."""
    size = tensor.element_size()
    return Strides(tensor.stride(-2) * size, tensor.stride(0) * size if tensor.ndim == 3 else 0)


def lies_transposed(x: torch.Tensor, tile: bool, choice: str) -> bool:
    """Whether a kernel reads ``x`` (L, MN, K) as it lies, with MN contiguous and K strided; rows must be aligned words.

    4/6 of tiles does not, because its lanes would wait for the order of its sums. Searches do not either.
    """
    size = x.element_size()
    if x.stride(2) == 1 or x.stride(1) != 1 or x.shape[1] == 1 or (tile and choice) or choice == "optimal":
        return False
    offsets = [x.data_ptr(), x.shape[1] * size, x.stride(2) * size, x.stride(0) * size if x.shape[0] > 1 else 0]
    return x.stride(2) > 0 and x.shape[1] * size < 2**31 and not any(offset % 4 for offset in offsets)


def readable_by(x: torch.Tensor, alignment: int) -> torch.Tensor:
    """``x`` if a kernel can read it, else a copy: K contiguous, and rows that start at multiples of ``alignment``."""
    if (x.stride(-1) == 1 or x.shape[-1] == 1) and row_alignment(x, alignment) == alignment:
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

    Needs no GPU and no tensors. cluster: as in :func:`choose`. more: fields of :class:`QuantizeProblem`.
    """
    name, found = DTYPE_NAMES[dtype], architecture(arch)
    row_bytes = k * ITEM_BYTES[name]
    problem = QuantizeProblem(format, rule, rows, k, dtype=name, alignment=min(row_bytes & -row_bytes, 32), **more)
    config = choose(problem, found, found.sm_count, cluster).config
    return QUANTIZE.compile(config), config


def _host(config: QuantizeConfig) -> Callable[..., Any]:
    from ..kernels.quantize.row import QuantizeRow
    from ..kernels.quantize.searched import QuantizeSearched
    from ..kernels.quantize.tile import QuantizeTile
    from ..kernels.quantize.transposed import QuantizeTransposed

    rows = QuantizeSearched if config.error_table else QuantizeRow
    kernel = QuantizeTransposed if config.transposed else QuantizeTile if config.tile else rows
    return kernel(config)


def _amax_host(config: QuantizeConfig) -> Callable[..., Any]:
    from ..kernels.quantize.amax import Amax
    from ..kernels.quantize.transposed import AmaxTransposed

    return AmaxTransposed(config) if config.transposed else Amax(config)


QUANTIZE = Kernel("quantize", QuantizeArguments, _host)
AMAX = Kernel("amax", AmaxArguments, _amax_host)
