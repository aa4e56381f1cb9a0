"""grouped_gemm with prepared weights: the checks of a group, and the launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...errors import OperandError, OperandTypeError
from ...kernels.gemm.arguments import GroupFactor
from ...kernels.gemm.sm90.arguments import Activations, OutputRows, PackedWeight, RowScales
from ...kernels.gemm.sm90.grouped_arguments import GroupedWgmmaArguments, PackedGroup, PackedGroupTable
from ...operand import BlockScaledTensor, row_alignment
from ...planning.packed import PackedPlan
from ...planning.packed_groups import PackedGroups, choose_groups, tile_us
from ...prepared_weight import PreparedWeight
from ...runtime.backend import sm_count
from ...target import Target
from ..dequantize import ListDequantizeCall
from ..groups import rows_of
from ..list_launch import ListLaunch, ListRequest, Pair, Part
from .operands import X, check_products, check_x, of_problem, row_stride
from .rows import KERNEL


def check_group(pair: Pair, first: PreparedWeight, gate: str) -> None:
    """Raises unless x and weight of a group fit together, and the weight is like that of the first group.

    An x without rows may be None or (0, K).
    """
    x, b = pair
    if not isinstance(b, PreparedWeight):
        raise OperandTypeError.of("b", got=type(b).__name__, expected="PreparedWeight, as in the first group")
    if (b.packing, b.dtype, b.promoted, b.device) != (first.packing, first.dtype, first.promoted, first.device):
        got, expected = (f"{w.packing} for {w.dtype}{', promoted' * w.promoted} on {w.device}" for w in (b, first))
        raise OperandError.of("prepared weight", got=got, expected=f"{expected}, as in the first group")
    check_products(b, gate)
    if x is not None and not (isinstance(x, Tensor) and tuple(x.shape) == (0, b.k)):
        if b.row_factor is not None and isinstance(x, Tensor):
            hint = 'quantize(x, "fp8_e4m3") makes one.'
            raise OperandTypeError.of("a", got=x.dtype, expected=f"rows in FP8 for a weight in {b.dtype}", hint=hint)
        check_x(x, b)


class PreparedList(ListLaunch):
    """The launches of a list of products with prepared weights; block-scaled x are decoded first."""

    kernel = KERNEL

    def _decoder(self, pairs: Sequence[Pair], target: Target) -> ListDequantizeCall | None:
        first = pairs[0][1]
        if first.gated:
            self.scale_parts = (*self.scale_parts, Part(1, "up_global_scale"))
        keys = [x.key for x, _ in pairs if isinstance(x, BlockScaledTensor)]
        if first.row_factor is not None:
            self.operands = Part(1, "packed"), Part(0, "data"), Part(1, "row_factor"), Part(0, "scale")
            return None
        self.operands = (Part(1, "packed"), *([Part(0, "data"), Part(0, "scale")] if keys else [Part(0, None)]))
        return ListDequantizeCall(keys, first.dtype, target) if keys else None

    def _read_as(self, weight: Any) -> Any:
        """The weight as the kernel reads it, for the problem."""
        return weight

    def _plan(self, r: ListRequest, strides: Sequence[Sequence[int]]) -> tuple[PackedPlan, Sequence[int]]:
        # the output whose rows have the least alignment
        out = min(r.outs, key=lambda x: row_alignment(x, 16))
        problem = PackedGroups(
            sizes=tuple((rows_of(x), b.rows, b.k) for x, b in r.pairs),
            gate=r.gate,
            decoded=self._decode is not None,
            **of_problem(self._read_as(r.pairs[0][1]), out, strides[0]),
        )
        sms = sm_count(r.target, r.outs[0].device)
        plan = choose_groups(problem, r.target.arch, sms, r.config)
        order: Sequence[int] = range(len(r.pairs))
        # the most expensive tiles first, so that all CTAs end together; factors of groups forbid another order
        if not any(map(any, strides)):
            cost = [tile_us(plan.config, m, k, sms) for m, _, k in problem.sizes]
            order = sorted(order, key=lambda i: -cost[i])
        return plan, order

    def _record(self, plan: PackedPlan, x: X, b: PreparedWeight, out: Tensor) -> PackedGroup:
        rows, fp8 = rows_of(x), b.row_factor is not None
        matrix = x.data if fp8 else x
        stride = row_stride(matrix.stride(0) if isinstance(matrix, Tensor) else b.k, rows, b.k)
        weight, scales = PackedWeight(0, b.rows, b.packed.shape[-2], 0), RowScales(0, 0) if fp8 else None
        return PackedGroup(weight, Activations(0, rows, stride, 0), scales, OutputRows(0, out.stride(0), 0), b.k)

    def _arguments(
        self, plan: PackedPlan, factors: tuple[tuple[GroupFactor, ...], ...], padding: int
    ) -> GroupedWgmmaArguments:
        count, first = len(self._groups), self._groups[0]
        listed = plan.config.maps == "workspace"
        none = first._replace(weight=first.weight._replace(rows=0))
        return GroupedWgmmaArguments(
            groups=PackedGroupTable(0, count, 0) if listed else (*self._groups, *[none] * padding),
            one=first if listed else None,
            routed=None,
            floats=None,
            alpha=1.0,
            factors=factors,
            workers=plan.workers,
        )

    @staticmethod
    def _row(group: PackedGroup, addresses: tuple[int, ...]) -> tuple[Any, ...]:
        """A row of the table on the device (``GroupedWgmmaConfig.words``).

        addresses: those of the weight, of x, of the factors of FP8 rows of both, and of the output.
        """
        weight, x, *scales, out = addresses
        sizes = group.x.rows, group.weight.rows, group.k
        return (*sizes, out, group.out.row_stride, weight, *scales, x, group.x.row_stride)
