"""Planned launches of a list of products: what the kernels for block-scaled and for prepared weights share."""

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
"""The groups, the outputs, and the tensor of alpha or None."""
_TABLES = 64
"""How many tables of groups stay on the device."""


class Part(NamedTuple):
    """One tensor of each group: the part ``name`` of its a (side 0) or b (side 1); name None: the operand itself."""

    side: int
    name: str | None

    def of(self, pair: Pair) -> Any:
        """The tensor of one group, or None."""
        x = pair[self.side]
        return x if self.name is None else getattr(x, self.name, None)

    def __str__(self) -> str:
        return "ab"[self.side] + (f".{self.name}" if self.name else "")


def reader(parts: Iterable[Part]) -> Callable[[Sequence[Pair]], list[torch.Tensor]]:
    """A function that reads these parts of all groups, one part after the other; compiled, as every call runs it."""
    return eval(f"lambda pairs: [{', '.join(f'*[{part} for a, b in pairs]' for part in parts)}]")


class ListRequest(NamedTuple):
    """A list of groups, all with rows, whose launches are to be planned. alpha: (n,), or None."""

    pairs: Sequence[Pair]
    outs: Sequence[torch.Tensor]
    alpha: torch.Tensor | None
    target: Target
    config: Any
    gate: str


class Room(NamedTuple):
    """Memory that one call uses: decoded matrices, tensor maps, and for each part the global scales that it gathers."""

    decoded: torch.Tensor | None
    maps: torch.Tensor | None
    scales: tuple[torch.Tensor | None, ...]


NO_ROOM = Room(None, None, ())


