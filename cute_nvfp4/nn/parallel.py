"""Tensor parallelism of ``NVFP4Linear``: styles for ``torch.distributed.tensor.parallel.parallelize_module``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.nn.linear import NVFP4Linear
from cute_nvfp4.nn.peer_sums import PeerSums
from cute_nvfp4.nn.shard import LinearShard
from cute_nvfp4.weight_shards import shard_columns, shard_rows


class NVFP4ColwiseParallel(ParallelStyle):
    """Shards a layer by its output features: rank r has rows of W and returns columns of the result.

    Every rank is given the same x. The codes, scales and global scale of W are those of the whole layer, so the results
    are its columns. The layer is changed in place; its ``state_dict`` is that of the shard.

    parts: the output features of the layers in a fused one, such as (q, k, v) or (gate, up); a rank has its share of
    each. gather_output: whether each rank gets all columns, in rank order; not possible with parts.
    """

    def __init__(self, *, parts: Sequence[int] | None = None, gather_output: bool = False) -> None:
        super().__init__()
        if parts is not None and gather_output:
            got = "parts and gather_output"
            raise OperandError.of("a column-parallel style", got=got, expected="one of them")
        self.parts, self.gather_output = parts, gather_output

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        layer, rank, count = _checked(module, device_mesh)
        layer.replace_weight(shard_rows(layer.weight, rank, count, self.parts), layer.in_features)
        if layer.bias is not None:
            sizes = [layer.bias.shape[0]] if self.parts is None else list(self.parts)
            mine = [x.chunk(count)[rank] for x in layer.bias.detach().split(sizes)]
            layer.bias = torch.nn.Parameter(torch.cat(mine), requires_grad=layer.bias.requires_grad)
        layer.shard = LinearShard("columns", device_mesh.get_group(), self.gather_output)
        return layer


class NVFP4RowwiseParallel(ParallelStyle):
    """Shards a layer by its input features: rank r has columns of W and is given columns of x, as a column-parallel
    layer returns them. The products are added over the ranks, and the bias once.

    A rank's product is rounded to the dtype of x before the sum. The layer is changed in place; its ``state_dict`` is
    that of the shard.

    sums: a ``PeerSums`` for the results that it holds; None: an all-reduce of the mesh's group adds all of them.
    """

    def __init__(self, *, sums: PeerSums | None = None) -> None:
        super().__init__()
        self.sums = sums

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        layer, rank, count = _checked(module, device_mesh)
        if layer.weight.k != layer.in_features:
            raise OperandError.of(
                "in_features of a row-parallel layer", got=layer.in_features, expected="a multiple of 16 for each rank"
            )
        weight = shard_columns(layer.weight, rank, count)
        layer.replace_weight(weight, weight.k)
        if layer.input_scale is not None:
            layer.input_scale = layer.input_scale.chunk(count)[rank].clone()
        layer.shard = LinearShard("rows", device_mesh.get_group(), sums=self.sums)
        return layer


def _checked(module: torch.nn.Module, mesh: DeviceMesh) -> tuple[NVFP4Linear, int, int]:
    """The layer, this rank, and the number of ranks.

    Raises:
        OperandError, OperandTypeError: the layer is of another kind or sharded already, or the mesh is not a line.
    """
    if not isinstance(module, NVFP4Linear):
        hint = "quantize_model and load_checkpoint make them. Layers of torch take torch's styles."
        raise OperandTypeError.of("module", got=type(module).__name__, expected="NVFP4Linear", hint=hint)
    if mesh.ndim != 1:
        hint = 'Give one dimension of it: mesh["tp"].'
        raise OperandError.of("device mesh", got=f"{mesh.ndim} dimensions", expected="one", hint=hint)
    if module.shard is not None:
        raise OperandError.of("module", got=f"a shard already ({module.shard.axis})", expected="a whole layer")
    return module, mesh.get_local_rank(), mesh.size()
