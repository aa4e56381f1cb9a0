"""Launches the quantization kernels: from a checked request to its result."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import is_grad_enabled

from ..formats import Format
from ..kernels.quantize.arguments import AmaxArguments, Powers, QuantizeArguments, Seed, Strides
from ..kernels.quantize.config import ITEM_BYTES, QuantizeConfig
from ..operand import BlockScaledTensor, row_alignment, span_bytes
from ..planning.quantize import AmaxPlan, QuantizeProblem, choose
from ..quantization.rules import Rule
from ..runtime.apart import Apart
from ..runtime.backend import sm_count
from ..runtime.compile import CompiledKernel
from ..runtime.kernel import Kernel
from ..runtime.launch import Launcher
from ..scale_layout import blocked_bytes, blocked_shape, blocked_stride
from ..target import Target, architecture
from .calls import allocator
from .checks import DTYPE_NAMES
from .dispatch import increment_versions
from .planned import PlannedLaunch, Preparation
from .quantize_request import (
    QuantizeRequest,
    check_out_gradient,
    check_out_memory,
    checked_global_scale,
    global_scale_of,
)

_FIELDS = ("x", "data", "scale", "given", "computed", "low", "high")
"""Of a launch; the last two are the seed's halves."""


class QuantizeCall:
    """The kernels for one kind of request, planned: (L, MN, K) quantized to the bits of the reference.

    Runs on the current stream, without synchronising the device. x is copied first where the kernels cannot read it.
    """

    def __init__(
        self,
        request: QuantizeRequest,
        global_scale: str | float | torch.Tensor | None,
        out: BlockScaledTensor | None,
        target: Target,
        view: Callable[[torch.Tensor], torch.Tensor],
        cluster: int | None = None,
    ) -> None:
        """global_scale: a number or a tensor; "auto": computed from the largest finite magnitude of x, which the same
        kernel or, of a large x, one before it finds; or None. view: from the caller's x to (L, MN, K). cluster: as in
        :func:`choose`."""
        x, format = request.source.matrices, request.format
        self._transposed = lies_transposed(x, request.tile, request.rule.choice)
        readable = x if self._transposed else _readable(x)
        self._view = view if readable is not x else None
        self._stochastic = request.rounding == "stochastic"
        self._global_scale = _kind(global_scale, request)
        in_memory = readable.transpose(1, 2) if self._transposed else readable
        (batch, rows, k), device = x.shape, x.device
        problem = QuantizeProblem(
            format=format,
            rule=request.rule,
            rows=rows,
            k=k,
            batch=batch,
            dtype=DTYPE_NAMES[x.dtype],
            alignment=row_alignment(in_memory, 32),
            scale_layout=request.scale_layout,
            global_scale=self._global_scale,
            stochastic=request.rounding == "stochastic",
            rotation=request.rotation_size,
            tile=request.tile,
            transposed=self._transposed,
        )
        plan = choose(problem, target.arch, sm_count(target, device), cluster)
        signs = 0
        if request.source.rotation is not None:
            signs = sum(1 << i for i, sign in enumerate(request.source.rotation.signs) if sign < 0)
        self._amax = None
        if plan.amax is not None:
            self._amax = _amax_launcher(plan.amax, batch, _byte_strides(in_memory), _int32(signs), target, device)
        # whether the given one can be that of a result, if no gradient is asked for
        self._as_it_is = isinstance(global_scale, torch.Tensor) and not global_scale.ndim
        self._new = Results(request, self._global_scale != "none")
        data_strides = self._new.data_strides if out is None else _byte_strides(out.data)
        columns, atoms = problem.columns, blocked_bytes(rows, problem.columns, 1)
        blocked = request.scale_layout == "blocked"
        arguments = QuantizeArguments(
            x="x",
            data="data",
            scale="scale",
            global_in="given" if self._global_scale == "given" or self._amax is not None else 0,
            global_out="computed" if self.computes else 0,
            rows=rows,
            columns=columns,
            batch=batch,
            x_strides=_byte_strides(in_memory),
            data_strides=data_strides,
            scale_strides=Strides(0, atoms) if blocked else Strides(columns, rows * columns),
            seed=Seed("low", "high") if self._stochastic else Seed(0, 0),
            signs=_int32(signs),
            powers=Powers(1, 1 << 16),
            ctas=plan.ctas,
            walk=plan.walk,
            chunks=plan.chunks,
        )
        result = self._new.data(), self._new.scale(), self._new.factor(), self._new.factor()
        launch = PlannedLaunch(QUANTIZE, plan.config, target, device, arguments, _FIELDS, (readable, *result, 0, 0))
        self.launch, self.places, self._fill = launch.launch, launch.places, launch.values
        if out is not None:
            self._bytes = span_bytes(x), span_bytes(out.data), span_bytes(out.scale)

    def __call__(
        self, x: torch.Tensor, given: str | float | torch.Tensor | None, seed: int, out: BlockScaledTensor | None
    ) -> BlockScaledTensor:
        """x, given, out: the caller's, like those that were planned for. seed: of stochastic rounding."""
        source = x if self._view is None else _readable(self._view(x))
        factor = computed = None
        if out is None:
            data, scale = self._new.data(), self._new.scale()
            if self._global_scale == "given":
                factor = given if self._as_it_is and not given.requires_grad else given_scale(given, x)
            elif self._global_scale == "computed":
                computed = self._new.factor()
        else:
            self._check_memory(x, given, out)
            data, scale, own = out.data, out.scale, out.global_scale
            if self._global_scale == "computed":
                computed = own
            elif self._global_scale == "given":
                factor = own if given is own else given_scale(given, x)
                if factor.data_ptr() != own.data_ptr():
                    own.copy_(factor.reshape(own.shape))
        if self._amax is not None:
            factor = torch.zeros((), dtype=torch.float32, device=x.device)
            self._amax((source.data_ptr(), factor.data_ptr()), (source, factor))
        frame = (source, data, scale, factor, computed, *self._halves(seed))
        self.launch(self._fill(*frame), frame)
        if out is not None:
            if is_grad_enabled():
                # a global scale that was given is only read
                increment_versions((data, scale) if computed is None else (data, scale, computed))
            return out
        return BlockScaledTensor.like(self._new.key, data, scale, factor if computed is None else computed)

    def _halves(self, seed: int) -> tuple[int, int]:
        return (_int32(seed), _int32(seed >> 32)) if self._stochastic else (0, 0)

    def preparation(self, x: torch.Tensor, out: BlockScaledTensor) -> Preparation:
        """This call as one launch from x to ``out``, for ``prepare``."""
        own, scale = out.global_scale, "computed" if self.computes else "given"

        def frame(operands: dict[str, Any]) -> tuple:
            result = operands["out"]
            factors = (None, result.global_scale) if self.computes else (result.global_scale, None)
            return operands["x"], result.data, result.scale, *factors, 0, 0

        of_out = {name: self.places[name] for name in ("data", "scale")}
        written = [(place, span_bytes(getattr(out, name))) for name, place in of_out.items()]
        sizes = {self.places["x"]: span_bytes(x)}
        if own is not None:
            of_out["global_scale"] = place = self.places[scale]
            if self.computes:
                written.append((place, 4))
            else:
                sizes[place] = 4
        operands = {"x": x, "out": out}
        slots = {"x": ((None, self.places["x"]),), "out": tuple(of_out.items())}
        return Preparation(self.launch, self._fill(*frame(operands)), operands, slots, Apart(sizes, written), frame)

    def new(self, x: torch.Tensor, given: str | float | torch.Tensor | None) -> BlockScaledTensor:
        """A result that is not written yet, with the global scale that is given, or room for one."""
        factor = self._new.factor() if self.computes else None
        if self._global_scale == "given":
            factor = given_scale(given, x)
        return BlockScaledTensor.like(self._new.key, self._new.data(), self._new.scale(), factor)

    @property
    def computes(self) -> bool:
        """Whether the kernel computes the global scale."""
        return self._global_scale not in ("none", "given")

    @property
    def launches(self) -> int:
        """How many a call makes; a copy of x counts as one."""
        return 1 + (self._view is not None) + 2 * (self._amax is not None)

    def _check_memory(self, x: torch.Tensor, given: Any, out: BlockScaledTensor) -> None:
        """Raises if the result overlaps itself or an input; looks closely only where something is near."""
        x_bytes, data_bytes, scale_bytes = self._bytes
        own = out.global_scale
        at, data, scale = x.data_ptr(), out.data.data_ptr(), out.scale.data_ptr()
        at_end, data_end, scale_end = at + x_bytes, data + data_bytes, scale + scale_bytes
        near = (
            (at < data_end and data < at_end)
            or (at < scale_end and scale < at_end)
            or (data < scale_end and scale < data_end)
        )
        if own is not None and not near:
            factor = own.data_ptr()
            near = (
                data - 4 < factor < data_end
                or scale - 4 < factor < scale_end
                or at - 4 < factor < at_end
                or own.requires_grad
            )
        if near or (given is not own and isinstance(given, torch.Tensor)):
            check_out_gradient(out)
            check_out_memory(out, x, given)


