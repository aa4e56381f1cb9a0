"""The variants of the kernels of a mixture of experts, and their arguments.

A *slot* is a pair of a token and one of its k choices, ``token · k + choice``. A *row* is a place in the order of
experts: rows of expert e are ``offsets[e]`` to ``offsets[e + 1]``, in the order of their slots. Slots whose expert is
not here have no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...errors import explain
from ...runtime.signature import FLOAT32, INT32, INT64, PerConfig, Pointer, Scalar
from ...target import Architecture

WARP = 32
THREADS = 128
"""Threads of a CTA of the kernels that work on rows."""
VECTOR_BYTES = 16
VECTOR = 8
"""Elements of 16 bits that a thread takes at a time."""
MAPS_WARPS = (1, 16)
ACTIVATIONS = ("silu", "clamped_swiglu", "relu2")
"""What stands between the two products: silu(gate) · up; gpt-oss's (up + 1) · gate · sigmoid(α · gate) of clamped gate
and up; relu(x)² of a first product that is one matrix."""


SCORINGS = ("softmax", "sigmoid")
"""What makes a router's weights of its logits."""
MAX_TOP = 32
"""Experts that a token may choose: a lane of its warp has each."""
MAX_ROUTED = 1024
"""Experts that it may choose from, of which a lane has every 32nd in registers."""

LEAST_SUM = 1e-20
"""What is added to a sum of sigmoids, which may be 0."""


def maps_size(experts: int, slots: int) -> int:
    """Elements of the routing maps: offsets (experts + 1), and the slot and the expert of each row, and the row of each
    slot, (slots) each."""
    return experts + 1 + 3 * slots


@dataclass(frozen=True)
class MapsConfig:
    """One variant of the kernel that makes the maps: dtype of the ids, warps of a CTA, and whether other CTAs zero the
    rows that products will be added to."""

    ids: str
    warps: int
    zeroed: bool
    arch: Architecture


@dataclass(frozen=True)
class GatherConfig:
    """The only variant of the kernel that gathers rows, for an architecture."""

    arch: Architecture


@dataclass(frozen=True)
class ActivationConfig:
    """One variant of the activation: which of ``ACTIVATIONS``, of which dtype, with which constants (those of
    "clamped_swiglu"), and whether there is a bias."""

    activation: str
    dtype: str
    bias: bool
    alpha: float
    limit: float
    arch: Architecture

    @property
    def halves(self) -> int:
        """Matrices of the first product: gate and up, or one."""
        return 1 if self.activation == "relu2" else 2


@dataclass(frozen=True)
class CombineConfig:
    """One variant of the combination: dtypes of rows, of router weights ("": rows are weighted already) and of the
    output, whether there is a bias, slots of a token, and whether a row of each is added to them ("shared"). ids: of
    which dtype are those of up to 32 slots whose rows the kernel finds itself; "": there are maps."""

    dtype: str
    weights: str
    out: str
    bias: bool
    top: int
    shared: bool
    arch: Architecture
    ids: str = ""


@dataclass(frozen=True)
class RouteConfig:
    """One variant of the router's choice: dtypes of logits, weights and ids, logits of a lane, which of ``SCORINGS``,
    whether the weights of a token are divided by their sum, and whether a bias is added to the scores that choose."""

    logits: str
    weights: str
    ids: str
    per_lane: int
    scoring: str
    renormalized: bool
    corrected: bool
    arch: Architecture


def can_activate(c: ActivationConfig) -> str:
    """Why no kernel can be made of ``c``, or an empty string."""
    if c.activation not in ACTIVATIONS:
        return explain("activation", got=repr(c.activation), expected=f"one of {', '.join(ACTIVATIONS)}")
    return ""


DSL_DTYPES = {name.lower(): name for name in ("Float16", "BFloat16", "Float32", "Int32", "Int64")}
"""The DSL's names of dtypes."""


def router_weights(dtype: str) -> Pointer:
    """Where router weights of this dtype are."""
    return Pointer(DSL_DTYPES[dtype], 4 if dtype == "float32" else 2)


_BIAS = PerConfig(lambda c: Pointer("Float32", VECTOR_BYTES) if c.bias else None)


