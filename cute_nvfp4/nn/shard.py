"""The exchange of a linear layer that has a shard of its weight with the other ranks: sums, scales, gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cute_nvfp4.formats import NVFP4
from cute_nvfp4.nn.peer_sums import PeerSums
from cute_nvfp4.ops.quantize import tensor_amax
from cute_nvfp4.quantization.blocks import global_scale_from_amax
from cute_nvfp4.quantization.rules import resolve_rule


@dataclass(frozen=True, eq=False)
class LinearShard:
    """The exchange of a sharded layer with ``group``.

    Collectives run on the stream of the call, so a CUDA graph records them.

    axis: "columns": a column-parallel layer has rows (N) of W; every rank is given the same x, and gradients of x are
    added over the ranks. "rows": a row-parallel layer has columns (K) of W and of x; its results are added over the
    ranks, and a computed global scale of x is that of all columns. "experts": a rank has some of a layer's experts;
    results are added, too.
    gathered: whether a column-parallel layer returns the results of all ranks.
    sums: adds the results that it holds; an all-reduce of the group adds others.
    split: whether a row-parallel layer is given all columns of x, as every rank has them.
    parts: the number of equal matrices whose rows a fused weight has; a rank has its share of each.
    """

    axis: str
    group: dist.ProcessGroup
    gathered: bool = False
    sums: PeerSums | None = None
    split: bool = False
    parts: int = 1

    def entered(self, x: torch.Tensor) -> torch.Tensor:
        """The x that the layer multiplies."""
        if (self.axis == "columns" or self.split) and x.requires_grad and torch.is_grad_enabled():
            x = _SumOfGradients.apply(x, self.group)
        if self.split:
            return x.chunk(dist.get_world_size(self.group), dim=-1)[dist.get_rank(self.group)]
        return x

    def summed(self, y: torch.Tensor) -> torch.Tensor:
        """The product over all columns, from a rank's own product: new memory, which may be written to."""
        if self.axis == "columns":
            return y
        if y.requires_grad and torch.is_grad_enabled():
            return _Sum.apply(y, self.group)
        return self.sums(y) if self.sums is not None and self.sums.holds(y) else _summed(y, self.group)

    def left(self, y: torch.Tensor) -> torch.Tensor:
        """The result of the layer, from its product with the bias."""
        return _Gathered.apply(y, self.group) if self.gathered else y

    def global_scale(self, x: torch.Tensor, rule: str) -> str | torch.Tensor:
        """The global scale with which x (M, K) is quantized: "auto", or that of the columns of all ranks."""
        if self.axis == "columns":
            return "auto"
        return common_global_scale(x, rule, self.group)


def common_global_scale(x: torch.Tensor, rule: str, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The global scale that one process would compute for the x of all ranks: float32, without dimensions."""
    largest = tensor_amax(x.detach())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return global_scale_from_amax(largest, resolve_rule(rule, NVFP4)).reshape(())


class _SumOfGradients(torch.autograd.Function):
    """Returns x; its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(dy.clone(memory_format=torch.contiguous_format), ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum over the ranks; each rank's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _summed(y.clone(), group)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


class _Gathered(torch.autograd.Function):
    """The columns of all ranks, (…, N of all); a rank's gradient is its columns of the whole gradient."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.columns = slice(dist.get_rank(group) * y.shape[-1], (dist.get_rank(group) + 1) * y.shape[-1])
        every = [torch.empty_like(y) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, y.contiguous(), group=group)
        return torch.cat(every, dim=-1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy[..., ctx.columns], None


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(x, group=group)
    return x
