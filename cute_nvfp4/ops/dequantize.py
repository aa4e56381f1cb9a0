"""``dequantize``: the values of a ``BlockScaledTensor``; the kernel and torch give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..grouped_rows import GroupedRows
from ..kernels.dequantize.config import (
    SLOTS,
    DequantizeArguments,
    DequantizeConfig,
    GroupedDequantizeArguments,
    GroupedDequantizeConfig,
    GroupedMatrix,
    GroupRowsArguments,
    GroupRowsConfig,
)
from ..kernels.gemm.grouped_config import table_size
from ..kernels.quantize.arguments import Strides
from ..lazy import Lazily
from ..operand import BlockScaledTensor, OperandKey
from ..quantization.hadamard import Hadamard, resolve_hadamard
from ..runtime.backend import Backend, resolve
from ..runtime.kernel import Kernel
from ..runtime.launch import Launcher, Tensors
from ..target import Target
from .arguments import OPERAND
from .checks import DTYPE_NAMES, checked_output, inputs, reads, tensors
from .operation import Operation
from .planned import PlannedCall, allocator


def dequantize(
    x: BlockScaledTensor,
    dtype: torch.dtype = torch.float32,
    *,
    k: int | None = None,
    hadamard: Hadamard | int | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """The values of ``x``, (MN, K) or (L, MN, K).

    ``hadamard``, if it was given to ``quantize``, rotates back; ``k`` then drops what ``pad`` added beyond it.
    ``backend``: a kernel gives torch's bits in one launch; torch computes float64, and traced and differentiated calls.

    Raises:
        OperandError, OperandTypeError: an argument does not fit.
        TargetError: the backend is unknown, or cannot run tensors of this device.
    """
    if not isinstance(x, BlockScaledTensor):
        raise OperandTypeError.of("x to dequantize", got=type(x).__name__, expected="BlockScaledTensor")
    rotation = resolve_hadamard(hadamard)
    if rotation is None:
        values = DEQUANTIZE.call(x, dtype, None, backend)
    else:
        values = rotation.unrotate(DEQUANTIZE.call(x, torch.float32, None, backend)).to(dtype)
    if k is None:
        return values
    if not 0 < k <= x.k:
        raise OperandError.of("k to keep", got=k, expected=f"1 … {x.k}")
    return values[..., :k]


def values_of(
    x: BlockScaledTensor, dtype: torch.dtype, out: torch.Tensor | None = None, backend: Backend = "auto"
) -> torch.Tensor:
    """The values of ``x``; ``dequantize`` without its options."""
    return DEQUANTIZE.call(x, dtype, out, backend)


def _check(r: Any) -> torch.Tensor:
    shape = (*r.x.data.shape[:-1], r.x.k)
    if r.out is None:
        return torch.empty(shape, dtype=r.dtype, device=r.x.device)
    return checked_output(reads(r), r.x.device, shape, r.out, r.dtype)


def _target(r: Any, out: torch.Tensor) -> Target:
    kernel = r.dtype in DTYPE_NAMES and r.x.key.plain
    return resolve(r.backend if kernel else "reference", r.x.device)


def _plan(r: Any, target: Target) -> PlannedCall:
    key = r.x.key
    config, arguments = dequantization(key, r.dtype, target, key.has_global_scale)
    return DEQUANTIZE.planned(KERNEL, config, target, arguments, r)


def _reference(r: Any) -> torch.Tensor:
    values = r.x.dequantize(r.dtype)
    return values if r.out is None else r.out.copy_(values)


def dequantization(
    key: OperandKey,
    dtype: torch.dtype,
    target: Target,
    scaled: bool,
    names: tuple[str, str] = ("x", "out"),
    order: str = "columns",
) -> tuple[DequantizeConfig, DequantizeArguments]:
    """The configuration and the kernel's record for operands with this key.

    scaled: whether the global scale multiplies. names: those of the operand and of its values. order: as in
    ``DequantizeConfig``.
    """
    config = DequantizeConfig(key.format, DTYPE_NAMES[dtype], key.scale_layout, scaled, target.arch, order)
    x, out = names
    arguments = DequantizeArguments(
        data=f"{x}.data",
        scale=f"{x}.scale",
        global_scale=f"{x}.global_scale" if scaled else None,
        out=out,
        rows=key.rows,
        k=key.k,
        batch=key.batch,
        data_strides=Strides(*key.strides),
        scale_strides=Strides(*key.scale_strides),
        out_batch_stride=key.rows * key.k * dtype.itemsize,
    )
    return config, arguments


def group_rows_dequantization(
    a: GroupedRows, dtype: torch.dtype, target: Target, names: tuple[str, str], order: str = "columns"
) -> tuple[GroupRowsConfig, GroupRowsArguments]:
    """The configuration and the kernel's record for rows of groups; arguments as for ``dequantization``."""
    capacity = table_size("rows", a.groups)["capacity"]
    config = GroupRowsConfig(a.format, DTYPE_NAMES[dtype], "blocked", False, target.arch, order, capacity)
    x, out = names
    parts = f"{x}.data", f"{x}.scale", f"{x}.offsets"
    return config, GroupRowsArguments(*parts, out, a.rows, a.k, a.data.stride(0), a.atoms, a.groups)


