"""grouped_gemm with prepared weights, planned, for ``prepare``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import OperandError
from ...operand import span_bytes
from ...runtime.apart import Apart
from ...runtime.launch import SimLauncher
from ..calls import as_alpha
from ..groups import GroupsCall
from ..planned import Preparation
from .groups_launch import ListLaunch, Owners, Pair, rows_of, scales_of
from .operands import x_parts


def preparation_of_list(r: Any, call: GroupsCall) -> Preparation:
    """A call with ``r``, planned. Its operands "a", "b" and "out" are lists."""
    problems = r.problems
    if not call.whole:
        empty = next(i for i, (x, _) in enumerate(problems) if not rows_of(x))
        hint = "Leave the group out: it has no result."
        raise OperandError.of(f"group {empty}: rows of a of a prepared call", got=0, expected="at least 1", hint=hint)
    launch: ListLaunch = call.launch
    scalar, alpha = as_alpha(r.alpha)
    alpha = None if alpha is None else alpha.reshape(-1)
    outs = call.new() if r.out is None else list(r.out)
    xs, weights = map(list, zip(*problems))
    slots, sizes, apart = _places(launch, problems, alpha)
    first = launch.outs_at
    written = [(first + i, span_bytes(x)) for i, x in enumerate(outs)]
    return Preparation(
        _Launches(launch),
        (*launch.values(problems, outs, scalar, alpha), *(x.data_ptr() for x in apart)),
        {"a": xs, "b": weights, "out": outs},
        slots | {"out": [[(None, first + i)] for i in range(len(outs))]},
        Apart(sizes, written),
        lambda given: ([*zip(given["a"], given["b"])], given["out"], alpha),
    )


def _places(
    launch: ListLaunch, pairs: Sequence[Pair], alpha: torch.Tensor | None
) -> tuple[dict[str, list], dict[int, int], list[torch.Tensor]]:
    """For x and weight of each group, their parts and the places of those among the values; bytes of all that is read,
    by place; global scales that are gathered, whose addresses follow the values."""
    n, first = len(pairs), launch.alpha_at + 1
    slots: dict[str, list] = {"a": [], "b": [[("packed", i)] for i in range(n)]}
    sizes = {i: span_bytes(b.packed) for i, (_, b) in enumerate(pairs)}
    for i, (x, _) in enumerate(pairs):
        parts = x_parts(x)
        names = (None,) if len(parts) == 1 else ("data", "scale")
        slots["a"].append([(name, n * (1 + j) + i) for j, name in enumerate(names)])
        sizes |= {n * (1 + j) + i: span_bytes(part) for j, part in enumerate(parts)}
    of_x, *of_weights = zip(launch.scales, scales_of(pairs))
    sides = [
        side
        for part, of_weight in zip(("global_scale", "up_global_scale"), of_weights)
        for side in [("", "", None)] * (alpha is not None)
        + [("a", "global_scale", of_x)] * (of_x[0] != "none")
        + [("b", part, of_weight)] * (of_weight[0] != "none")
    ]
    apart: list[torch.Tensor] = []
    last = first + len(sides)
    for at, (name, part, found) in enumerate(sides, first):
        if found is None:
            sizes[at] = span_bytes(alpha)
        elif found[0] != "apart":
            slots[name][0].append((part, at))
            sizes[at] = 4 * n if found[0] == "row" else 4
        else:
            for i, scale in enumerate(found[1]):
                if scale is not None:
                    slots[name][i].append((part, last + len(apart)))
                    sizes[last + len(apart)] = 4
                    apart.append(scale)
    return slots, sizes, apart


class _Launches:
    """The launches of a list, as ``prepare`` makes them."""

    def __init__(self, made: ListLaunch) -> None:
        self._made, self.reads_owners = made, made.gathers or isinstance(made.launch, SimLauncher)

    def __call__(self, values: tuple, owners: Owners) -> None:
        self._made.run(values, owners)

    def fixed(self, values: tuple, owners: Owners) -> Callable[[], None]:
        """The call with these values."""
        return self._made.fixed(values, owners)
