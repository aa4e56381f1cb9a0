"""The configuration of the second product of one token's experts with their sum, and its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...errors import explain
from ...runtime.signature import INT32, VARYING_FLOAT32, PerConfig, Pointer, Scalar
from ...target import Architecture
from ...weight_layout import DTYPES, PACKINGS, TILE_K, Packing
from ..gemm.arguments import OUT_DTYPES, GroupFactor
from ..gemm.sm90.arguments import PackedWeight
from .config import DSL_DTYPES, WARP, router_weights

MOST_WARPS, MOST_TILES = 16, 8


@dataclass(frozen=True)
class SummedConfig:
    """One variant of the kernel. dtype: the dtype of rows and of the output. packing: the packing of the weights. ids,
    weights: dtypes of the router's choice of ``top`` experts. biased: whether products have biases. shared: whether a
    shared row is added. factors: device scalars that multiply alpha. tiles: packed tiles along K of each of ``warps``
    warps."""

    dtype: str
    packing: str
    ids: str
    weights: str
    top: int
    biased: bool
    shared: bool
    factors: int
    warps: int
    tiles: int
    arch: Architecture

    @property
    def packed(self) -> Packing:
        """The packing of the weights."""
        return PACKINGS[self.packing][DTYPES[self.dtype]]

    @property
    def x_bytes(self) -> int:
        """Bytes of shared memory for a warp's part of the rows."""
        return self.tiles * TILE_K * 2


def can_sum(c: SummedConfig) -> str:
    """The reason why no kernel implements ``c``, or an empty string."""
    if not 1 <= c.top <= WARP:
        return explain("choices of the token", got=c.top, expected=f"1 to {WARP}")
    if c.dtype not in ("bfloat16", "float16") or c.packed.step_words != 1 or c.packed.in_rows:
        got = f"{c.packing} for {c.dtype}"
        return explain("weights that are summed", got=got, expected="packed ones of 4 bits, for bfloat16 or float16")
    if not (1 <= c.warps <= MOST_WARPS and 1 <= c.tiles <= MOST_TILES):
        expected = f"1 to {MOST_WARPS}, and 1 to {MOST_TILES}"
        return explain("warps and tiles", got=(c.warps, c.tiles), expected=expected)
    return ""


class SummedArguments(NamedTuple):
    """out (N) = shared + Σ weight · (alpha · row · matrixᵀ + bias), over the token's experts that this GPU has.

    rows: (top, k), in the order of experts. weight: a stack of (N, K). ids, weights: the router's choice (top,). first:
    the id of expert 0 of ``experts``. bias: (experts, N).
    """

    rows: Pointer = Pointer("Uint8", 16)
    weight: PackedWeight = PackedWeight()
    k: Scalar = INT32
    ids: Pointer = Pointer(lambda c: DSL_DTYPES[c.ids], lambda c: int(c.ids[3:]) // 8)
    weights: Pointer = PerConfig(lambda c: router_weights(c.weights))
    experts: Scalar = INT32
    first: Scalar = INT32
    alpha: Scalar = VARYING_FLOAT32
    factors: tuple[GroupFactor, ...] = PerConfig(lambda c: (GroupFactor(),) * c.factors)
    bias: Pointer | None = PerConfig(lambda c: Pointer("Float32", 4) if c.biased else None)
    shared: Pointer | None = PerConfig(lambda c: Pointer(OUT_DTYPES[c.dtype], 2) if c.shared else None)
    out: Pointer = Pointer(lambda c: OUT_DTYPES[c.dtype], 2)
