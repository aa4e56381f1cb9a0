"""prepare_weight: repack an NVFP4 weight once, for the GEMMs of sm_90a."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError
from ..formats import NVFP4, as_bytes
from ..kernels.pack.config import PackArguments, PackConfig
from ..kernels.quantize.arguments import Strides
from ..operand import BlockScaledTensor, OperandKey
from ..prepared_weight import PreparedWeight
from ..runtime.backend import Backend, resolve
from ..runtime.bounded import Bounded
from ..runtime.kernel import Kernel
from ..runtime.launch import Tensors
from ..runtime.simulating import session_number
from ..target import Target
from ..weight_layout import DECODERS, TILE_BYTES, interleaved, pack, tiles
from .calls import addresses, allocator
from .checks import DTYPE_NAMES, check_format, tensors


def prepare_weight(
    weight: BlockScaledTensor,
    up: BlockScaledTensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backend: Backend = "auto",
) -> PreparedWeight:
    """Repacks an NVFP4 weight (N, K) for ``gemm(x, weight)`` on a Hopper GPU, once, when a model is loaded.

    The result takes as many bytes (rows padded to 128, K to 128) and stands for the same numbers, bit for bit.

    Args:
        weight: an NVFP4 operand without a batch dimension, scales in any layout, of either sign. K is a multiple of 16.
        up: another (N, K): the result is both, for ``gated_gemm(x, result)``; the gate takes the product of ``weight``.
            Both have a global scale, each its own, or none.
        dtype: bfloat16 or float16: that of the x it will be multiplied with. An NVFP4 x takes float16.
        backend: a kernel packs CUDA tensors, in one launch, to the bits of torch.

    Raises:
        OperandError, OperandTypeError: another format, a batch, another dtype, two weights that do not fit together.
    """
    weights = {"weight": weight} if up is None else {"weight": weight, "up": up}
    for name, x in weights.items():
        _check(name, x)
    if dtype not in DECODERS:
        raise OperandTypeError.of("dtype", got=dtype, expected=" or ".join(map(str, DECODERS)))
    if up is None:
        return PreparedWeight(_packed(weight, dtype, backend), weight.rows, weight.k, dtype, weight.global_scale)
    packed = _packed(_interleaved(weight, up), dtype, backend)
    return PreparedWeight(packed, weight.rows, weight.k, dtype, weight.global_scale, True, up.global_scale)


def _check(name: str, weight: BlockScaledTensor) -> None:
    """Raises unless ``weight`` can be repacked."""
    if not isinstance(weight, BlockScaledTensor):
        raise OperandTypeError.of(name, got=type(weight).__name__, expected="BlockScaledTensor")
    check_format(name, weight, (NVFP4,))
    if weight.is_batched:
        raise OperandError.of(
            name, got=f"a batch of {weight.batch}", expected="a matrix (N, K)", hint="Prepare each matrix."
        )


def _interleaved(gate: BlockScaledTensor, up: BlockScaledTensor) -> BlockScaledTensor:
    """Both in one, without global scales.

    Raises:
        OperandError: they do not fit together.
    """
    both = [f"{x.rows} x {x.k}, {'no' if x.global_scale is None else 'a'} global scale, {x.device}" for x in (gate, up)]
    if both[0] != both[1]:
        expected = "the same sizes and device, global scales or none"
        raise OperandError.of("weights of a gated GEMM", got=" and ".join(both), expected=expected)
    data = interleaved(as_bytes(gate.data), as_bytes(up.data))
    return BlockScaledTensor(data, interleaved(*(as_bytes(x.rowmajor_scale())[0] for x in (gate, up))))


def _packed(weight: BlockScaledTensor, dtype: torch.dtype, backend: Backend) -> torch.Tensor:
    """Tiles (row tiles, K tiles, bytes)."""
    key, target = weight.key, resolve(backend, weight.device)
    if target.backend == "reference" or not key.plain:
        return packed_by_torch(weight, dtype)[0]
    found = key, dtype, target, session_number()
    call = _calls.find(found)
    if call is None:
        call = _calls[found] = PackCall(key, dtype, target)
    return call(weight)[0]


def packed_by_torch(weight: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """Tiles (L, row tiles, K tiles, bytes) of every matrix."""
    data = as_bytes(weight.data)
    codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)
    return pack(codes if weight.is_batched else codes.unsqueeze(0), as_bytes(weight.rowmajor_scale()), dtype)


class PackCall:
    """The packing kernel for weights of one kind, (L, N, K) or (N, K)."""

    def __init__(self, key: OperandKey, dtype: torch.dtype, target: Target) -> None:
        shape = (key.batch, *tiles(key.rows, key.k), TILE_BYTES)
        self.new = allocator(torch.empty(shape, dtype=torch.uint8, device=key.device))
        arguments = PackArguments(
            data=0,
            scale=0,
            packed=0,
            rows=key.rows,
            k=key.k,
            k_tiles=shape[2],
            batch=key.batch,
            data_strides=Strides(*key.strides),
            scale_strides=Strides(*key.scale_strides),
            packed_batch_stride=math.prod(shape[1:]),
        )
        config = PackConfig(key.format, DTYPE_NAMES[dtype], key.scale_layout, target.arch)
        self._launch = KERNEL.launcher(config, target, key.device, arguments, _touched)

    def __call__(self, weight: BlockScaledTensor) -> torch.Tensor:
        """Tiles (L, row tiles, K tiles, bytes)."""
        packed = self.new()
        self._launch(addresses(weight.data, weight.scale, packed), (weight, packed))
        return packed


def _touched(weight: BlockScaledTensor, packed: torch.Tensor) -> Tensors:
    return tensors({"weight.data": weight.data, "weight.scale": weight.scale}, {"packed": packed})


def _host(config: PackConfig) -> Callable[..., Any]:
    from ..kernels.pack.kernel import Pack

    return Pack(config)


_calls = Bounded()
KERNEL = Kernel("pack_weight", PackArguments, _host)
compile_pack = KERNEL.compile
