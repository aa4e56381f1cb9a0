"""The launches of grouped_gemm with prepared weights, planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch

from ...kernels.gemm.arguments import GroupFactor
from ...kernels.gemm.sm90.arguments import Activations, PackedWeight, Result
from ...kernels.gemm.sm90.grouped_arguments import GroupedWgmmaArguments, PackedGroup, PackedGroupTable
from ...operand import BlockScaledTensor, row_alignment
from ...planning.packed import PackedPlan
from ...planning.packed_groups import PackedGroups, choose_groups, tile_us
from ...prepared_weight import PreparedWeight
from ...runtime.backend import sm_count
from ...runtime.launch import Tensors
from ...target import Target
from ..calls import addresses
from ..checks import DTYPE_NAMES, tensors
from ..dequantize import ListDequantizeCall
from ..grouped_launch import arranged, gathered, room_for_maps, table_on_device
from .operands import X, row_stride, x_parts
from .rows import KERNEL

Pair = tuple[X | None, PreparedWeight]
Owners = tuple[Sequence[Pair], Sequence[torch.Tensor], "torch.Tensor | None"]
"""Groups, outputs, and alpha if it is a tensor."""


class Room(NamedTuple):
    """Memory of a call's own: decoded numbers, tensor maps, and for each of ``scales_of`` those that are gathered."""

    numbers: torch.Tensor | None
    maps: torch.Tensor | None
    scales: tuple[torch.Tensor | None, ...]


NO_ROOM = Room(None, None, ())


class ListLaunch:
    """The launches for a list of groups, all with rows, planned: block-scaled x are decoded, global scales that are
    apart are gathered, and the groups multiplied.

    only_addresses: whether a call is one launch that needs nothing but the addresses of numbers, weights, outputs, and
    a global scale. ordered: from those of all weights, then of all numbers, then of all outputs, to their order in the
    launch. scales: how the global scales of x and of each product's weights lie (``grouped_launch.arrangements``).
    outs_at, alpha_at: places among the ``values``.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        outs: Sequence[torch.Tensor],
        alpha: torch.Tensor | None,
        target: Target,
        config: PackedPlan | None,
        gate: str,
    ) -> None:
        self._device, first = outs[0].device, pairs[0][1]
        of_all = [] if alpha is None else [int(alpha.shape[0] > 1)]
        self.scales = of_x, *of_weights = [*map(arranged, scales_of(pairs))]
        # of each product
        strides = [of_all + [int(found != "one") for found in (of_x, one) if found != "none"] for one in of_weights]
        problem = PackedGroups(
            sizes=tuple((rows_of(x), b.rows, b.k) for x, b in pairs),
            dtype=DTYPE_NAMES[first.dtype],
            out=DTYPE_NAMES[outs[0].dtype],
            vector=all(row_alignment(out, 16) >= 16 for out in outs),
            factors=len(strides[0]),
            gate=gate,
            packing=first.packing,
        )
        plan = choose_groups(problem, target.arch, sm_count(target, self._device), config)
        # the dearest tiles first, so that all CTAs end together; factors of groups have their places
        self._order: Sequence[int] = range(len(pairs))
        if not any(map(any, strides)):
            cost = [tile_us(plan.config, m, k) for m, _, k in problem.sizes]
            self._order = sorted(self._order, key=lambda i: -cost[i])
        self._groups = [_group(*pairs[i], outs[i]) for i in self._order]
        self._listed = plan.config.maps == "workspace"
        keys = [x.key for x, _ in pairs if isinstance(x, BlockScaledTensor)]
        self._decode = ListDequantizeCall(keys, first.dtype, target) if keys else None
        self.launch = KERNEL.launcher(plan.config, target, self._device, self._arguments(plan, strides), _touched)
        n = self._count = len(pairs)
        self.outs_at = 3 * n if keys else 2 * n
        self.alpha_at = self.outs_at + n
        order = [*self._order, *[self._order[0]] * self._padding]
        self.ordered = itemgetter(*[place for i in order for place in (i, n + i, 2 * n + i)])
        self.gathers = "apart" in self.scales
        self.only_addresses = not (keys or self._listed or self.gathers)

    def _arguments(self, plan: PackedPlan, strides: Sequence[Sequence[int]]) -> GroupedWgmmaArguments:
        """The kernel's record, without addresses."""
        count, first = len(self._groups), self._groups[0]
        # slots that no group has are another without rows
        self._padding = 0 if self._listed else plan.config.slots - count
        padding = [first._replace(weight=first.weight._replace(rows=0))] * self._padding
        return GroupedWgmmaArguments(
            groups=PackedGroupTable(0, count, 0) if self._listed else (*self._groups, *padding),
            one=first if self._listed else None,
            alpha=1.0,
            factors=tuple(tuple(GroupFactor(0, stride) for stride in some) for some in strides),
            workers=plan.workers,
        )

    def __call__(
        self, pairs: Sequence[Pair], outs: Sequence[torch.Tensor], scalar: float, alpha: torch.Tensor | None
    ) -> None:
        self.run(self.values(pairs, outs, scalar, alpha), (pairs, outs, alpha))

    def values(
        self, pairs: Sequence[Pair], outs: Sequence[torch.Tensor], scalar: float, alpha: torch.Tensor | None
    ) -> tuple:
        """What varies: addresses of all weights, all x (or their data, and then their scales) and all outputs; alpha;
        for each product the addresses of its factors: of alpha's tensor, and of the first group's global scales, of
        which those that are gathered are 0."""
        parts = zip(*[x_parts(x) for x, _ in pairs])
        of_x, *of_weights = [
            (0,) if how == "apart" else addresses(given[0]) for how, given in zip(self.scales, scales_of(pairs))
        ]
        factors = [place for of_weight in of_weights for place in (*addresses(alpha), *of_x, *of_weight)]
        operands = addresses(*[b.packed for _, b in pairs], *[x for part in parts for x in part], *outs)
        return (*operands, scalar, *factors)

    def run(self, values: tuple, owners: Owners) -> None:
        """Launches. owners: of the memory at the addresses."""
        if self.only_addresses:
            self.launch((*self.ordered(values), *values[self.alpha_at :]), (*owners, NO_ROOM, None))
            return
        room = self._room()
        self._gather(owners, room)
        if self._decode is not None:
            self._decode(values[self._count : self.outs_at], room.numbers, [x for x, _ in owners[0]])
        self.launch(*self._of_kernel(values, room, owners))

    def fixed(self, values: tuple, owners: Owners) -> Callable[[], None]:
        """``run`` with these values, in memory of its own."""
        room, decode = self._room(), []
        if self._decode is not None:
            places = values[self._count : self.outs_at]
            decode = self._decode.fixed(places, room.numbers, [x for x, _ in owners[0]])
        final, kept = self._of_kernel(values, room, owners)
        launch = self.launch.fixed(final, kept)
        if self._listed and self._device.type == "cuda":
            # calls on other streams find the table there
            torch.cuda.current_stream(self._device).synchronize()

        def call(kept: tuple = kept) -> None:
            self._gather(owners, room)
            for one in decode:
                one()
            launch()

        return call

    def _room(self) -> Room:
        numbers = None if self._decode is None else self._decode.new()
        maps = room_for_maps(self._count, self._device) if self._listed else None
        apart = (how == "apart" for how in self.scales)
        scales = [torch.empty(self._count, device=self._device) if one else None for one in apart]
        return Room(numbers, maps, tuple(scales))

    def _gather(self, owners: Owners, room: Room) -> None:
        if self.gathers:
            for scales, memory in zip(scales_of(owners[0]), room.scales):
                if memory is not None:
                    gathered(scales, self._device, memory)

    def _of_kernel(self, values: tuple, room: Room, owners: Owners) -> tuple[tuple, tuple]:
        """What the product's launcher takes."""
        n, rest = self._count, values[self.alpha_at :]
        if self.gathers:
            of_x, *of_weights = zip(self.scales, room.scales)
            alpha = () if owners[2] is None else (None,)
            places = [None, *[x for one in of_weights for x in (*alpha, *_one(of_x), *_one(one))]]
            rest = [x if memory is None else memory.data_ptr() for x, memory in zip(rest, places)]
        xs = values[n : 2 * n] if self._decode is None else self._decode.numbers(room.numbers)
        operands, table = (*values[:n], *xs, *values[self.outs_at : self.alpha_at]), None
        if self._listed:
            places = [(operands[i], operands[n + i], operands[2 * n + i]) for i in self._order]
            table = table_on_device(tuple(map(_table_row, self._groups, places)), self._device)
            first = (*addresses(table, room.maps), *places[0])
        else:
            first = self.ordered(operands)
        return (*first, *rest), (*owners, room, table)


