"""The configurations and arguments of the kernels that compute what they quantize."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...runtime.signature import FLOAT32, PerConfig, Pointer, Scalar
from .arguments import QuantizeArguments, Strides
from .config import WARP, QuantizeConfig


class Matrix(NamedTuple):
    """A matrix of the dtype and the alignment of x."""

    pointer: Pointer = Pointer("Uint8", lambda c: c.vector_bytes)
    strides: Strides = Strides()


@dataclass(frozen=True)
class FusedConfig(QuantizeConfig):
    """One variant that quantizes computed values. values: whether it stores them, too."""

    values: bool = False


@dataclass(frozen=True)
class RmsnormConfig(FusedConfig):
    """One variant of the kernel of ``rmsnorm_quantize``.

    A CTA of ``warps`` warps takes a row, and each thread ``blocks`` blocks of it. residual: whether it adds one.
    weight: dtype of the weight, "" for none.
    """

    blocks: int = 1
    residual: bool = False
    weight: str = "bfloat16"

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARP * self.warps


@dataclass(frozen=True)
class SiluMulConfig(FusedConfig):
    """One variant of the kernel of ``silu_mul_quantize``: the kernel of rows, with two inputs."""


_VALUES = PerConfig(lambda c: Matrix() if c.values else None)
_RESIDUAL = PerConfig(lambda c: Matrix() if c.residual else None)


class RmsnormArguments(NamedTuple):
    """Quantizes rmsnorm(x + residual) · weight. ``quantize.walk.count``: rows, with those that pad the scales.

    weight: (K,). residual, residual_out: shaped as x; they may be the same. values: (rows, K), the values that are
    quantized. eps: added to the mean of squares. inverse_k: 1 / K.
    """

    quantize: QuantizeArguments = QuantizeArguments()
    weight: Pointer | None = PerConfig(lambda c: Pointer("Uint8", c.vector_bytes) if c.weight else None)
    residual: Matrix | None = _RESIDUAL
    residual_out: Matrix | None = _RESIDUAL
    values: Matrix | None = _VALUES
    eps: Scalar = FLOAT32
    inverse_k: Scalar = FLOAT32


class SiluMulArguments(NamedTuple):
    """Quantizes silu(x) · up. values: (rows, K), the values that are quantized."""

    quantize: QuantizeArguments = QuantizeArguments()
    up: Matrix = Matrix()
    values: Matrix | None = _VALUES