class ZeroedRows(NamedTuple):
    """``count`` rows of ``row_bytes``, ``stride`` bytes apart, which ``ctas`` CTAs zero."""

    data: Pointer = Pointer("Uint8", VECTOR_BYTES)
    count: Scalar = INT32
    row_bytes: Scalar = INT32
    stride: Scalar = INT64
    ctas: Scalar = INT32


class MapsArguments(NamedTuple):
    """maps (:func:`maps_size`) of ids (slots,), of which ``offset`` is expert 0 here. sums: rows to be zeroed."""

    ids: Pointer = Pointer(lambda c: DSL_DTYPES[c.ids], lambda c: int(c.ids[3:]) // 8)
    maps: Pointer = Pointer("Int32", 4)
    slots: Scalar = INT32
    experts: Scalar = INT32
    offset: Scalar = INT32
    sums: ZeroedRows | None = PerConfig(lambda c: ZeroedRows() if c.zeroed else None)


class GatherArguments(NamedTuple):
    """out (slots, row_bytes), contiguous, of x (tokens, row_bytes), whose rows are ``stride`` bytes apart; ``top``
    slots a token."""

    x: Pointer = Pointer("Uint8", VECTOR_BYTES)
    maps: Pointer = Pointer("Int32", 4)
    out: Pointer = Pointer("Uint8", VECTOR_BYTES)
    slots: Scalar = INT32
    experts: Scalar = INT32
    top: Scalar = INT32
    row_bytes: Scalar = INT32
    stride: Scalar = INT64


class ActivationArguments(NamedTuple):
    """out (slots, inner) of the product (slots, halves · inner) and the bias (experts, halves · inner), contiguous."""

    product: Pointer = Pointer("Uint8", VECTOR_BYTES)
    bias: Pointer | None = _BIAS
    maps: Pointer = Pointer("Int32", 4)
    out: Pointer = Pointer("Uint8", VECTOR_BYTES)
    slots: Scalar = INT32
    experts: Scalar = INT32
    inner: Scalar = INT32


class CombineArguments(NamedTuple):
    """out (tokens, hidden), rows ``stride`` bytes apart, of rows (slots, hidden); weights (slots,) and the bias
    (experts, hidden), where rows have neither yet; shared (tokens, hidden), rows ``shared_stride`` bytes apart. Instead
    of maps ids of experts (slots,), of which ``first`` is that of expert 0."""

    rows: Pointer = Pointer("Uint8", VECTOR_BYTES)
    weights: Pointer | None = PerConfig(lambda c: router_weights(c.weights) if c.weights else None)
    bias: Pointer | None = _BIAS
    shared: Pointer | None = PerConfig(lambda c: Pointer("Uint8", VECTOR_BYTES) if c.shared else None)
    maps: Pointer = Pointer(lambda c: DSL_DTYPES[c.ids or "int32"], lambda c: int((c.ids or "int32")[3:]) // 8)
    out: Pointer = Pointer("Uint8", VECTOR_BYTES)
    tokens: Scalar = INT32
    experts: Scalar = INT32
    hidden: Scalar = INT32
    stride: Scalar = INT64
    first: Scalar | None = PerConfig(lambda c: INT32 if c.ids else None)
    shared_stride: Scalar | None = PerConfig(lambda c: INT64 if c.shared else None)


class RouteArguments(NamedTuple):
    """ids and weights (tokens, top), contiguous, of logits (tokens, experts), rows ``stride`` elements apart, and
    correction (experts,); the weights are multiplied by ``scale``."""

    logits: Pointer = Pointer(lambda c: DSL_DTYPES[c.logits], lambda c: 4 if c.logits == "float32" else 2)
    correction: Pointer | None = PerConfig(lambda c: Pointer("Float32", 4) if c.corrected else None)
    ids: Pointer = Pointer(lambda c: DSL_DTYPES[c.ids], lambda c: int(c.ids[3:]) // 8)
    weights: Pointer = PerConfig(lambda c: router_weights(c.weights))
    tokens: Scalar = INT32
    experts: Scalar = INT32
    top: Scalar = INT32
    stride: Scalar = INT64
    scale: Scalar = FLOAT32