def _kind(given: str | float | torch.Tensor | None, request: QuantizeRequest) -> str:
    """Which global scale the kernel has: "none", "given", or its own, "computed"."""
    if isinstance(given, str) and given == "auto":
        return "computed" if request.format.has_global_scale else "none"
    return "none" if global_scale_of(given, request) is None else "given"


def given_scale(given: float | torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A given global scale, known to be one, as a tensor of no dimensions where x is."""
    if not isinstance(given, torch.Tensor):
        return checked_global_scale(given, x.device)
    return given.detach().reshape(()) if given.ndim or given.requires_grad else given


class Results:
    """New results of one kind of request, with as many dimensions as the caller's tensor has, if those are two or
    three: ``data()``, ``scale()`` and ``factor()`` make them, and ``key`` is theirs."""

    def __init__(self, request: QuantizeRequest, scaled: bool) -> None:
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
        self.key = BlockScaledTensor(data, scale, factor if scaled else None, format).key
        self.data_strides = _byte_strides(data)
        self.data, self.scale, self.factor = allocator(data), allocator(scale), allocator(factor)


def _amax_launcher(
    plan: AmaxPlan, batch: int, x_strides: Strides, signs: int, target: Target, device: torch.device
) -> Launcher:
    """Raises a magnitude to the largest finite one of x."""
    arguments = AmaxArguments(
        x=0,
        amax=0,
        batch=batch,
        x_strides=x_strides,
        chunks=plan.chunks,
        ctas=plan.ctas,
        signs=signs,
    )
    return AMAX.launcher(
        plan.config, target, device, arguments, lambda x, amax: {"x": (x, False), "amax": (amax, True)}
    )


def _int32(bits: int) -> int:
    """The low 32 bits as ctypes takes them."""
    return ctypes.c_int32(bits & 0xFFFFFFFF).value


def _byte_strides(tensor: torch.Tensor) -> Strides:
    """Strides of (L, MN, …) or (MN, …) in bytes."""
    size = tensor.element_size()
    return Strides(tensor.stride(-2) * size, tensor.stride(0) * size if tensor.ndim == 3 else 0)


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
