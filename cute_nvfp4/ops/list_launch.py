"""The launches of a list of products, planned: what the kernels for block-scaled and for prepared weights share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import torch

from ..kernels.gemm.arguments import MAP_BYTES, GroupFactor
from ..operand import span_bytes
from ..runtime.kernel import Kernel
from ..runtime.launch import SimLauncher, Tensors
from ..runtime.overlap import OverlapCheck
from ..target import Target
from .checks import tensors
from .dequantize import ListDequantizeCall
from .groups import addresses
from .planned import Preparation

Pair = tuple[Any, Any]
Owners = tuple[Sequence[Pair], Sequence[torch.Tensor], "torch.Tensor | None"]
"""Groups, outputs, and alpha if it is a tensor."""
_TABLES = 64
"""Tables of groups that are kept on the device."""


class Part(NamedTuple):
    """One tensor of each group: the part ``name`` of its a (side 0) or b (side 1); None: the operand is a tensor."""

    side: int
    name: str | None

    def of(self, pair: Pair) -> Any:
        """The tensor of a group, or None."""
        x = pair[self.side]
        return x if self.name is None else getattr(x, self.name, None)

    def __str__(self) -> str:
        return "ab"[self.side] + (f".{self.name}" if self.name else "")


def reader(parts: Iterable[Part]) -> Callable[[Sequence[Pair]], list[torch.Tensor]]:
    """Reads these parts of all groups, one part after the other: one expression, for every call does it."""
    return eval(f"lambda pairs: [{', '.join(f'*[{part} for a, b in pairs]' for part in parts)}]")


class ListRequest(NamedTuple):
    """A list of groups, all with rows, to plan the launches of. alpha: (n,), or None."""

    pairs: Sequence[Pair]
    outs: Sequence[torch.Tensor]
    alpha: torch.Tensor | None
    target: Target
    config: Any
    gate: str


class Room(NamedTuple):
    """Memory of a call's own: decoded matrices, tensor maps, and the global scales of each part that are gathered."""

    decoded: torch.Tensor | None
    maps: torch.Tensor | None
    scales: tuple[torch.Tensor | None, ...]


NO_ROOM = Room(None, None, ())


