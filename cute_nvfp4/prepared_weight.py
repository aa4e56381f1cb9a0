"""A weight that was repacked once for the kernels that decode it; frozen, as ``BlockScaledTensor`` is."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.formats import decode_e2m1
from cute_nvfp4.weight_layout import PACKINGS, SLAB_ROWS, Packing, packed_rows, separated, tiles, unpack
from cute_nvfp4.weight_layout_fp8 import unpack_blocks, unpack_rows


@dataclass(frozen=True, eq=False)
class WeightKey:
    """The cache key of a prepared weight: everything that a plan depends on. Equal keys are the same object."""

    rows: int
    k: int
    stack: int
    dtype: torch.dtype
    device: torch.device
    has_global_scale: bool
    gated: bool
    packing: str
    promoted: bool
    on_cpu: bool


_keys: WeakValueDictionary[tuple, WeightKey] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class PreparedWeight:
    """A block-scaled matrix (N, K), or a stack (L, N, K), packed by ``prepare_weight`` for kernels that decode it on
    the way to the tensor cores of sm_90a, sm_100a and sm_120a.

    packed: uint8 (row tiles, K tiles, bytes), for a stack (L, …) (:mod:`.weight_layout`).
    rows, k: N and K.
    dtype: the dtype in which tensor cores multiply it, and that of an unquantized x: bfloat16 or float16, which are
        exact; or float8_e4m3fn, to which each element is rounded once.
    global_scale: None, or one float32 number on the same device that multiplies every value.
    gated: whether it holds two matrices (N, K), gate and up; global_scale is then that of gate.
    up_global_scale: the global scale of up, if it is gated and has global scales.
    packing: a key of ``weight_layout.PACKINGS``.
    row_factor: for float8_e4m3fn: float32 powers of two that multiply the rows (padded to 16; for a stack (L, rows)).
    promoted: whether sums of FP8 products are added in fp32 after every 128 of K.

    Raises:
        OperandError, OperandTypeError: tensors that ``prepare_weight`` does not make.
    """

    packed: torch.Tensor
    rows: int
    k: int
    dtype: torch.dtype
    global_scale: torch.Tensor | None = None
    gated: bool = False
    up_global_scale: torch.Tensor | None = None
    packing: str = "nvfp4"
    row_factor: torch.Tensor | None = None
    promoted: bool = False

    def __post_init__(self) -> None:
        if self.packing not in PACKINGS:
            raise OperandError.of("packing", got=repr(self.packing), expected=f"one of {', '.join(PACKINGS)}")
        if self.dtype not in PACKINGS[self.packing]:
            expected = " or ".join(map(str, PACKINGS[self.packing]))
            raise OperandTypeError.of("dtype of a prepared weight", got=self.dtype, expected=expected)
        expected = (*tiles(packed_rows(self.rows, self.gated), self.k), self.layout.tile_bytes)
        packed = self.packed
        fits = packed.ndim in (3, 4) and tuple(packed.shape[-3:]) == expected and packed.numel() > 0
        if packed.dtype is not torch.uint8 or not fits or not packed.is_contiguous():
            raise OperandError.of(
                f"packed weight of {'two times ' * self.gated}{self.rows} rows, K {self.k}",
                got=f"{packed.dtype}, shape {tuple(packed.shape)}, strides {packed.stride()}",
                expected=f"contiguous torch.uint8 of shape {expected}, or of a stack of such",
                hint="prepare_weight makes one.",
            )
        self._check_row_factor()
        if (self.up_global_scale is not None) != (self.gated and self.global_scale is not None):
            raise OperandError.of(
                "global scales of gate and up",
                got=" and ".join("none" if x is None else "one" for x in (self.global_scale, self.up_global_scale)),
                expected="one for gate and one for up, or none",
            )

    def _check_row_factor(self) -> None:
        """Raises unless the factors of rows are what the packing needs."""
        factor, shape = self.row_factor, None
        if self.layout.by_table:
            rows = packed_rows(self.rows, self.gated)
            shape = (*self.packed.shape[:-3], -(-rows // SLAB_ROWS) * SLAB_ROWS)
        if self.promoted and shape is None:
            raise OperandError.of("promoted sums", got=f"a weight for {self.dtype}", expected="torch.float8_e4m3fn")
        good = shape is None if factor is None else factor.dtype is torch.float32 and factor.is_contiguous()
        if not good or (factor is not None and (factor.shape != shape or factor.device != self.device)):
            got = None if factor is None else f"{factor.dtype}, shape {tuple(factor.shape)}, {factor.device}"
            expected = None if shape is None else f"contiguous torch.float32 of shape {shape}, {self.device}"
            raise OperandError.of(f"factors of the rows of a weight for {self.dtype}", got=got, expected=expected)

    @property
    def layout(self) -> Packing:
        """The layout of its bytes."""
        return PACKINGS[self.packing][self.dtype]

    @property
    def is_batched(self) -> bool:
        """Whether it is a stack of matrices."""
        return self.packed.ndim == 4

    @property
    def batch(self) -> int:
        """The number of matrices, or of pairs of gate and up."""
        return self.packed.shape[0] if self.is_batched else 1

    @property
    def device(self) -> torch.device:
        """The device that the weight is on."""
        return self.packed.device

    @functools.cached_property
    def global_scales(self) -> tuple[torch.Tensor | None, ...]:
        """The global scales of gate and up, or of the one matrix."""
        return (self.global_scale, self.up_global_scale) if self.gated else (self.global_scale,)

    @functools.cached_property
    def key(self) -> WeightKey:
        """The cache key of plans for this weight."""
        stack = self.batch if self.is_batched else 0
        device, scaled = self.packed.device, self.global_scale is not None
        found = (self.rows, self.k, stack, self.dtype, device, scaled, self.gated, self.packing, self.promoted)
        return _keys.setdefault(found, WeightKey(*found, device.type == "cpu"))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values (N, K), gated (2, N, K), of a stack (L, …). In float32 and float64 only the global scale rounds,
        once."""
        packed = self.packed if self.is_batched else self.packed.unsqueeze(0)
        values = unpack_rows(packed, self.layout) if self.layout.by_table else unpack(packed, self.layout)
        if self.row_factor is not None:
            factors = self.row_factor.to(torch.float64).reshape(len(packed), -1, 1)
            values = values[:, : factors.shape[1]] * factors
        return self._of_rows(values, dtype)

    def unrounded(self) -> torch.Tensor:
        """The values of a weight for float8_e4m3fn before they are rounded, in float64, shaped as by ``dequantize``."""
        packed = self.packed if self.is_batched else self.packed.unsqueeze(0)
        codes, scales = unpack_blocks(packed, self.layout, self.row_factor.reshape(len(packed), -1))
        scales = scales.repeat_interleave(codes.shape[-1] // scales.shape[-1], dim=-1)
        # a NaN row factor makes zeros NaN, too
        values = decode_e2m1(codes, torch.float64) * scales
        values = values.masked_fill(self.row_factor.isnan().reshape(len(packed), -1, 1), torch.nan)
        return self._of_rows(values, torch.float64)

    def _of_rows(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The result of ``dequantize``, cut out of values (L, padded rows, padded K)."""
        values = (separated(values) if self.gated else values)[..., : self.rows, : self.k]
        values = values if self.is_batched else values[0]
        wide = values.to(torch.float64 if dtype is torch.float64 else torch.float32)
        if self.global_scale is not None:
            scales = torch.stack([x.reshape(1, 1) for x in self.global_scales])
            wide = wide * (scales if self.gated else scales[0]).to(wide.dtype)
        return wide.to(dtype)

    def __repr__(self) -> str:
        """Shapes and dtypes, never values: printing must not wait for the device."""
        scale = self.global_scale is not None
        stack = f"{self.batch} x " if self.is_batched else ""
        sizes = f"{stack}{'2 x ' * self.gated}{self.rows} x {self.k}"
        return f"PreparedWeight({sizes}, {self.packing} for {self.dtype}, global_scale={scale}, {self.device})"
