"""prepare_weight: repack an NVFP4 or MXFP4 weight once, for the GEMMs of sm_90a."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import OperandError, OperandTypeError
from ..formats import MXFP4, NVFP4, as_bytes, unpack_e2m1
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
from ..weight_layout import DECODERS, EXPONENTS, TILE_BYTES, interleaved, pack, pack_powers, tiles
from .calls import addresses, allocator
from .checks import DTYPE_NAMES, check_format, tensors


def prepare_weight(
    weight: BlockScaledTensor,
    up: BlockScaledTensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backend: Backend = "auto",
) -> PreparedWeight:
    """Repacks an NVFP4 or MXFP4 weight (N, K) for ``gemm(x, weight)`` on a Hopper GPU, once, when a model is loaded;
    or a stack (L, N, K) for ``grouped_gemm_contiguous``.

    The result takes as many bytes (rows padded to 128, K to 128) and stands for the same numbers, bit for bit.

    Args:
        weight: an operand, scales in any layout, of either sign. K is a multiple of a block.
            Scales of MXFP4 lie within a factor of 2**30 (float16: 2**24), but for blocks of zeros: they are read here,
            once, and a power of two may become the result's global scale.
        up: another like it: the result is both, for ``gated_gemm(x, result)``; the gate takes the product of
            ``weight``. Both have a global scale, each its own, or none.
        dtype: bfloat16 or float16: that of the x it will be multiplied with. An NVFP4 x takes float16.
        backend: a kernel packs NVFP4 on a GPU, in one launch, to the bits of torch.

    Raises:
        OperandError, OperandTypeError: another format, another dtype, two weights that do not fit together.
    """
    weights = {"weight": weight} if up is None else {"weight": weight, "up": up}
    for name, x in weights.items():
        _check(name, x)
    if dtype not in DECODERS:
        raise OperandTypeError.of("dtype", got=dtype, expected=" or ".join(map(str, DECODERS)))
    if up is not None:
        _check_pair(weight, up)
    if weight.format == MXFP4:
        packed, factors = _packed_mxfp4(list(weights.values()), dtype)
    else:
        packed = _packed(weight if up is None else _interleaved(weight, up), dtype, backend)
        factors = [x.global_scale for x in weights.values()]
    if up is None:
        return PreparedWeight(packed, weight.rows, weight.k, dtype, factors[0])
    return PreparedWeight(packed, weight.rows, weight.k, dtype, factors[0], True, factors[1])


def _check(name: str, weight: BlockScaledTensor) -> None:
    """Raises unless ``weight`` can be repacked."""
    if not isinstance(weight, BlockScaledTensor):
        raise OperandTypeError.of(name, got=type(weight).__name__, expected="BlockScaledTensor")
    check_format(name, weight, (NVFP4, MXFP4))


def _check_pair(gate: BlockScaledTensor, up: BlockScaledTensor) -> None:
    """Raises unless they fit together."""
    both = [
        f"{x.format.name} {tuple(x.data.shape)}, {'no' if x.global_scale is None else 'a'} global scale, {x.device}"
        for x in (gate, up)
    ]
    if both[0] != both[1]:
        expected = "the same format, sizes and device, global scales or none"
        raise OperandError.of("weights of a gated GEMM", got=" and ".join(both), expected=expected)


def _interleaved(gate: BlockScaledTensor, up: BlockScaledTensor) -> BlockScaledTensor:
    """Both in one, without global scales."""
    data = interleaved(as_bytes(gate.data), as_bytes(up.data))
    scale = interleaved(*(as_bytes(x.rowmajor_scale()) for x in (gate, up)))
    return BlockScaledTensor(data, scale if gate.is_batched else scale[0])


def _packed(weight: BlockScaledTensor, dtype: torch.dtype, backend: Backend) -> torch.Tensor:
    """Tiles (row tiles, K tiles, bytes), of a stack (L, …)."""
    key, target = weight.key, resolve(backend, weight.device)
    if target.backend == "reference" or not key.plain:
        packed = packed_by_torch(weight, dtype)
    else:
        found = key, dtype, target, session_number()
        call = _calls.find(found)
        if call is None:
            call = _calls[found] = PackCall(key, dtype, target)
        packed = call(weight)
    return packed if weight.is_batched else packed[0]


def packed_by_torch(weight: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    """Tiles (L, row tiles, K tiles, bytes) of every matrix."""
    return pack(_codes(weight), as_bytes(weight.rowmajor_scale()), dtype)


def _codes(weight: BlockScaledTensor) -> torch.Tensor:
    """(L, N, K), one a byte."""
    codes = unpack_e2m1(weight.data)
    return codes if weight.is_batched else codes.unsqueeze(0)


class Powers(NamedTuple):
    """Codes (…, N, K) of an MXFP4 weight, and scales (…, N, K / 32) as ``pack_powers`` takes them, times 2**shift."""

    codes: torch.Tensor
    exponents: torch.Tensor
    shift: int


def _powers(weight: BlockScaledTensor, dtype: torch.dtype) -> Powers:
    """Scales as the exponents of NVFP4's bytes. Waits for the device, once.

    Raises:
        OperandError: no power of two brings all that matter into range.
    """
    codes, scales = unpack_e2m1(weight.data), as_bytes(weight.rowmajor_scale())
    scales = scales if weight.is_batched else scales[0]
    nan = scales == 0xFF
    # 2**7 times the scale, with the bias of five bits
    exponents = scales.to(torch.int16) - (127 - 7 - 15)
    used = exponents[(codes & 7).bool().unflatten(-1, (-1, MXFP4.block)).any(-1) & ~nan]
    least, most = EXPONENTS[dtype]
    low, high = torch.stack([used.min(), used.max()]).tolist() if used.numel() else (least, least)
    if high - low > most - least:
        raise OperandError.of(
            f"scales of an MXFP4 weight for {dtype}",
            got=f"2**{low - 22} to 2**{high - 22}",
            expected=f"within a factor of 2**{most - least}, where a block is not zero",
            hint="" if dtype is torch.bfloat16 else "torch.bfloat16 takes a factor of 2**30.",
        )
    shift = min(low - least, 0) + max(high - most, 0)
    return Powers(codes, (exponents - shift).clamp(0, 30).masked_fill(nan, 31).to(torch.uint8), shift)


def _packed_mxfp4(
    weights: Sequence[BlockScaledTensor], dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Tiles of one weight, or of two that are interleaved, as those of ``_packed``, and their global scales."""
    found = [_powers(x, dtype) for x in weights]
    codes, exponents = found[0][:2]
    if len(found) > 1:
        codes, exponents = (interleaved(*x) for x in zip(*(powers[:2] for powers in found)))
    factors = [torch.tensor(2.0**x.shift, dtype=torch.float32, device=codes.device) for x in found]
    if weights[0].is_batched:
        packed = pack_powers(codes, exponents, dtype)
    else:
        packed = pack_powers(codes.unsqueeze(0), exponents.unsqueeze(0), dtype)[0]
    return packed, factors if any(x.shift for x in found) else [None] * len(found)


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
