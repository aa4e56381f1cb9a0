"""Rows of one matrix that belong to groups, such as the tokens of a mixture of experts, sorted by expert."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import NVFP4, Format, as_bytes
from cute_nvfp4.operand import BlockScaledTensor, _check_data, _check_global_scale, address_of, row_alignment
from cute_nvfp4.pytree import register
from cute_nvfp4.scale_layout import (
    ATOM_BYTES,
    ATOM_COLS,
    ATOM_ROWS,
    blocked_flat,
    blocked_view,
    from_blocked,
    to_blocked,
)
from cute_nvfp4.tensors import check_dense


@dataclass(frozen=True, eq=False, repr=False)
class GroupedRows:
    """Block-scaled rows of E groups, one after the other: the A of ``grouped_gemm_contiguous``.

    data: (T, K/2) bytes as in ``BlockScaledTensor``; group e has the rows offsets[e] to offsets[e + 1].
    scale: uint8 or the format's dtype, one dimension: the blocked scales of each group, one group after the other.
        Each group's scales start at a new atom of 128 rows, so they have ⌈rows / 128⌉ · ⌈K / (4 · block)⌉ · 512 bytes,
        and those of group e start after ⌈rows / 128⌉ atom rows for each group before it, wherever its rows of data
        start. ``scale_atoms`` says how many atom rows always suffice; bytes that belong to no row should be zeros.
        ``GroupedRows.of`` builds them.
    offsets: (E + 1,) row numbers, not decreasing. A sequence of ints is checked here; an int32 tensor, which must be
        on the device of the data, is never read by the host (see ``grouped_gemm_contiguous``). Rows before the first
        and after the last offset belong to no group.
    global_scale: as in ``BlockScaledTensor``, for all rows.
    """

    data: torch.Tensor
    scale: torch.Tensor
    offsets: torch.Tensor
    global_scale: torch.Tensor | None = None
    # a factory, as in BlockScaledTensor
    format: Format = field(default_factory=lambda: NVFP4)
    rows: int = field(init=False)
    k: int = field(init=False)

    def __post_init__(self) -> None:
        data = self.data
        if not isinstance(data, torch.Tensor) or data.ndim != 2:
            got = f"shape {tuple(data.shape)}" if isinstance(data, torch.Tensor) else type(data).__name__
            raise OperandError.of("data of GroupedRows", got=got, expected="(T, bytes of K)")
        rows, k, _ = _check_data(data, self.format)
        if self.global_scale is not None:
            _check_global_scale(self.global_scale, data, self.format)
        _check_scale(self.scale, data, self.format, k)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "k", k)
        object.__setattr__(self, "offsets", checked_offsets(self.offsets, data))

    @classmethod
    def of(cls, a: BlockScaledTensor, offsets: Sequence[int] | torch.Tensor) -> GroupedRows:
        """The rows of a matrix (T, K) as groups: its data as it is, and a copy of its scales in the order of groups.

        It works on the matrix's device and does not wait.
        """
        if a.is_batched:
            raise OperandError.of("rows of groups", got=f"data of {a.data.ndim} dimensions", expected="2")
        offsets = checked_offsets(offsets, a.data)
        return cls(a.data, padded_scales(a.rowmajor_scale()[0], offsets), offsets, a.global_scale, a.format)

    @functools.cached_property
    def key(self) -> tuple:
        """The cache key: everything that a plan depends on, without addresses and values."""
        data, alignment = self.data, row_alignment(self.data, 32)
        shapes = (data.shape, data.stride(), self.scale.shape, self.offsets.shape)
        return (*shapes, self.format, data.device, self.global_scale is not None, alignment)

    @property
    def groups(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def scale_layout(self) -> str:
        return "blocked"

    @property
    def batch(self) -> int:
        return 1

    def blocked_scale(self) -> torch.Tensor:
        return self.scale

    def rowmajor_scale(self) -> torch.Tensor:
        """Scales (T, K/block). Rows of no group, and rows whose scales are missing, get an arbitrary scale."""
        edges = clamped(self.offsets, self.rows).long()
        atoms = (edges.diff() + (ATOM_ROWS - 1)) // ATOM_ROWS
        row = torch.arange(self.rows, device=self.device)
        group = torch.searchsorted(edges[1:].contiguous(), row, right=True).clamp(max=self.groups - 1)
        place = (atoms.cumsum(0) - atoms)[group] * ATOM_ROWS + row - edges[group]
        columns = self.format.scale_columns(self.k)
        room = self.atoms * ATOM_ROWS
        blocked = blocked_view(as_bytes(self.scale), room, columns)
        scales = from_blocked(blocked, room, columns)[0]
        return scales[place.clamp(0, room - 1)]

    def matrix(self, start: int, end: int, atom: int) -> BlockScaledTensor:
        """Rows ``start`` to ``end``, whose scales start at atom row ``atom``; missing scales are zeros."""
        size = -(-(end - start) // ATOM_ROWS) * self.atom_bytes
        bytes_ = torch.zeros(size, dtype=torch.uint8, device=self.device)
        there = as_bytes(self.scale)[atom * self.atom_bytes :][:size]
        bytes_[: there.shape[0]] = there
        return BlockScaledTensor(self.data[start:end], bytes_, self.global_scale, self.format)

    @property
    def atom_bytes(self) -> int:
        """Bytes of the scales of 128 rows."""
        return -(-self.k // (self.format.block * ATOM_COLS)) * ATOM_BYTES

    @property
    def atoms(self) -> int:
        """The number of atom rows in ``scale``."""
        return self.scale.shape[0] // self.atom_bytes

    def __repr__(self) -> str:
        return f"GroupedRows({self.format.name}, rows={self.rows}, k={self.k}, groups={self.groups}, {self.device})"


register(GroupedRows, ("data", "scale", "offsets", "global_scale"))


def scale_atoms(rows: int, groups: int) -> int:
    """The number of atom rows (128 rows) that suffice for ``rows`` rows, however ``groups`` groups share them."""
    return max(1, (rows + min(rows, groups) * (ATOM_ROWS - 1)) // ATOM_ROWS)


def padded_scales(scale: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Row-major scales (T, K/block) of groups of rows in the layout of ``GroupedRows``, padded with zeros.

    It does not wait for the device: the result has ``scale_atoms`` atom rows, whatever the offsets. Rows of no group
    are left out. Offsets that decrease or are too large are clamped as the kernel clamps them.
    """
    rows, columns = scale.shape
    edges = clamped(offsets, rows).long()
    sizes = edges[1:] - edges[:-1]
    atoms = (sizes + (ATOM_ROWS - 1)) // ATOM_ROWS
    first = (atoms.cumsum(0) - atoms) * ATOM_ROWS
    row = torch.arange(rows, device=scale.device)
    group = torch.searchsorted(edges[1:].contiguous(), row, right=True)
    inside = (row >= edges[0]) & (group < sizes.shape[0])
    group = group.clamp(max=sizes.shape[0] - 1)
    room = scale_atoms(rows, sizes.shape[0]) * ATOM_ROWS
    # rows of no group go to one more row, which is cut off
    target = torch.where(inside, first[group] + row - edges[group], room)
    padded = torch.zeros(room + 1, columns, dtype=torch.uint8, device=scale.device)
    padded[target] = as_bytes(scale)
    return blocked_flat(to_blocked(padded[:room]))


