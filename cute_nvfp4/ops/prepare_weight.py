"""prepare_weight: repacks a block-scaled weight once, for GEMMs that decode it."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import OperandError, OperandTypeError, not_quantized
from ..formats import FORMATS
from ..kernels.pack.config import PackArguments, PackConfig
from ..kernels.quantize.arguments import Strides
from ..lazy import Lazily
from ..operand import BlockScaledTensor
from ..prepared_weight import PreparedWeight
from ..runtime.backend import Backend, resolve
from ..runtime.kernel import Kernel
from ..target import Target
from ..weight_layout import PACKINGS, tiles
from ..weight_packing import in_turn, packed_by_torch, packed_powers, packing_of, rounded
from .arguments import OPERAND
from .checks import DTYPE_NAMES, check_format
from .operation import Operation
from .planned import PlannedCall


def prepare_weight(
    weight: BlockScaledTensor,
    up: BlockScaledTensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    promoted: bool = False,
    backend: Backend = "auto",
) -> PreparedWeight:
    """Repacks a weight (N, K), once, when a model is loaded, for ``gemm(x, weight)`` with 16-bit x, or with FP8 x on a
    Hopper GPU. A stack (L, N, K) is for ``grouped_gemm_contiguous``.

    The result takes as many bytes (rows padded to 128, K to 128) and has the same values, bit for bit, except for
    float8_e4m3fn.

    Args:
        weight: a block-scaled operand; scales in any layout and of either sign. K is a multiple of a block.
            Scales of MXFP4, blocks of zeros apart, must lie within a factor of 2**30 (for float16 2**24); this function
            reads them once, and may move a power of two into the result's global scale. For float16, scales of MXFP8
            must lie within 2**22 (E5M2: 2**8); for bfloat16 they may have any value. A block of MXFP8 with a NaN or an
            infinity becomes NaN altogether.
        up: a second weight like it. The result then holds both, for ``gated_gemm(x, result)``, and the gate takes the
            product of ``weight``. Both have a global scale, or neither.
        dtype: bfloat16 or float16, the dtype of the x that it will be multiplied with. An NVFP4 x needs float16.
            float8_e4m3fn is for FP8 x (``RowScaledTensor``), on sm_90a: the kernel rounds NVFP4 elements times their
            scales to E4M3, as the result's ``dequantize`` does; MXFP4 stays exact, and is refused if scales of a row
            are more than 2**11 apart. A NaN scale makes its whole row NaN.
        promoted: for float8_e4m3fn: whether sums are added in fp32 after every 128 of K. Otherwise tensor cores keep
            about 14 bits of them.
        backend: packing that need not read the scales runs in a kernel on a GPU, in one launch, with torch's bits.

    Raises:
        OperandError, OperandTypeError: another format, another dtype, two weights that do not fit together.
    """
    weights = {"weight": weight} if up is None else {"weight": weight, "up": up}
    for name, x in weights.items():
        _check(name, x)
    name = packing_of(weight.format)
    if dtype not in PACKINGS[name]:
        raise OperandTypeError.of("dtype", got=dtype, expected=" or ".join(map(str, PACKINGS[name])))
    if up is not None:
        _check_pair(weight, up)
    if PACKINGS[name][dtype].by_table:
        return rounded(weight, up, promoted)
    if promoted:
        raise OperandError.of("promoted sums", got=f"a weight for {dtype}", expected="dtype=torch.float8_e4m3fn")
    if PACKINGS[name][dtype].exponents is not None:
        packed, factors = packed_powers(list(weights.values()), PACKINGS[name][dtype])
    else:
        packed = packed_tiles(weight if up is None else in_turn(weight, up), dtype, backend=backend)
        packed = packed if weight.is_batched else packed[0]
        factors = [x.global_scale for x in weights.values()]
    gate, of_up = (*factors, None)[:2]
    return PreparedWeight(packed, weight.rows, weight.k, dtype, gate, up is not None, of_up, name)


def _check(name: str, weight: BlockScaledTensor) -> None:
    """Raises unless ``weight`` can be repacked."""
    if not isinstance(weight, BlockScaledTensor):
        raise not_quantized(name, weight)
    check_format(name, weight, tuple(FORMATS.values()))


def _check_pair(gate: BlockScaledTensor, up: BlockScaledTensor) -> None:
    """Raises unless the two weights fit together."""
    both = [
        f"{x.format.name} {tuple(x.data.shape)}, {'no' if x.global_scale is None else 'a'} global scale, {x.device}"
        for x in (gate, up)
    ]
    if both[0] != both[1]:
        expected = "the same format, sizes and device, global scales or none"
        raise OperandError.of("weights of a gated GEMM", got=" and ".join(both), expected=expected)


def packed_tiles(
    weight: BlockScaledTensor, dtype: torch.dtype, out: torch.Tensor | None = None, backend: Backend = "auto"
) -> torch.Tensor:
    """Tiles (L, row tiles, K tiles, bytes) of a weight (L, N, K), or of (N, K), which has L 1."""
    return PACK.call(weight, dtype, out, backend)


def _check_tiles(r: Any) -> torch.Tensor:
    key = r.weight.key
    shape = (key.batch, *tiles(key.rows, key.k), PACKINGS[key.format.name][r.dtype].tile_bytes)
    return torch.empty(shape, dtype=torch.uint8, device=key.device) if r.out is None else r.out


def _target(r: Any, out: torch.Tensor) -> Target:
    target = resolve(r.backend, r.weight.device)
    return target if r.weight.key.plain else resolve("reference", r.weight.device)


def _plan(r: Any, target: Target) -> PlannedCall:
    key, (_, *tile) = r.weight.key, r.out.shape
    arguments = PackArguments(
        data="weight.data",
        scale="weight.scale",
        packed="out",
        rows=key.rows,
        k=key.k,
        k_tiles=tile[1],
        batch=key.batch,
        data_strides=Strides(*key.strides),
        scale_strides=Strides(*key.scale_strides),
        packed_batch_stride=math.prod(tile),
    )
    config = PackConfig(key.format, DTYPE_NAMES[r.dtype], key.scale_layout, target.arch)
    return PACK.planned(KERNEL, config, target, arguments, r)


KERNEL = Kernel("pack_weight", PackArguments, Lazily("kernels.pack.kernel", "Pack"))
PACK = Operation(
    packed_tiles,
    {"weight": OPERAND},
    check=_check_tiles,
    reference=lambda r: packed_by_torch(r.weight, r.dtype),
    plan=_plan,
    target=_target,
    store=None,
)
