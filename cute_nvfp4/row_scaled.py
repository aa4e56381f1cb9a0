"""FP8 activations with a scale for each row (token): the operand x of products with weights prepared for E4M3."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakValueDictionary

import torch

from cute_nvfp4.errors import OperandError, OperandTypeError
from cute_nvfp4.operand import address_of, row_alignment
from cute_nvfp4.tensors import check_dense

FP8 = "fp8_e4m3"
"""The name by which ``quantize`` and operators know this format."""
LARGEST = 448.0
LEAST = 2.0**-100
"""Rows with a smaller largest magnitude are scaled as if it were this: its reciprocal is far from infinity."""


@dataclass(frozen=True, eq=False)
class RowScaledKey:
    """The cache key of such an operand: everything that a plan depends on. Equal keys are the same object."""

    rows: int
    k: int
    device: torch.device
    stride: int
    alignment: int
    on_cpu: bool


_keys: WeakValueDictionary[tuple, RowScaledKey] = WeakValueDictionary()


@dataclass(frozen=True, eq=False, repr=False)
class RowScaledTensor:
    """A matrix (M, K) with a scale for each row: value = element · scale.

    data: ``torch.float8_e4m3fn`` (M, K), contiguous along K, rows at multiples of 16 bytes. scale: float32 (M,),
    contiguous, on the same device. ``quantize(x, "fp8_e4m3")`` makes one.

    Raises:
        OperandError, OperandTypeError: the tensors are no such matrix.
    """

    data: torch.Tensor
    scale: torch.Tensor

    def __post_init__(self) -> None:
        data, scale = self.data, self.scale
        for name, x, dtype in (("data", data, torch.float8_e4m3fn), ("scale", scale, torch.float32)):
            check_dense(name, x)
            if x.dtype is not dtype:
                raise OperandTypeError.of(f"{name} of rows in FP8", got=x.dtype, expected=dtype)
        if data.ndim != 2 or not data.numel():
            raise OperandError.of("shape of data", got=tuple(data.shape), expected="(M, K), not empty")
        if data.shape[1] > 1 and data.stride(1) != 1:
            raise OperandError.of("stride of data along K", got=data.stride(1), expected="1")
        step = data.stride(0) if data.shape[0] > 1 else 0
        if (address_of(data) | step) % 16:
            got = f"address {data.data_ptr():#x}, strides {data.stride()}"
            raise OperandError.of("alignment of data", got=got, expected="rows at multiples of 16 bytes")
        if tuple(scale.shape) != (data.shape[0],) or (scale.numel() > 1 and scale.stride(0) != 1):
            got = f"shape {tuple(scale.shape)}, strides {scale.stride()}"
            hint = "Scales of 128 columns gain too little to be taken (docs/explanation/w4a8.md): "
            hint = hint + "quantize(x, 'fp8_e4m3') makes one for each row." if scale.ndim == 2 else ""
            raise OperandError.of("scale", got=got, expected=f"({data.shape[0]},), contiguous", hint=hint)
        if scale.device != data.device:
            raise OperandError.of("device of scale", got=scale.device, expected=f"{data.device}, where the data is")

    global_scale: ClassVar[None] = None

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def k(self) -> int:
        return self.data.shape[1]

    @property
    def device(self) -> torch.device:
        """The device that data and scales are on."""
        return self.data.device

    @functools.cached_property
    def key(self) -> RowScaledKey:
        """The cache key of plans for this operand."""
        data = self.data
        found = (self.rows, self.k, data.device, data.stride(0), row_alignment(data, 16), data.device.type == "cpu")
        return _keys.setdefault(found, RowScaledKey(*found))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values (M, K): exact in float64, rounded once in float32, and once more in a narrower dtype."""
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        return (self.data.to(wide) * self.scale.to(wide).unsqueeze(1)).to(dtype)

    def __repr__(self) -> str:
        """Shapes and dtypes, never values: printing must not wait for the device."""
        return f"RowScaledTensor({FP8}, rows={self.rows}, k={self.k}, {self.device})"


def by_rows(x: torch.Tensor) -> RowScaledTensor:
    """Quantizes rows (M, K) to E4M3, with the kernel's bits.

    The row's largest magnitude, or ``LEAST`` if that is more, becomes 448. Values times 448 / largest, in float32, are
    rounded to nearest, ties to even. A NaN makes its whole row NaN; an infinity makes the row's products NaN.
    """
    wide = x.to(torch.float32)
    largest = wide.abs().amax(-1).clamp(min=LEAST)
    # a tensor, because on a GPU torch divides by a Python number with a reciprocal, which rounds twice
    top = torch.full_like(largest, LARGEST)
    scaled = (wide * (top / largest).unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    data = torch.where(scaled.isnan(), float("nan"), scaled).to(torch.float8_e4m3fn)
    return RowScaledTensor(data, largest / top)
