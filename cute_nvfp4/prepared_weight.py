"""A weight that was repacked once for the tensor cores of sm_90a: frozen, as ``BlockScaledTensor`` is."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.weight_layout import DECODERS, TILE_BYTES, tiles, unpack


@dataclass(frozen=True, eq=False)
class WeightKey:
    """All that a plan depends on of a prepared weight. Equal keys are the same object."""

    rows: int
    k: int
    stack: int
    dtype: torch.dtype
    device: torch.device
    has_global_scale: bool
    on_cpu: bool


_keys: dict[tuple, WeightKey] = {}


@dataclass(frozen=True, eq=False)
class PreparedWeight:
    """An NVFP4 matrix (N, K), or a stack (L, N, K) of them, as ``prepare_weight`` packs it: no kernel of another
    architecture reads it.

    packed: (row tiles, K tiles, bytes), of a stack (L, …), of uint8 (:mod:`.weight_layout`). rows, k: N and K. dtype:
    bfloat16 or float16, what tensor cores multiply it in, exactly; that of x where x is not quantized. global_scale:
    None, or one float32 number on the same device that multiplies every value.

    Raises:
        OperandError, OperandTypeError: tensors that no ``prepare_weight`` gives.
    """

    packed: torch.Tensor
    rows: int
    k: int
    dtype: torch.dtype
    global_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DECODERS:
            expected = " or ".join(map(str, DECODERS))
            raise OperandTypeError.of("dtype of a prepared weight", got=self.dtype, expected=expected)
        expected = (*tiles(self.rows, self.k), TILE_BYTES)
        packed = self.packed
        fits = packed.ndim in (3, 4) and tuple(packed.shape[-3:]) == expected and packed.numel() > 0
        if packed.dtype is not torch.uint8 or not fits or not packed.is_contiguous():
            raise OperandError.of(
                f"packed weight of {self.rows} rows, K {self.k}",
                got=f"{packed.dtype}, shape {tuple(packed.shape)}, strides {packed.stride()}",
                expected=f"contiguous torch.uint8 of shape {expected}, or of a stack of such",
                hint="prepare_weight makes one.",
            )

    @property
    def is_batched(self) -> bool:
        """Whether it is a stack of matrices."""
        return self.packed.ndim == 4

    @property
    def batch(self) -> int:
        """Matrices."""
        return self.packed.shape[0] if self.is_batched else 1

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.packed.device

    @functools.cached_property
    def key(self) -> WeightKey:
        """What plans for this weight are kept by."""
        found = (
            self.rows,
            self.k,
            self.packed.shape[0] if self.is_batched else 0,
            self.dtype,
            self.packed.device,
            self.global_scale is not None,
        )
        return _keys.setdefault(found, WeightKey(*found, self.packed.device.type == "cpu"))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values (N, K) or (L, N, K), exact in float32 and float64 but for one rounding by the global scale; a copy."""
        packed = self.packed if self.is_batched else self.packed.unsqueeze(0)
        values = unpack(packed, self.dtype)[:, : self.rows, : self.k]
        values = values if self.is_batched else values[0]
        wide = values.to(torch.float64 if dtype is torch.float64 else torch.float32)
        if self.global_scale is not None:
            wide = wide * self.global_scale.reshape(()).to(wide.dtype)
        return wide.to(dtype)

    def __repr__(self) -> str:
        """Shapes and dtypes, never values: printing must not wait for the device."""
        scale = self.global_scale is not None
        stack = f"{self.batch} x " if self.is_batched else ""
        return f"PreparedWeight({stack}{self.rows} x {self.k}, for {self.dtype}, global_scale={scale}, {self.device})"
