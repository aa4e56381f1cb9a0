"""routing_maps: sorts slots by expert, on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...kernels.moe.config import MAPS_WARPS, WARP, MapsArguments, MapsConfig, ZeroedRows, maps_size
from ...lazy import Lazily
from ...runtime.backend import Backend
from ...runtime.kernel import Kernel
from ...target import Target
from ..arguments import TENSOR
from ..operation import Operation
from ..planned import PlannedCall

ZEROING_CTAS = 132
"""The largest number of CTAs that zero rows."""
ID_DTYPES = {torch.int32: "int32", torch.int64: "int64"}


class Maps(NamedTuple):
    """The routing maps of slots: int32 views of one tensor, ``whole``.

    offsets (experts + 1): where the rows of each expert begin. slots, experts (slots): the slot and the expert of a
    row, undefined from ``offsets[-1]`` on. rows (slots): the row of a slot, or -1.
    """

    whole: torch.Tensor
    offsets: torch.Tensor
    slots: torch.Tensor
    experts: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, whole: torch.Tensor, experts: int) -> Maps:
        """The maps in a tensor from ``routing_maps``."""
        slots = (len(whole) - experts - 1) // 3
        return cls(whole, *whole.split([experts + 1, slots, slots, slots]))


def routing_maps(
    ids: torch.Tensor,
    experts: int,
    offset: int = 0,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """The maps (``Maps``) of ids (T, k), in one int32 tensor.

    The sort is stable: rows of an expert are in the order of their slots. ids: contiguous numbers of experts; those
    outside ``offset`` … ``offset + experts - 1`` get no row. sums: rows (T, H), at multiples of 16 bytes, that the
    launch also sets to zero.
    """
    return MAPS.run(ids, experts, offset, out, backend, sums)


def _check(r: Any) -> torch.Tensor:
    size = maps_size(r.experts, r.ids.numel())
    return torch.empty(size, dtype=torch.int32, device=r.ids.device) if r.out is None else r.out


def _plan(r: Any, target: Target) -> PlannedCall:
    slots, sums = r.ids.numel(), None
    config = MapsConfig(ID_DTYPES[r.ids.dtype], MAPS_WARPS[slots > WARP], r.sums is not None, target.arch)
    if r.sums is not None:
        (count, width), size = r.sums.shape, r.sums.element_size()
        sums = ZeroedRows("sums", count, width * size, r.sums.stride(0) * size, min(count, ZEROING_CTAS))
    arguments = MapsArguments("ids", "out", slots, r.experts, r.offset, sums)
    return MAPS.planned(KERNEL, config, target, arguments, r)


def _reference(r: Any) -> torch.Tensor:
    """Computes the maps by torch's stable sort."""
    out, count = torch.full_like(r.out, -1), r.experts
    if r.sums is not None:
        r.sums.zero_()
    offsets, slots, experts, rows = Maps.of(out, count)[1:]
    chosen = r.ids.reshape(-1).long() - r.offset
    chosen = torch.where((chosen >= 0) & (chosen < count), chosen, count)
    order = chosen.argsort(stable=True)
    offsets[1:] = torch.bincount(chosen, minlength=count)[:count].cumsum(0)
    offsets[0] = 0
    there = order[: int(offsets[-1])]
    slots[: len(there)] = there.int()
    experts[: len(there)] = chosen[there].int()
    rows[there] = torch.arange(len(there), dtype=torch.int32, device=out.device)
    return out


KERNEL = Kernel("moe_maps", MapsArguments, Lazily("kernels.moe.maps", "RoutingMaps"))
MAPS = Operation(routing_maps, {"ids": TENSOR, "sums": TENSOR}, check=_check, reference=_reference, plan=_plan)