class ListDequantizeCall:
    """Decodes a list of matrices with these keys, without their global scales, one after the other into one tensor.

    One launch decodes up to sixteen matrices of a format. addresses: the addresses of all data, then of all scales.
    """

    def __init__(self, keys: Sequence[OperandKey], dtype: torch.dtype, target: Target, order: str = "columns") -> None:
        self._offsets = [*accumulate([key.rows * key.k * dtype.itemsize for key in keys], initial=0)]
        device, size = keys[0].device, self._offsets.pop()
        self.new = allocator(torch.empty(size // dtype.itemsize, dtype=dtype, device=device))
        self._parts: list[tuple[Callable[[Sequence[int]], tuple[int, ...]], Launcher]] = []
        for format in dict.fromkeys(key.format for key in keys):
            mine = [i for i, key in enumerate(keys) if key.format == format]
            for start in range(0, len(mine), SLOTS[-1]):
                self._add([(i, keys[i]) for i in mine[start : start + SLOTS[-1]]], len(keys), dtype, target, order)

    def _add(
        self, keys: Sequence[tuple[int, OperandKey]], total: int, dtype: torch.dtype, target: Target, order: str
    ) -> None:
        """Adds the launch for some matrices. keys: their indices among all, and their keys."""
        first, slots = keys[0][1], next(x for x in SLOTS if x >= len(keys))
        config = GroupedDequantizeConfig(first.format, DTYPE_NAMES[dtype], "blocked", False, target.arch, order, slots)
        groups = [GroupedMatrix(0, 0, key.rows, key.k, key.strides[0], self._offsets[i]) for i, key in keys]
        ctas = max(config.ctas(key.rows, key.k) for _, key in keys)
        padding = [groups[0]._replace(rows=0)] * (slots - len(keys))
        arguments = GroupedDequantizeArguments((*groups, *padding), 0, ctas, len(keys))
        launch = GROUPED.launcher(config, target, first.device, arguments, _touched_list)
        order = [i for i, _ in keys] + [keys[0][0]] * len(padding)
        self._parts.append((itemgetter(*[place for i in order for place in (i, total + i)]), launch))

    def numbers(self, memory: torch.Tensor) -> list[int]:
        """The addresses of the decoded matrices."""
        first = memory.data_ptr()
        return [first + offset for offset in self._offsets]

    def __call__(self, addresses: Sequence[int], memory: torch.Tensor, matrices: Sequence[BlockScaledTensor]) -> None:
        for part, launch in self._parts:
            launch((*part(addresses), memory.data_ptr()), (matrices, memory))

    def fixed(
        self, addresses: Sequence[int], memory: torch.Tensor, matrices: Sequence[BlockScaledTensor]
    ) -> list[Callable[[], None]]:
        """The launches with these addresses, one function each."""
        return [launch.fixed((*part(addresses), memory.data_ptr()), (matrices, memory)) for part, launch in self._parts]


def _touched_list(matrices: Sequence[BlockScaledTensor], memory: torch.Tensor) -> Tensors:
    return tensors(inputs(**{f"matrix {i}": x for i, x in enumerate(matrices)}), {"decoded": memory})


DEQUANTIZE = Operation(
    values_of,
    {"x": OPERAND},
    check=_check,
    reference=_reference,
    plan=_plan,
    target=_target,
    store=None,
)
KERNEL = Kernel("dequantize", DequantizeArguments, Lazily("kernels.dequantize.kernel", "Dequantize"))
GROUPED = Kernel(
    "grouped_dequantize", GroupedDequantizeArguments, Lazily("kernels.dequantize.kernel", "GroupedDequantize")
)
