"""Products of block-scaled operands on sm_90a: one call decodes x and multiplies, and no weight is packed.

Weights are NVFP4, and so is x; or weights are MXFP4 and x has any MX format. If the plan says so, the loading warps of
the product decode an NVFP4 x. Otherwise a short launch before decodes x to 16 bits, in which it is exact, and in the
order in which the product reads it. The product starts while that launch runs, and loads its weights meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats import MXFP4, MXFP8, MXFP8_E5M2, NVFP4, Format
from ...grouped_rows import GroupedRows
from ...kernels.gemm.sm90.arguments import Activations, OutputRows, RowBatch, RowsOfUp, RowsOfX, RowWeight
from ...kernels.gemm.sm90.grouped_arguments import GroupedWgmmaArguments, PackedGroup, RowsOfGroups
from ...operand import BlockScaledTensor, row_alignment
from ...planning.packed import PackedPlan, PackedProblem, choose
from ...planning.packed_groups import PackedGroups, choose_groups
from ...runtime.backend import sm_count
from ...scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS
from ...target import Target
from ..checks import DTYPE_NAMES, factors_of
from ..dequantize import ListDequantizeCall
from ..list_launch import Pair, Part
from ..operation import Operation
from ..planned import PlannedCall
from .gemm import wgmma_call
from .groups import PreparedList
from .operands import XRows, of_problem
from .rows import KERNEL, factors_of_groups, one_of_rows, rows_call


class Readable(NamedTuple):
    """How a kernel reads weights of a format: their packing, the dtype in which they are multiplied, and formats of x.

    promoted: as in prepared weights.
    """

    packing: str
    dtype: torch.dtype
    formats: tuple[Format, ...]
    promoted: bool = False


READABLE = {
    NVFP4: Readable("nvfp4_rows", torch.float16, (NVFP4,)),
    MXFP4: Readable("mxfp4_rows", torch.bfloat16, (MXFP4, MXFP8, MXFP8_E5M2)),
}
K_MULTIPLE = 128
"""K is a multiple of this: no stage of the kernel ends within a k-tile."""


def can_read(a: BlockScaledTensor, *weights: BlockScaledTensor) -> bool:
    """Whether the kernel reads these operands as they lie.

    It needs formats that it knows, blocked scales, K a multiple of 128, and weights of equal row stride whose rows
    start at multiples of 16 bytes.
    """
    first, apart = weights[0], 1 if a.batch == 1 else 2
    alike = (x.key.strides[:apart] == first.key.strides[:apart] and row_alignment(x.data, 16) >= 16 for x in weights)
    return _readable(a, *weights) and all(alike)


def _readable(a: BlockScaledTensor | GroupedRows, *weights: BlockScaledTensor) -> bool:
    """Whether the kernel can read these formats, scales and K."""
    of_weight = weights[0].format
    return (
        a.k % K_MULTIPLE == 0
        and of_weight in READABLE
        and a.format in READABLE[of_weight].formats
        and all(x.scale_layout == "blocked" and x.format is of_weight for x in weights)
        and a.scale_layout == "blocked"
    )


def stores(out: Any, n: int) -> bool:
    """Whether the kernel can write the output: a tensor that is contiguous along N."""
    return isinstance(out, Tensor) and (n == 1 or out.stride(-1) == 1)


def plan_rows(operation: Operation, r: Any, target: Target, *names: str) -> PlannedCall:
    """The planned call of an operation for a request with operands that ``can_read`` accepts.

    names: the fields of the request that are weights, one or two. If one field holds all rows of both weights, first
    those of one and then those of the other, its name stands twice.
    """
    a, out, bias, how = r.a, r.out, getattr(r, "bias", None), READABLE[getattr(r, names[0]).format]
    scalar, factors = factors_of(r, "a", names[0])
    problem = PackedProblem(
        m=a.rows,
        n=out.shape[-1],
        k=a.k,
        quantized=a.format is NVFP4 and row_alignment(a.data, 16) >= 16,
        bias="" if bias is None else DTYPE_NAMES[bias.dtype],
        gate=getattr(r, "gate", ""),
        batch=a.batch,
        **of_problem(how, out, factors),
    )
    plan = choose(problem, target.arch, sm_count(target, out.device), r.config)
    x = _in_place(a) if plan.config.decodes_x else XRows.decoded_before(a, how.dtype, target, "fragments")
    products = tuple(factors_of(r, "a", name)[1] for name in names)
    return wgmma_call(operation, r, target, problem, plan, _weight(r, names), x, scalar, products)


def can_read_stack(a: GroupedRows, b: BlockScaledTensor) -> bool:
    """Whether the kernel reads rows of groups and a stack of weights as they lie; ``can_read`` for groups."""
    return _readable(a, b) and row_alignment(b.data, 16) >= 16


def plan_stack(operation: Operation, r: Any, target: Target) -> PlannedCall:
    """The planned call for rows of groups and a stack that ``can_read_stack`` accepts."""
    a, b, out, how = r.a, r.b, r.out, READABLE[r.b.format]
    scalar, factors = factors_of(r, "a", "b")
    problem = PackedGroups(sizes=((a.rows, b.rows, a.k),), stack=b.batch, decoded=True, **of_problem(how, out, factors))
    plan = choose_groups(problem, target.arch, sm_count(target, out.device), r.config)
    x = XRows.of_groups(a, how.dtype, target, "fragments")
    matrices = RowBatch(b.key.strides[1], b.key.scale_strides[1])
    weight = RowWeight("b.data", "b.scale", None, b.rows, _row_stride(b), _atoms(b), matrices)
    groups = RowsOfGroups("a.offsets", b.batch, "status", a.atoms)
    one, products = one_of_rows(r, weight, x, a.rows), factors_of_groups(r, (factors,))
    arguments = GroupedWgmmaArguments(groups, one, None, x.floats, scalar, products, plan.workers)
    return rows_call(operation, KERNEL, r, target, plan, arguments, x)


def _in_place(a: BlockScaledTensor) -> XRows:
    """An x that the product itself decodes."""
    rows = RowsOfX("a.data", "a.scale", a.rows, _row_stride(a), _atoms(a), _batch(a))
    return XRows("a.data", 0, rows=rows)


def _weight(r: Any, names: Sequence[str]) -> RowWeight:
    name, weight, up = names[0], getattr(r, names[0]), None
    rows, stride, atoms = r.out.shape[-1], _row_stride(weight), _atoms(weight)
    if len(names) > 1:
        data, scale = (rows * stride, rows // ATOM_ROWS * atoms * ATOM_BYTES) if names[1] == name else (0, 0)
        up = RowsOfUp(f"{names[1]}.data + {data}", f"{names[1]}.scale + {scale}")
    return RowWeight(f"{name}.data", f"{name}.scale", up, rows, stride, atoms, _batch(weight))


def _row_stride(x: BlockScaledTensor) -> int:
    """Bytes from the data of a row to that of the next."""
    return x.key.strides[0] if x.rows > 1 else x.k // 2


def _atoms(x: BlockScaledTensor) -> int:
    """The number of scale atoms along K."""
    return x.k // (x.format.block * ATOM_COLS)


def _batch(x: BlockScaledTensor) -> RowBatch | None:
    return RowBatch(x.key.strides[1], x.key.scale_strides[1]) if x.batch > 1 else None


class PlainList(PreparedList):
    """The launches of a list of products whose operands are read as they lie: one decodes all x, one multiplies."""

    operands = Part(1, "data"), Part(1, "scale"), Part(0, "data"), Part(0, "scale")

    def _decoder(self, pairs: Sequence[Pair], target: Target) -> ListDequantizeCall:
        return ListDequantizeCall([x.key for x, _ in pairs], READABLE[pairs[0][1].format].dtype, target, "fragments")

    def _read_as(self, weight: BlockScaledTensor) -> Readable:
        return READABLE[weight.format]

    def _record(self, plan: PackedPlan, x: BlockScaledTensor, b: BlockScaledTensor, out: Tensor) -> PackedGroup:
        weight = RowWeight(0, 0, None, b.rows, _row_stride(b), _atoms(b), None)
        return PackedGroup(weight, Activations(0, x.rows, b.k, 0), None, OutputRows(0, out.stride(0), 0), b.k)

    @staticmethod
    def _row(group: PackedGroup, addresses: tuple[int, ...]) -> tuple[Any, ...]:
        """A row of the table on the device. addresses: those of data, scales, x and output."""
        weight, scale, x, out = addresses
        stride = group.weight.row_stride
        sizes = group.x.rows, group.weight.rows, group.k
        return (*sizes, out, group.out.row_stride, weight, scale, stride, x, group.x.row_stride)
