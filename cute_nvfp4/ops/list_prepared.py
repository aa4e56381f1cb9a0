"""A list of products, planned, for ``prepare``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import OperandError
from ..operand import span_bytes
from ..runtime.overlap import OverlapCheck
from .checks import as_alpha
from .groups import GroupsCall, rows_of
from .list_launch import ListLaunch, Pair
from .planned import Preparation


def preparation_of_list(
    problems: Sequence[Pair], out: Sequence[torch.Tensor] | None, alpha: Any, call: GroupsCall
) -> Preparation:
    """The planned ``call`` with these. Its operands "a", "b" and "out" are lists."""
    if not call.whole:
        empty = next(i for i, (x, _) in enumerate(problems) if not rows_of(x))
        hint = "Leave the group out: it has no result."
        raise OperandError.of(f"group {empty}: rows of a of a prepared call", got=0, expected="at least 1", hint=hint)
    launch: ListLaunch = call.launch
    scalar, alpha = as_alpha(alpha)
    alpha = None if alpha is None else alpha.reshape(-1)
    outs = call.new() if out is None else list(out)
    slots, sizes, apart = _places(launch, problems, alpha)
    first = launch.outs_at
    written = [(first + i, span_bytes(x)) for i, x in enumerate(outs)]
    return Preparation(
        launch,
        (*launch.values(problems, outs, scalar, alpha), *(x.data_ptr() for x in apart)),
        {"a": [a for a, _ in problems], "b": [b for _, b in problems], "out": outs},
        slots | {"out": [[(None, first + i)] for i in range(len(outs))]},
        OverlapCheck(sizes, written),
        lambda given: ([*zip(given["a"], given["b"])], given["out"], alpha),
    )


def _places(
    launch: ListLaunch, pairs: Sequence[Pair], alpha: torch.Tensor | None
) -> tuple[dict[str, list], dict[int, int], list[torch.Tensor]]:
    """The parts of a and b of each group, and their places among the values; bytes of all that is read, by
    place; global scales that are gathered, whose addresses follow the values."""
    n, sizes, apart = len(pairs), {}, []
    slots: dict[str, list] = {name: [[] for _ in pairs] for name in "ab"}
    for column, part in enumerate(launch.operands):
        for i, pair in enumerate(pairs):
            slots["ab"[part.side]][i].append((part.name, column * n + i))
            sizes[column * n + i] = span_bytes(part.of(pair))
    first = launch.alpha_at + 1
    last = first + len(launch.factors)
    for at, part in enumerate(launch.factors, first):
        if part is None:
            sizes[at] = span_bytes(alpha)
            continue
        side, how = slots["ab"[part.side]], launch.scales[part]
        if how != "apart":
            side[0].append((part.name, at))
            sizes[at] = 4 * n if how == "row" else 4
            continue
        for i, pair in enumerate(pairs):
            scale = part.of(pair)
            if scale is not None:
                side[i].append((part.name, last + len(apart)))
                sizes[last + len(apart)] = 4
                apart.append(scale)
    return slots, sizes, apart