class ListLaunch:
    """The planned launches for a list of groups, all with rows.

    If need be, they first decode operands that the kernel does not read as they are, and gather global scales that lie
    apart; then they multiply the groups.

    A subclass describes a group to its kernel. ``_plan`` chooses how to multiply the groups, and in which order, from
    the strides of each product's factors; ``_record`` is a group without addresses, ``_row`` its row of a table on the
    device, and ``_arguments`` the kernel's record.

    scale_parts: the global scales of a, and of b for each product. operands: the parts of a group that are read, in
    the order of its record, which ends with its output. names_an_output: whether the kernel takes the first group's
    output once more, if groups are parameters. only_addresses: whether a call is one launch and needs only addresses.
    repeatable: whether it needs only these and memory for decoded operands.
    ordered: puts the addresses into the order of the launch; it takes all groups' first parts, then the second, and so
    on. scales: how the global scales of each part lie (``arranged``). factors: what multiplies the products, one
    product after the other: parts, or None for the tensor of alpha. outs_at, alpha_at: positions among ``values``.
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
        # the remaining slots hold a group without rows
        padding = 0 if self._maps else plan.config.slots - n
        factors = tuple(tuple(GroupFactor(0, stride) for stride in some) for some in strides)
        arguments = self._arguments(plan, factors, padding)
        self.launch = self.kernel.launcher(plan.config, r.target, self._device, arguments, self._touched)
        self._read = reader(self.operands)
        self.outs_at = n * len(self.operands)
        # an operand has data and scales before it is decoded, and one address afterwards
        self._decoded_at = self.outs_at - 2 * n * (self._decode is not None)
        self.alpha_at = self.outs_at + n
        # the addresses of a group in a launch; the last is its output
        self._columns = len(self.operands) + (self._decode is None)
        order = [*self._order, *[self._order[0]] * padding]
        positions = [column * n + i for i in order for column in range(self._columns)]
        self.ordered = itemgetter(*positions, *positions[self._columns - 1 : self._columns][: self.names_an_output])
        self.gathers = "apart" in self.scales.values()
        self.only_addresses = not (self._decode or self._maps or self.gathers)
        self.repeatable = not (self._maps or self.gathers)

    def _decoder(self, pairs: Sequence[Pair], target: Target) -> ListDequantizeCall | None:
        """What decodes all a; data and scales of a are then the last operands. None: the kernel reads a."""
        return None

    def multiply(
        self, pairs: Sequence[Pair], outs: Sequence[torch.Tensor], scalar: float, alpha: torch.Tensor | None
    ) -> None:
        """Launches for groups like the planned ones."""
        self(self.values(pairs, outs, scalar, alpha), (pairs, outs, alpha))

    def values(
        self, pairs: Sequence[Pair], outs: Sequence[torch.Tensor], scalar: float, alpha: torch.Tensor | None
    ) -> tuple:
        """The values of a call: the addresses of all groups' parts, one part after the other, and of all outputs; then
        alpha; then the addresses of ``factors`` in the first group, 0 for factors that are gathered."""
        scales = [alpha if x is None else None if self.scales[x] == "apart" else x.of(pairs[0]) for x in self.factors]
        factors = [0 if x is None else x.data_ptr() for x in scales]
        return (*addresses(*self._read(pairs), *outs), scalar, *factors)

    def __call__(self, values: tuple, owners: Owners) -> None:
        """Launches with these values. owners: the tensors whose addresses they are."""
        if self.only_addresses:
            self.launch((*self.ordered(values), *values[self.alpha_at :]), (*owners, NO_ROOM, None))
            return
        room = self._room()
        self._gather(owners, room)
        if self._decode is not None:
            self._decode(values[self._decoded_at : self.outs_at], room.decoded, [a for a, _ in owners[0]])
        self.launch(*self._of_kernel(values, room, owners))

    def fixed(self, values: tuple, owners: Owners) -> Callable[[], None]:
        """A function that launches with these values, and uses its own memory."""
        room, decode = self._room(), []
        if self._decode is not None:
            encoded = values[self._decoded_at : self.outs_at]
            decode = self._decode.fixed(encoded, room.decoded, [a for a, _ in owners[0]])
        final, kept = self._of_kernel(values, room, owners)
        launch = self.launch.fixed(final, kept)
        if self._maps and self._device.type == "cuda":
            # calls on other streams must find the table
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
        """The launches of these groups, for ``prepare``: the operands "a", "b" and "out" are lists.

        The addresses of global scales that are gathered follow the values.
        """
        values, n = [*self.values(pairs, outs, scalar, alpha)], self._count
        slots: dict[str, list] = {name: [[] for _ in pairs] for name in "ab"}
        sizes: dict[int, int] = {}

        def read(index: int, part: Part, group: int, size: int) -> None:
            slots["ab"[part.side]][group].append((part.name, index))
            sizes[index] = size

        for column, part in enumerate(self.operands):
            for i, pair in enumerate(pairs):
                read(column * n + i, part, i, span_bytes(part.of(pair)))
        for index, part in enumerate(self.factors, self.alpha_at + 1):
            if part is None:
                sizes[index] = span_bytes(alpha)
            elif self.scales[part] != "apart":
                read(index, part, 0, 4 * n if self.scales[part] == "row" else 4)
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
            lambda x: ([*zip(x["a"], x["b"])], x["out"], alpha),
        )

    @property
    def reads_owners(self) -> bool:
        """Whether a launch needs tensors, and not only addresses."""
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
        """The values and the owners that the launcher of the product takes."""
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
        rows = tuple(self._row(group, found) for group, found in zip(self._groups, groups))
        table = table_on_device(rows, self._device)
        return (*addresses(table, room.maps), *groups[0], *rest), (*owners, room, table)

    def tensors(self, pairs: Sequence[Pair]) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Every tensor of the groups' operands: the name of the part, the number of the group, and the tensor."""
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
    """How a kernel finds the global scales of groups.

    "none": no group has one. "one": all share it. "row": they lie side by side in memory, as elements of one tensor do.
    "apart": they must be gathered first.
    """
    if not any(x is not None for x in scales):
        return "none"
    if any(x is None for x in scales):
        return "apart"
    found = addresses(*scales)
    if found.count(found[0]) == len(found):
        return "one"
    return "row" if found == tuple(range(found[0], found[0] + 4 * len(found), 4)) else "apart"


def gathered(scales: Sequence[torch.Tensor | None], out: torch.Tensor) -> None:
    """Writes the groups' global scales to one tensor; a group without one gets 1."""
    one = torch.ones(1, dtype=torch.float32, device=out.device) if any(x is None for x in scales) else None
    torch.cat([one if x is None else x.reshape(1) for x in scales], out=out)


_tables: OrderedDict[tuple, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
_captured: list[tuple[torch.Tensor, torch.Tensor]] = []


def room_for_maps(count: int, device: torch.device) -> torch.Tensor:
    """Memory for ``count`` tensor maps, which a kernel writes."""
    words = MAP_BYTES // 8
    maps = torch.empty((count + 1) * words, dtype=torch.int64, device=device)
    # the host's allocator aligns less than a GPU's
    return maps[-maps.data_ptr() // 8 % words :]


def table_on_device(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """``rows`` on the device, copied there without waiting. A recent table of the same rows is not copied again."""
    host = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    if device.type != "cuda":
        return host
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.is_current_stream_capturing():
        # each replay of a graph copies again, from the same memory
        _captured.append((host, host.to(device, non_blocking=True)))
        return _captured[-1][1]
    key = (device, stream, rows)
    if key not in _tables:
        _tables[key] = host, host.to(device, non_blocking=True)
        if len(_tables) > _TABLES:
            _tables.popitem(last=False)
    _tables.move_to_end(key)
    return _tables[key][1]
