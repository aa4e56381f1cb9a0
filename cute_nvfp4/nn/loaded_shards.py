"""Shards of layers that a loader reads: the part that a rank has, and the whole tensors when a model is saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cute_nvfp4.errors import OperandError
from cute_nvfp4.nn.shard import LinearShard

FEWER = "Use fewer ranks, or load in one process."


@dataclass(frozen=True, eq=False)
class Cut:
    """The part of a layer's tensors that this rank has, taken from the distributed tensors that a loader filled.

    axis: as in ``LinearShard``. parts: the number of equal matrices whose rows a fused weight has; a rank has its share
    of each.
    """

    axis: str
    like: DTensor
    parts: int = 1

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> Cut | None:
        """The cut of the first distributed tensor with two dimensions; None if no tensor is distributed."""
        for x in tensors:
            if isinstance(x, DTensor):
                (placement,) = x.placements
                axis = "columns" if placement.dim % x.ndim == 0 else "rows"
                return cls(axis, x, getattr(placement, "split_factor", 1))
        return None

    @property
    def count(self) -> int:
        """The number of ranks."""
        return self.like.device_mesh.size()

    def sizes(self, n: int, k: int) -> tuple[int, int]:
        """The rank's (N, K), from those of the whole layer."""
        return (n // self.count, k) if self.axis == "columns" else (n, k // self.count)

    def mine(self, x: torch.Tensor) -> torch.Tensor:
        """The rank's elements of a vector along the axis that is cut."""
        rank = self.like.device_mesh.get_local_rank()
        return x.unflatten(0, (self.parts, self.count, -1))[:, rank].flatten().clone()

    def shard(self, *, gathered: bool = False, split: bool = False) -> LinearShard:
        """The exchange of a layer with this part."""
        group = self.like.device_mesh.get_group()
        return LinearShard(self.axis, group, gathered=gathered, split=split, parts=self.parts)


def local(x: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that this rank has."""
    return x.detach().to_local() if isinstance(x, DTensor) else x.detach()


def check_cut(name: str, axis: str, n: int, k: int, block: int, count: int) -> None:
    """Checks that a layer (N, K), with a scale for each ``block`` elements, divides among ``count`` ranks.

    Raises:
        OperandError: it does not.
    """
    if axis == "columns" and n % count:
        got, expected = n, f"a multiple of {count}"
        raise OperandError.of(f"rows (N) of {name} over {count} ranks", got=got, expected=expected, hint=FEWER)
    if axis == "rows" and k % (count * block):
        expected = f"a multiple of {count * block} (ranks times {block}, which share a scale)"
        raise OperandError.of(f"columns (K) of {name} over {count} ranks", got=k, expected=expected, hint=FEWER)


_CUT_ALONG = {
    "columns": {"weight": 0, "weight_packed": 0, "weight_scale": 0, "bias": 0},
    "rows": {"weight": 1, "weight_packed": 1, "weight_scale": 1, "pre_quant_scale": 0},
}
"""The dimension along which each tensor of a checkpoint's layer is cut, by its name within the layer."""


def whole_tensors(found: dict[str, torch.Tensor], shard: LinearShard | None) -> dict[str, torch.Tensor]:
    """The whole tensors of a layer, by their names within it, if each rank has the shard ``found``.

    Every rank must call it.
    """
    cut = {} if shard is None else _CUT_ALONG[shard.axis]
    return {name: _whole(x, cut[name], shard) if name in cut else x for name, x in found.items()}


def whole_experts(found: dict[str, torch.Tensor], shard: LinearShard | None) -> dict[str, torch.Tensor]:
    """The whole tensors of all experts, named by expert, matrix and tensor, if each rank has shards, or some experts.

    All matrices but ``down_proj`` are cut by rows.
    """
    if shard is None:
        return found
    made, count = {}, len({name.split(".")[0] for name in found})
    for name, x in found.items():
        expert, matrix, part = name.split(".")
        if shard.axis == "experts":
            every = _of_all(x, shard)
            made |= {f"{rank * count + int(expert)}.{matrix}.{part}": y for rank, y in enumerate(every)}
            continue
        axis = "rows" if matrix == "down_proj" else "columns"
        made[name] = _whole(x, _CUT_ALONG[axis][part], shard) if part in _CUT_ALONG[axis] else x
    return made


def _whole(x: torch.Tensor, dim: int, shard: LinearShard) -> torch.Tensor:
    """The whole tensor, from the shards that the ranks have."""
    every = _of_all(x, shard)
    if x.element_size() == 1:
        every = [y.view(torch.uint8) for y in every]
    if dim == 0 and shard.parts > 1:
        return torch.cat([y.unflatten(0, (shard.parts, -1)) for y in every], dim=1).flatten(0, 1).view(x.dtype)
    return torch.cat(every, dim=dim).view(x.dtype)


def _of_all(x: torch.Tensor, shard: LinearShard) -> list[torch.Tensor]:
    """The tensors that the ranks have in the place of x, in rank order."""
    mine = x.detach().contiguous()
    sent = mine.view(torch.uint8) if mine.element_size() == 1 else mine
    every = [torch.empty_like(sent) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(every, sent, group=shard.group)
    return [y.view(x.dtype) for y in every]
