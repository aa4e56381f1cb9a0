"""The fast path of grouped_gemm of prepared weights, where tensors are like those of an earlier call.

torch's own guards say in C++, of all tensors at once, whether dtypes, shapes, strides, devices and gradients are those
of a call that was planned and checked. What they do not see are addresses: those are looked at here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add, or_
from typing import Any

from torch import Tensor, dtype, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from ...operand import span_bytes
from ...planning.packed import PackedPlan
from ...prepared_weight import PreparedWeight
from ...runtime.apart import overlap
from ...runtime.backend import Backend
from ...runtime.bounded import Bounded
from ...runtime.simulating import world
from ..alike import Alike
from ..dispatch import increment_versions, modes
from ..groups import GroupsCall
from .groups import PREPARED_GROUPS
from .groups_launch import NO_ROOM, Pair


def prepared_groups(
    problems: Sequence[Pair],
    alpha: float | Tensor | None,
    out: Sequence[Tensor] | None,
    out_dtype: dtype | None,
    config: PackedPlan | None,
    backend: Backend,
    gate: str,
) -> list[Tensor]:
    """``grouped_gemm`` of prepared weights."""
    given = problems, alpha, out, out_dtype, config, backend, gate
    if alpha is not None or config is not None:
        return PREPARED_GROUPS(*given)
    results = _repeated(problems, out, out_dtype, backend, gate)
    if results is not None:
        return results
    results = PREPARED_GROUPS(*given)
    call = PREPARED_GROUPS.found(*given)
    if isinstance(call, GroupsCall) and call.whole and call.launch.only_addresses:
        repeated = RepeatedCall(call, *zip(*problems), results, out is not None)
        if repeated.usable:
            _calls[_key([b for _, b in problems], out, out_dtype, backend, gate)] = repeated
    return results


_calls = Bounded()
"""The last call that was planned or looked up, of those with the same ``_key``."""


def _key(weights: Sequence[PreparedWeight], out: Any, out_dtype: dtype | None, backend: Backend, gate: str) -> tuple:
    kept = [b.key for b in weights]
    return *kept, out_dtype, backend, gate, world(kept[0].on_cpu), None if out is None else len(out)


def _repeated(
    problems: Sequence[Pair], out: Sequence[Tensor] | None, out_dtype: dtype | None, backend: Backend, gate: str
) -> list[Tensor] | None:
    """Results, if tensors are like those of the last call of such weights, and apart; None: look closer."""
    if is_dynamo_compiling() or modes() or not (out is None or type(out) is list or type(out) is tuple):
        return None
    try:
        xs, weights = zip(*problems, strict=True)
        call = _calls.get(_key(weights, out, out_dtype, backend, gate))
    except (AttributeError, TypeError, ValueError):
        # no pairs with weights, or something unhashable: refused by the call
        return None
    return None if call is None else call(problems, xs, weights, out)


class RepeatedCall:
    """A call whose groups all have rows of numbers, for tensors like its own. usable: whether those are aligned."""

    def __init__(
        self, call: GroupsCall, xs: Sequence[Tensor], weights: Sequence[PreparedWeight], outs: list[Tensor], given: bool
    ) -> None:
        self._launch, self._ordered, self._new = call.launch.launch, call.launch.ordered, call.new
        self._count, self._scaled = 3 * len(xs), weights[0].global_scale is not None
        self._products = len(weights[0].global_scales)
        scales = [x for b in weights for x in b.global_scales] if self._scaled else []
        self._like = Alike([*xs, *(outs if given else ()), *scales])
        every = (*[b.packed for b in weights], *xs, *outs, *scales)
        self._sizes = [span_bytes(x) for x in every]
        self._written = [x in range(2 * len(xs), self._count) for x in range(len(every))]
        places = [x.data_ptr() for x in every]
        self._steps = self._steps_of(places[self._count :])
        self._known = Bounded()
        self.usable = self._values(places, given) is not None

    def __call__(
        self,
        problems: Sequence[Pair],
        xs: Sequence[Tensor],
        weights: Sequence[PreparedWeight],
        out: Sequence[Tensor] | None,
    ) -> list[Tensor] | None:
        """Results, or None if it is not sure that all is as it must be."""
        scales = [x for b in weights for x in b.global_scales] if self._scaled else ()
        if not self._like.check((*xs, *(out or ()), *scales)):
            return None
        outs = self._new() if out is None else list(out)
        places = tuple(map(Tensor.data_ptr, (*[b.packed for b in weights], *xs, *outs, *scales)))
        values = self._known.get(places)
        if values is None:
            values = self._values(places, out is not None)
            if values is None:
                return None
            self._known[places] = values
        self._launch(values, (problems, outs, None, NO_ROOM, None))
        if out is not None and is_grad_enabled():
            increment_versions(tuple(outs))
        return outs

    def _values(self, places: Sequence[int], given: bool) -> tuple | None:
        """What the launch varies, with tensors at ``places``; None unless they are aligned, and given outputs apart."""
        if reduce(or_, places[: self._count]) % 16 or self._steps_of(places[self._count :]) != self._steps:
            return None
        if given and self._overlap(places):
            return None
        return (*self._ordered(places), 1.0, *places[self._count : self._count + self._products])

    def _steps_of(self, scales: Sequence[int]) -> list[int]:
        """How far the global scales of a product are from its first."""
        return [x - scales[i % self._products] for i, x in enumerate(scales)]

    def _overlap(self, places: Sequence[int]) -> bool:
        """Whether an output shares bytes with another tensor."""
        return overlap(zip(places, map(add, places, self._sizes), self._written))