class ListLaunch:
    """The launches for a list of groups, all with rows, planned: operands that the kernel does not read as they are are
    decoded, global scales that are apart are gathered, and the groups multiplied.

    A subclass says what its kernel is given of a group. ``_plan`` chooses how groups are multiplied, with factors of
    these strides for each product, and in which order; ``_record`` is a group without addresses, ``_row`` its row of a
    table on the device, and ``_arguments`` the kernel's record.

    scale_parts: the global scales: of a, and of b for each product. operands: the parts of a group that are read, in
    the order of its record, which ends with its output. names_an_output: whether the first group's output is given once
    more, where groups are parameters. only_addresses: whether a call is one launch that needs nothing but addresses;
    repeatable: whether it needs nothing else but room for decoded operands.
    ordered: from the addresses of all groups' first part, of their second, and so on, to their order in the launch.
    scales: how the global scales of each part lie (``arranged``). factors: what multiplies the products, one product
    after the other: parts, or None for alpha's tensor. outs_at, alpha_at: places among the ``values``.
    """

    kernel: ClassVar[Kernel]
    scale_parts: tuple[Part, ...] = (Part(0, "global_scale"), Part(1, "global_scale"))
    operands: tuple[Part, ...]
    names_an_output: ClassVar[bool] = False

    def __init__(self, r: ListRequest) -> None:
        pairs, outs, alpha = r.pairs, r.outs, r.alpha
        n = self._count = len(pairs)
        self._device = outs[0].device
        self._decode = self._decoder(pairs, r.target)
        self.scales = {part: arranged([part.of(pair) for pair in pairs]) for part in self.scale_parts}
        of_a, *of_b = self.scale_parts
        shared = ([] if alpha is None else [None]) + [of_a] * (self.scales[of_a] != "none")
        of_products = [shared + [part] * (self.scales[part] != "none") for part in of_b]
        self.factors = [factor for some in of_products for factor in some]
        step = {part: int(how != "one") for part, how in self.scales.items()}
        strides = [[int(alpha.shape[0] > 1) if x is None else step[x] for x in some] for some in of_products]
        plan, self._order = self._plan(r, strides)
        self._groups = [self._record(plan, *pairs[i], outs[i]) for i in self._order]
        self._maps = 0 if plan.config.maps == "parameters" else n * len(plan.config.tensor_maps)
        # slots that no group has are another without rows
        padding = 0 if self._maps else plan.config.slots - n
        factors = tuple(tuple(GroupFactor(0, stride) for stride in some) for some in strides)
        arguments = self._arguments(plan, factors, padding)
        self.launch = self.kernel.launcher(plan.config, r.target, self._device, arguments, self._touched)
        self._read = reader(self.operands)
        self.outs_at = n * len(self.operands)
        # what is decoded has two parts, and one address then
        self._decoded_at = self.outs_at - 2 * n * (self._decode is not None)
        self.alpha_at = self.outs_at + n
        # of a group in a launch, its output the last
        self._columns = len(self.operands) + (self._decode is None)
        order = [*self._order, *[self._order[0]] * padding]
        places = [column * n + i for i in order for column in range(self._columns)]
        self.ordered = itemgetter(*places, *places[self._columns - 1 : self._columns][: self.names_an_output])
        self.gathers = "apart" in self.scales.values()
        self.only_addresses = not (self._decode or self._maps or self.gathers)
        self.repeatable = not (self._maps or self.gathers)

    def _decoder(self, pairs: Sequence[Pair], target: Target) -> ListDequantizeCall | None:
        """What decodes all a, whose data and scales are then the last operands."""
        return None

    def multiply(
        self, pairs: Sequence[Pair], outs: Sequence[torch.Tensor], scalar: float, alpha: torch.Tensor | None
    ) -> None:
        """Launches for groups like the planned ones."""
        self(self.values(pairs, outs, scalar, alpha), (pairs, outs, alpha))

    def values(
        self, pairs: Sequence[Pair], outs: Sequence[torch.Tensor], scalar: float, alpha: torch.Tensor | None
    ) -> tuple:
        """What varies: addresses of all groups' parts, one part after the other, and of all outputs; alpha; the
        addresses of ``factors``, of the first group's, and 0 for those that are gathered."""
        given = [alpha if x is None else None if self.scales[x] == "apart" else x.of(pairs[0]) for x in self.factors]
        factors = [0 if x is None else x.data_ptr() for x in given]
        return (*addresses(*self._read(pairs), *outs), scalar, *factors)

    def __call__(self, values: tuple, owners: Owners) -> None:
        """Launches. owners: of the memory at the addresses."""
        if self.only_addresses:
            self.launch((*self.ordered(values), *values[self.alpha_at :]), (*owners, NO_ROOM, None))
            return
        room = self._room()
        self._gather(owners, room)
        if self._decode is not None:
            self._decode(values[self._decoded_at : self.outs_at], room.decoded, [a for a, _ in owners[0]])
        self.launch(*self._of_kernel(values, room, owners))

    def fixed(self, values: tuple, owners: Owners) -> Callable[[], None]:
        """The launches with these values, in memory of their own."""
        room, decode = self._room(), []
        if self._decode is not None:
            places = values[self._decoded_at : self.outs_at]
            decode = self._decode.fixed(places, room.decoded, [a for a, _ in owners[0]])
        final, kept = self._of_kernel(values, room, owners)
        launch = self.launch.fixed(final, kept)
        if self._maps and self._device.type == "cuda":
            # calls on other streams find the table there
            torch.cuda.current_stream(self._device).synchronize()

        if not (self.gathers or decode):
            return lambda kept=kept: launch()

        def call(kept: tuple = kept) -> None:
            self._gather(owners, room)
            for one in decode:
                one()
            launch()

        return call

    def preparation(
        self, pairs: Sequence[Pair], outs: Sequence[torch.Tensor], scalar: float, alpha: torch.Tensor | None
    ) -> Preparation:
        """The launches with these, for ``prepare``: its operands "a", "b" and "out" are lists. The addresses of global
        scales that are gathered follow the values."""
        values, n = [*self.values(pairs, outs, scalar, alpha)], self._count
        slots: dict[str, list] = {name: [[] for _ in pairs] for name in "ab"}
        sizes: dict[int, int] = {}

        def read(place: int, part: Part, group: int, size: int) -> None:
            slots["ab"[part.side]][group].append((part.name, place))
            sizes[place] = size

        for column, part in enumerate(self.operands):
            for i, pair in enumerate(pairs):
                read(column * n + i, part, i, span_bytes(part.of(pair)))
        for place, part in enumerate(self.factors, self.alpha_at + 1):
            if part is None:
                sizes[place] = span_bytes(alpha)
            elif self.scales[part] != "apart":
                read(place, part, 0, 4 * n if self.scales[part] == "row" else 4)
            else:
                for i, scale in enumerate(map(part.of, pairs)):
                    if scale is not None:
                        read(len(values), part, i, 4)
                        values.append(scale.data_ptr())
        slots["out"] = [[(None, self.outs_at + i)] for i in range(n)]
        return Preparation(
            self,
            tuple(values),
            {"a": [a for a, _ in pairs], "b": [b for _, b in pairs], "out": outs},
            slots,
            OverlapCheck(sizes, [(self.outs_at + i, span_bytes(x)) for i, x in enumerate(outs)]),
            lambda given: ([*zip(given["a"], given["b"])], given["out"], alpha),
        )

    @property
    def reads_owners(self) -> bool:
        """Whether a launch needs more than addresses."""
        return self.gathers or isinstance(self.launch, SimLauncher)

    def _room(self) -> Room:
        decoded = None if self._decode is None else self._decode.new()
        maps = room_for_maps(self._maps, self._device) if self._maps else None
        apart = (how == "apart" for how in self.scales.values())
        scales = [torch.empty(self._count, device=self._device) if one else None for one in apart]
        return Room(decoded, maps, tuple(scales))

    def _gather(self, owners: Owners, room: Room) -> None:
        for part, memory in zip(self.scale_parts, room.scales if self.gathers else ()):
            if memory is not None:
                gathered([part.of(pair) for pair in owners[0]], memory)

    def _of_kernel(self, values: tuple, room: Room, owners: Owners) -> tuple[tuple, tuple]:
        """What the product's launcher takes."""
        n, rest, table = self._count, values[self.alpha_at :], None
        if self.gathers:
            own = {None: None, **dict(zip(self.scale_parts, room.scales))}
            memory = [None, *(own[x] for x in self.factors)]
            rest = [x if new is None else new.data_ptr() for x, new in zip(rest, memory)]
        operands = values[: self.alpha_at]
        if self._decode is not None:
            operands = (
                *values[: self._decoded_at],
                *self._decode.numbers(room.decoded),
                *values[self.outs_at : self.alpha_at],
            )
        if not self._maps:
            return (*self.ordered(operands), *rest), (*owners, room, None)
        groups = [operands[i::n] for i in self._order]
        rows = tuple(self._row(group, places) for group, places in zip(self._groups, groups))
        table = table_on_device(rows, self._device)
        return (*addresses(table, room.maps), *groups[0], *rest), (*owners, room, table)

    def tensors(self, pairs: Sequence[Pair]) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Every tensor of the groups' operands: the name of its part, its group, and itself."""
        for part in (*self.operands, *self.scale_parts):
            for i, pair in enumerate(pairs):
                x = part.of(pair)
                if x is not None:
                    yield str(part), i, x

    def _touched(
        self,
        pairs: Sequence[Pair],
        outs: Sequence[torch.Tensor],
        alpha: torch.Tensor | None,
        room: Room,
        table: torch.Tensor | None,
    ) -> Tensors:
        read = {f"group {i}: {name}": x for name, i, x in self.tensors(pairs)}
        read |= {"decoded": room.decoded, "table of groups": table, "alpha": alpha}
        read |= {f"gathered scales {i}": x for i, x in enumerate(room.scales)}
        return tensors(read, {f"out[{i}]": x for i, x in enumerate(outs)} | {"tensor maps": room.maps})


