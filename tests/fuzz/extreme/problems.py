"""The tensors of a call, and what its product is exactly."""

from __future__ import annotations

import math
from typing import Any

import torch
from support.exact_sums import Expected, gated, product, values_of

from cute_nvfp4 import MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledTensor, to_blocked

from .axes import Call, float32
from .kinds import moved, of_kind

FORMATS = {"nvfp4": NVFP4, "mxfp4": MXFP4, "mxfp8": MXFP8, "mxfp8_e5m2": MXFP8_E5M2}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EXACT_SCALES = {"nvfp4": (0x30, 0x38, 0x3C, 0x40), "mx": (126, 127, 128)}
"""Codes of a few small powers of two, and of 1.5."""
EXACT_CODES = {
    "mxfp8": (0x00, 0x30, 0x38, 0x3C, 0x40, 0x48, 0xB8, 0xC4),
    "mxfp8_e5m2": (0x00, 0x38, 0x3C, 0x3E, 0x44, 0xBC),
}


class Impossible(Exception):
    """torch has no such tensor, or a call no such argument: nothing is tried."""


class Tensors:
    """Makes the tensors of a call, each as the call wants it."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.generator = torch.Generator().manual_seed(call.seed)
        self.used = not call.argument

    def given(self, name: str, x: torch.Tensor) -> Any:
        """``x`` as the argument ``name``: of another kind, or somewhere else, if that is what the call tries."""
        call = self.call
        if name != call.argument:
            return x
        self.used = True
        try:
            return moved(x, call.place) if call.place else of_kind(x, call.kind)
        except Exception as error:
            raise Impossible(str(error)) from error

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.uint8)

    def choice(self, codes: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(codes, dtype=torch.uint8)[self.integers(0, len(codes), shape).long()]

    def number(self, name: str, text: str) -> torch.Tensor | None:
        """A device scalar."""
        return None if text == "none" else self.given(name, torch.tensor([float(text)], dtype=torch.float32))

    def operand(self, name: str, format: str, shape: tuple[int, ...], scale: str) -> tuple[Any, torch.Tensor, float]:
        """A block-scaled operand of (…, rows, K), its values without a global scale, and that."""
        call, block = self.call, 16 if format == "nvfp4" else 32
        narrow = format in ("nvfp4", "mxfp4")
        if call.data == "zeros":
            codes = torch.zeros(shape, dtype=torch.uint8)
        elif narrow:
            codes = self.integers(0, 16, shape)
        elif call.data == "exact":
            codes = self.choice(EXACT_CODES[format], shape)
        else:
            # finite ones
            codes = self.integers(0, 0x7B if format == "mxfp8_e5m2" else 0x7E, shape) | self.integers(0, 2, shape) << 7
        columns = (*shape[:-1], shape[-1] // block)
        if call.data == "full":
            scales = self.integers(0, 0x7F, columns) if format == "nvfp4" else self.integers(117, 138, columns)
        else:
            scales = self.choice(EXACT_SCALES["nvfp4" if format == "nvfp4" else "mx"], columns)
        values = values_of(codes, scales, format)
        data = codes[..., ::2] | codes[..., 1::2] << 4 if narrow else codes
        text = scale if format == "nvfp4" else "none"
        made = BlockScaledTensor(
            self.given(f"{name}.data", data.contiguous()), self.given(f"{name}.scale", to_blocked(scales)),
            self.number(f"{name}.global_scale", text), FORMATS[format],
        )  # fmt: skip
        return made, values, 1.0 if text == "none" else float32(text)

    def floats(self, name: str, kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Any, torch.Tensor]:
        """16-bit or 32-bit numbers, and their values: small ones of few bits, or those times a power of two."""
        x = (self.integers(0, 17, shape).double() - 8) * (0.0 if self.call.data == "zeros" else 0.5)
        if dtype is not torch.float16:
            x = x * {"float tiny": 2.0**-100, "float huge": 2.0**100}.get(kind, 1.0)
        x = x.to(dtype)
        return self.given(name, x), x.double()

    def output(self, shape: tuple[int, ...]) -> Any:
        """A poisoned output, if the caller gives one."""
        dtype = DTYPES[self.call.out]
        return self.given("out", torch.full(shape, torch.nan, dtype=dtype)) if self.call.given else None

    def alpha(self) -> Any:
        call = self.call
        if call.alpha == "none":
            return None
        if call.on_device:
            return self.number("alpha", call.alpha)
        if call.argument == "alpha" and call.kind in ("text", "array", "complex"):
            self.used = True
            return {"text": "1", "array": [1.0], "complex": 1j}[call.kind]
        return float(call.alpha)


def alpha_value(call: Call) -> float:
    return 1.0 if call.alpha == "none" else float32(call.alpha)


def expected_of(call: Call, left: torch.Tensor, right: torch.Tensor, factor: float, bias: Any = None) -> Expected:
    """The exact product of values, scaled at the end."""
    found = product(left, right, factor, bias, coarse=call.data == "full")
    # no number, and which one is not promised: an infinite scale times an element that is 0 is NaN, or the sum is
    # infinite
    return found if math.isfinite(factor) else found._replace(exact=torch.full_like(found.exact, math.nan))


def gated_of(x: Expected, y: Expected, gate: str) -> Expected:
    return gated(x, y, gate)