def wrong_offset(offsets: Sequence[int], rows: int) -> int:
    """1 + the index of the first offset that is negative, less than the one before it, or more than ``rows``; or 0."""
    wrong = (i for i, (left, right) in enumerate(zip([0, *offsets], offsets)) if right < left or right > rows)
    return next(wrong, -1) + 1


def clamped(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """The offsets that the kernel uses: within 0 … ``rows``, each at least the one before it."""
    return offsets.clamp(0, rows).cummax(0).values


def checked_offsets(offsets: Sequence[int] | torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Offsets of groups of the rows of ``data``, checked, and on its device; values of a tensor are not read."""
    if isinstance(offsets, torch.Tensor):
        check_dense("offsets", offsets)
        if offsets.dtype is not torch.int32:
            raise OperandTypeError.of("offsets", got=offsets.dtype, expected="torch.int32, or a sequence of ints")
        if offsets.ndim != 1 or offsets.shape[0] < 2 or offsets.stride(0) != 1:
            raise OperandError.of("offsets", got=f"shape {tuple(offsets.shape)}", expected="(groups + 1,), contiguous")
        if offsets.device != data.device:
            raise OperandError.of("device of offsets", got=offsets.device, expected=data.device)
        return offsets
    values = list(offsets) if isinstance(offsets, Sequence) and not isinstance(offsets, str) else []
    if len(values) < 2 or not all(isinstance(x, int) and not isinstance(x, bool) for x in values):
        raise OperandTypeError.of("offsets", got=repr(values)[:80], expected="one int more than there are groups")
    for i, (before, value) in enumerate(zip([0, *values], values)):
        if value < before:
            raise OperandError.of(f"offsets[{i}]", got=value, expected=f"at least {before}, the one before it")
        if value > data.shape[0]:
            raise OperandError.of(f"offsets[{i}]", got=value, expected=f"at most {data.shape[0]}, the rows of data")
    host = torch.tensor(values, dtype=torch.int32, pin_memory=data.is_cuda)
    return host.to(data.device, non_blocking=True)


def _check_scale(scale: torch.Tensor, data: torch.Tensor, fmt: Format, k: int) -> None:
    if not isinstance(scale, torch.Tensor) or scale.dtype not in (torch.uint8, fmt.scale_dtype):
        got = scale.dtype if isinstance(scale, torch.Tensor) else type(scale).__name__
        raise OperandTypeError.of("scale of GroupedRows", got=got, expected=f"{fmt.scale_dtype} or torch.uint8")
    check_dense("scale of GroupedRows", scale)
    atom_bytes = -(-k // (fmt.block * ATOM_COLS)) * ATOM_BYTES
    size = scale.numel()
    if scale.ndim != 1 or size == 0 or size % atom_bytes or scale.stride(0) != 1:
        raise OperandError.of(
            "scale of GroupedRows",
            got=f"shape {tuple(scale.shape)}, stride {scale.stride()}",
            expected=f"one dimension, contiguous, a multiple of {atom_bytes} bytes: the atoms of 128 rows",
            hint="GroupedRows.of builds it.",
        )
    if scale.device != data.device:
        raise OperandError.of("device of scale", got=scale.device, expected=data.device)
    if address_of(scale) % 16:
        raise OperandError.of("address of scale", got=f"{scale.data_ptr():#x}", expected="a multiple of 16 bytes")