def _one(found: tuple[str, torch.Tensor | None]) -> tuple:
    """Memory of gathered scales, or None, of a factor that there is."""
    return () if found[0] == "none" else found[1:]


def _group(x: X, b: PreparedWeight, out: torch.Tensor) -> PackedGroup:
    """A group as the kernel sees it, without addresses."""
    rows = rows_of(x)
    stride = row_stride(x.stride(0) if isinstance(x, torch.Tensor) else b.k, rows, b.k)
    weight = PackedWeight(0, b.rows, b.packed.shape[-2], 0)
    return PackedGroup(weight, Activations(0, rows, stride, 0), Result(0, out.stride(0), 0), b.k)


def _table_row(group: PackedGroup, places: tuple[int, ...]) -> tuple[int, ...]:
    """A row of the table on the device (``GroupedWgmmaConfig.words``). places: addresses of weight, x and output."""
    weight, x, out = places
    return (group.x.rows, group.weight.rows, group.k, out, group.out.row_stride, weight, x, group.x.row_stride)


def rows_of(x: X | None) -> int:
    """Rows of an x, which may be None."""
    if x is None:
        return 0
    return x.rows if isinstance(x, BlockScaledTensor) else len(x)


def scales_of(pairs: Sequence[Pair]) -> list[Sequence[torch.Tensor | None]]:
    """The global scales of all x, and then, for each product, those of all weights."""
    return [[getattr(x, "global_scale", None) for x, _ in pairs], *zip(*(b.global_scales for _, b in pairs))]


def everything_read(pairs: Sequence[Pair]) -> dict[str, torch.Tensor | None]:
    """Every tensor of the operands, by name."""
    found: dict[str, torch.Tensor | None] = {}
    for i, (x, b) in enumerate(pairs):
        parts = () if x is None else (*x_parts(x), getattr(x, "global_scale", None))
        found |= {f"group {i}: a[{j}]": part for j, part in enumerate(parts)}
        found[f"group {i}: b"] = b.packed
        found |= {f"group {i}: global scale {j} of b": scale for j, scale in enumerate(b.global_scales)}
    return found


def _touched(pairs: Sequence[Pair], outs: Sequence[torch.Tensor], alpha: torch.Tensor | None, *own: object) -> Tensors:
    room, table = own
    read = everything_read(pairs) | {"decoded": room.numbers, "table of groups": table, "alpha": alpha}
    read |= {f"gathered scales {i}": x for i, x in enumerate(room.scales)}
    return tensors(read, {f"out[{i}]": x for i, x in enumerate(outs)} | {"tensor maps": room.maps})
