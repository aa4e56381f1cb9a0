"""The configurations of the kernels of a mixture of experts, and their arguments.

A *slot* is a pair of a token and one of its k choices, ``token · k + choice``. A *row* is a place in the order of
experts: expert e has rows ``offsets[e]`` to ``offsets[e + 1]``, in the order of their slots. A slot whose expert is not
among this GPU's experts has no row.
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
"""16-bit elements that a thread processes at a time."""
MAPS_WARPS = (1, 16)
ACTIVATIONS = ("silu", "clamped_swiglu", "relu2")
"""The activations between the two products: silu(gate) · up; gpt-oss's (up + 1) · gate · sigmoid(α · gate) with clamped
gate and up; relu(x)², whose first product has one matrix."""


SCORINGS = ("softmax", "sigmoid")
"""The functions that turn a router's logits into weights."""
MAX_TOP = 32
"""The most experts that a token chooses: each lane of its warp keeps one."""
MAX_ROUTED = 1024
"""The most experts that it chooses from: each lane keeps every 32nd logit in registers."""

LEAST_SUM = 1e-20
"""A summand that keeps a sum of sigmoids from being 0."""


def maps_size(experts: int, slots: int) -> int:
    """Elements of the routing maps: offsets (experts + 1); then for each row its slot and its expert, and for each slot
    its row, (slots) each."""
    return experts + 1 + 3 * slots


@dataclass(frozen=True)
class MapsConfig:
    """One variant of the kernel that makes the routing maps. ids: the dtype of the ids. warps: warps of a CTA. zeroed:
    whether other CTAs clear the rows to which products will be added."""

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
    """One variant of the activation: one of ``ACTIVATIONS``, its dtype, whether it has a bias, and its constants."""

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
    """One variant of the combination. dtype, weights, out: dtypes of rows, of router weights ("": rows are weighted
    already), and of the output. bias: whether rows still need a bias. top: slots of a token. shared: whether each token
    has a row to add. ids: the dtype of up to 32 expert ids from which the kernel itself finds rows; "": it reads the
    maps."""

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
    """One variant of the router's choice. per_lane: logits of a lane. scoring: one of ``SCORINGS``. renormalized:
    whether the weights of a token are divided by their sum. corrected: whether the scores that choose get a bias
    first."""

    logits: str
    weights: str
    ids: str
    per_lane: int
    scoring: str
    renormalized: bool
    corrected: bool
    arch: Architecture


def can_activate(c: ActivationConfig) -> str:
    """The reason why no kernel implements ``c``, or an empty string."""
    if c.activation not in ACTIVATIONS:
        return explain("activation", got=repr(c.activation), expected=f"one of {', '.join(ACTIVATIONS)}")
    return ""


DSL_DTYPES = {name.lower(): name for name in ("Float16", "BFloat16", "Float32", "Int32", "Int64")}
"""The DSL's names of dtypes, by torch's names."""


def router_weights(dtype: str) -> Pointer:
    """The pointer to router weights of this dtype."""
    return Pointer(DSL_DTYPES[dtype], 4 if dtype == "float32" else 2)


_BIAS = PerConfig(lambda c: Pointer("Float32", VECTOR_BYTES) if c.bias else None)


class ZeroedRows(NamedTuple):
    """``count`` rows of ``row_bytes`` bytes, ``stride`` bytes apart, which ``ctas`` CTAs clear."""

    data: Pointer = Pointer("Uint8", VECTOR_BYTES)
    count: Scalar = INT32
    row_bytes: Scalar = INT32
    stride: Scalar = INT64
    ctas: Scalar = INT32


class MapsArguments(NamedTuple):
    """maps (:func:`maps_size`) of ids (slots,). offset: the id of expert 0 of this GPU. sums: the rows to clear."""

    ids: Pointer = Pointer(lambda c: DSL_DTYPES[c.ids], lambda c: int(c.ids[3:]) // 8)
    maps: Pointer = Pointer("Int32", 4)
    slots: Scalar = INT32
    experts: Scalar = INT32
    offset: Scalar = INT32
    sums: ZeroedRows | None = PerConfig(lambda c: ZeroedRows() if c.zeroed else None)


class GatherArguments(NamedTuple):
    """out (slots, row_bytes), contiguous, from x (tokens, row_bytes), rows ``stride`` bytes apart. top: slots a
    token."""

    x: Pointer = Pointer("Uint8", VECTOR_BYTES)
    maps: Pointer = Pointer("Int32", 4)
    out: Pointer = Pointer("Uint8", VECTOR_BYTES)
    slots: Scalar = INT32
    experts: Scalar = INT32
    top: Scalar = INT32
    row_bytes: Scalar = INT32
    stride: Scalar = INT64


class ActivationArguments(NamedTuple):
    """out (slots, inner) from the product (slots, halves · inner) and the bias (experts, halves · inner)."""

    product: Pointer = Pointer("Uint8", VECTOR_BYTES)
    bias: Pointer | None = _BIAS
    maps: Pointer = Pointer("Int32", 4)
    out: Pointer = Pointer("Uint8", VECTOR_BYTES)
    slots: Scalar = INT32
    experts: Scalar = INT32
    inner: Scalar = INT32


class CombineArguments(NamedTuple):
    """out (tokens, hidden), rows ``stride`` bytes apart, from rows (slots, hidden), with weights (slots,) and bias
    (experts, hidden) if rows still need them. shared: (tokens, hidden), rows ``shared_stride`` bytes apart. With
    ``config.ids``, ``maps`` is the ids of experts (slots,), and ``first`` the id of expert 0."""

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
    """ids and weights (tokens, top), contiguous, from logits (tokens, experts), rows ``stride`` elements apart, and
    correction (experts,). scale: the factor of the weights."""

    logits: Pointer = Pointer(lambda c: DSL_DTYPES[c.logits], lambda c: 4 if c.logits == "float32" else 2)
    correction: Pointer | None = PerConfig(lambda c: Pointer("Float32", 4) if c.corrected else None)
    ids: Pointer = Pointer(lambda c: DSL_DTYPES[c.ids], lambda c: int(c.ids[3:]) // 8)
    weights: Pointer = PerConfig(lambda c: router_weights(c.weights))
    tokens: Scalar = INT32
    experts: Scalar = INT32
    top: Scalar = INT32
    stride: Scalar = INT64
    scale: Scalar = FLOAT32
