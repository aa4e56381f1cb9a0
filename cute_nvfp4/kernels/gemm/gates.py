"""Gates of a gated GEMM, in fp32: they join x = alpha·A·B1ᵀ and y = alpha·A·B2ᵀ as gate(x) · y.

The exponential is ``ex2.approx.ftz`` and the quotient ``rcp.approx.ftz`` (PTX ISA: relative errors of at most 2⁻²² and
2⁻²³). An element of silu costs two special-function instructions and six others, gelu_tanh two and eight, gelu_erf two
and eighteen. ``tanh.approx`` would save one of the two, but its error of 2⁻¹¹ is relative to 1, where silu(−8) is
3·10⁻⁴ times its argument. The table has the largest relative errors against float64, with both approximations rounded
correctly, as in the simulator:

=========  ==============  ==============  ========================
gate       −2 < x < 80     −8 < x ≤ −2     below
=========  ==============  ==============  ========================
silu       3·10⁻⁷          6·10⁻⁷          4·10⁻⁶ down to −80
gelu_tanh  5·10⁻⁷          7·10⁻⁶          2·10⁻⁵ until subnormal
gelu_erf   5·10⁻⁷          4·10⁻⁶          2·10⁻⁵ until subnormal
=========  ==============  ==============  ========================

Errors grow with |x| because the exponent is an fp32 value with a last bit. Subnormal results become 0. NaN is kept; a
gate of +inf is +inf.
"""

from __future__ import annotations

import math

import cutlass.cute as cute
from cutlass import Float32

from ...ptx.arithmetic import add_rn, mul_rn
from .config import GATE_NAMES

_LOG2_E = math.log2(math.e)
_TANH = -2 * math.sqrt(2 / math.pi) * _LOG2_E
# log2(erfc(|x| / sqrt 2) / (2 t)) + x² · log2(e) / 2 as a polynomial in t = 1 / (1 + _ERF_SLOPE · |x|): a Chebyshev fit
# of degree 8 over |x| < 13.9, off by 6e-8
_ERF_SLOPE, _ERF_RANGE = 0.275, 13.8
_ERF = (
    -3.1886065006256104, 1.4504700899124146, 0.5408676862716675, 0.6287257075309753, -1.0935016870498657,
    2.182356834411621, -2.7662014961242676, 1.5829464197158813, -0.3370571434497833,
)  # fmt: skip


def exp2(x: Float32) -> Float32:
    """2**x, approximated."""
    return cute.math.exp2(x, fastmath=True)


def silu(x: Float32) -> Float32:
    """x / (1 + exp(−x))."""
    return x * cute.arch.rcp_approx(1.0 + exp2(x * -_LOG2_E))


def gelu_tanh(x: Float32) -> Float32:
    """x / 2 · (1 + tanh u) = x / (1 + exp(−2 u)) for u = sqrt(2 / π) · (x + 0.044715 x³)."""
    return x * cute.arch.rcp_approx(1.0 + exp2(x * (_TANH + (_TANH * 0.044715) * (x * x))))


def gelu_erf(x: Float32) -> Float32:
    """x · Φ(x) = max(x, 0) − |x| · Φ(−|x|), which cancels nothing where Φ is small."""
    size = cute.arch.fmin(cute.arch.fmax(x, -x), _ERF_RANGE)
    t = cute.arch.rcp_approx(1.0 + _ERF_SLOPE * size)
    exponent = Float32(_ERF[-1])
    for coefficient in _ERF[-2::-1]:
        exponent = exponent * t + coefficient
    tail = t * exp2(exponent - (size * (_LOG2_E / 2)) * size)
    return cute.arch.fmax(x, Float32(0.0), nan=True) - size * tail


def relu(x: Float32) -> Float32:
    """max(x, 0)."""
    return cute.arch.fmax(x, Float32(0.0), nan=True)


def identity(x: Float32) -> Float32:
    """x itself."""
    return x


GATES = {gate.__name__: gate for gate in (silu, gelu_tanh, gelu_erf, relu, identity)}
assert tuple(GATES) == GATE_NAMES


def clamped_swiglu(gate: Float32, up: Float32, alpha: float, limit: float) -> Float32:
    """gpt-oss's gate · sigmoid(alpha · gate) · (up + 1): ``gate`` is clamped to limit, ``up`` to ±limit. NaN stays."""
    gate = cute.arch.fmin(gate, Float32(limit), nan=True)
    up = cute.arch.fmax(cute.arch.fmin(up, Float32(limit), nan=True), Float32(-limit), nan=True)
    # gate · sigmoid(α · gate) is silu(α · gate) / α
    scaled = mul_rn(silu(mul_rn(gate, Float32(alpha))), Float32(1.0 / alpha))
    return mul_rn(scaled, add_rn(up, Float32(1.0)))


def activate(name: str, x: Float32, up: Float32 | None = None, constants: tuple[float, float] = (1.0, 1.0)) -> Float32:
    """The activation ``name`` between the two products of an expert: a gate of ``GATES`` on x, times up;
    "clamped_swiglu" of x and up, with ``constants`` (alpha, limit); or "relu2" of x alone, relu(x)²."""
    if name == "relu2":
        x = relu(x)
        return mul_rn(x, x)
    if name == "clamped_swiglu":
        return clamped_swiglu(x, up, *constants)
    return mul_rn(GATES[name](x), up)