def arranged(scales: Sequence[torch.Tensor | None]) -> str:
    """How a kernel finds the global scales of groups: "none", "one" that all share, "row" (one after the other in
    memory, as elements of one tensor are), or "apart": they are gathered first."""
    if not any(x is not None for x in scales):
        return "none"
    if any(x is None for x in scales):
        return "apart"
    places = addresses(*scales)
    if places.count(places[0]) == len(places):
        return "one"
    return "row" if places == tuple(range(places[0], places[0] + 4 * len(places), 4)) else "apart"


def gathered(scales: Sequence[torch.Tensor | None], out: torch.Tensor) -> None:
    """Writes the groups' global scales to one tensor; 1 for those that have none."""
    one = torch.ones(1, dtype=torch.float32, device=out.device) if any(x is None for x in scales) else None
    torch.cat([one if x is None else x.reshape(1) for x in scales], out=out)


_tables: OrderedDict[tuple, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
_captured: list[tuple[torch.Tensor, torch.Tensor]] = []


def room_for_maps(count: int, device: torch.device) -> torch.Tensor:
    """Memory in which a kernel writes tensor maps."""
    words = MAP_BYTES // 8
    maps = torch.empty((count + 1) * words, dtype=torch.int64, device=device)
    # the host's allocator aligns less than a GPU's does
    return maps[-maps.data_ptr() // 8 % words :]


def table_on_device(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """``rows`` on the device, copied there without waiting; the same rows are copied once while they are remembered."""
    host = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    if device.type != "cuda":
        return host
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.is_current_stream_capturing():
        # a graph copies again, from the same memory, whenever it runs
        _captured.append((host, host.to(device, non_blocking=True)))
        return _captured[-1][1]
    key = (device, stream, rows)
    if key not in _tables:
        _tables[key] = host, host.to(device, non_blocking=True)
        if len(_tables) > _TABLES:
            _tables.popitem(last=False)
    _tables.move_to_end(key)
    return _tables[key][1]
