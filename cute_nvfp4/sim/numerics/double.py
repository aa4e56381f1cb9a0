"""Binary64 arithmetic of the GPU, in every rounding mode and with the payloads of NaNs.

The PTX ISA ("Floating Point Instructions") leaves the payload of f64 results open. An H200 was observed to return the
NaN operand, quieted, with its sign and payload, and 0xfff8000000000000 for an invalid operation. The operation
determines which of several NaN operands it returns (``NAN_ORDER``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

INVALID = np.uint64(0xFFF8000000000000)  # result of an invalid operation
_QUIET = np.uint64(1 << 51)
#: Indices of the operands of each operation: the result is the first NaN in this order.
NAN_ORDER = {"add": (1, 0), "sub": (1, 0), "mul": (1, 0), "fma": (1, 2, 0), "div": (0, 1), "extremum": (1, 0)}


def with_nan(out: np.ndarray, *operands: np.ndarray, quiet: bool = True) -> np.ndarray:
    """Returns ``out``, with each NaN replaced by the first operand that is NaN, or else by the NaN of invalid
    operations. ``quiet`` sets the quiet bit of that operand."""
    bad = np.isnan(out)
    if not bad.any():
        return out
    bits: np.ndarray = np.full((1, 1), INVALID)
    for x in reversed(operands):
        raw = x.view("u8")
        bits = np.where(np.isnan(x), raw | _QUIET if quiet else raw, bits)
    return np.where(bad, bits, out.view("u8")).view("f8")


def _ordered(kind: str, out: np.ndarray, *operands: np.ndarray) -> np.ndarray:
    return with_nan(out, *(operands[j] for j in NAN_ORDER[kind]))


def add64(a: np.ndarray, b: np.ndarray, mode: str = "rn") -> np.ndarray:
    """Returns the binary64 sum, rounded by ``mode``."""
    out = a + b
    if mode != "rn":
        # An exact zero sum of operands with different signs is -0 when rounded down (IEEE 754-2019, 6.3).
        out = _each(out, lambda x, y: Fraction(x) + Fraction(y), mode, lambda x, y: _zero_sum(x, y, mode), a, b)
    return _ordered("add", out, a, b)


def sub64(a: np.ndarray, b: np.ndarray, mode: str = "rn") -> np.ndarray:
    """Returns a - b, rounded by ``mode``; the sign of a NaN does not change."""
    return _ordered("sub", add64(a, -b, mode), a, b)


def mul64(a: np.ndarray, b: np.ndarray, mode: str = "rn") -> np.ndarray:
    """Returns the binary64 product, rounded by ``mode``."""
    out = a * b
    if mode != "rn":
        out = _each(out, lambda x, y: Fraction(x) * Fraction(y), mode, None, a, b)
    return _ordered("mul", out, a, b)


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str = "rn") -> np.ndarray:
    """Returns a * b + c, computed with exact rationals and rounded once by ``mode``."""

    def zero(x: float, y: float, z: float) -> float:
        return _zero_sum(math.copysign(1, x) * math.copysign(1, y), z, mode)

    out = _each(a * b + c, lambda x, y, z: Fraction(x) * Fraction(y) + Fraction(z), mode, zero, a, b, c)
    return _ordered("fma", out, a, b, c)


def div64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the binary64 quotient, rounded to nearest even."""
    return _ordered("div", a / b, a, b)


def sqrt64(a: np.ndarray) -> np.ndarray:
    """Returns the binary64 square root, rounded to nearest even."""
    return with_nan(np.sqrt(a), a)


def sum_in_global_memory(old: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the sum of an atomic operation in global memory, which returns the first NaN of operand and memory
    unchanged, even a signaling one."""
    return with_nan(old + b, b, old, quiet=False)


def sum_in_shared_memory(old: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the sum of an atomic operation in shared memory, which returns the first NaN of memory and operand,
    quieted."""
    return with_nan(old + b, old, b)


def _zero_sum(x: float, y: float, mode: str) -> float:
    """Returns the zero that results when the exact sum of ``x`` and ``y`` is zero; only their signs matter."""
    negative, other = math.copysign(1, x) < 0, math.copysign(1, y) < 0
    return -0.0 if (negative if negative == other else mode == "rm") else 0.0


def _rounded(exact: Fraction, mode: str) -> float:
    """Returns a nonzero rational, rounded once."""
    try:
        near = float(exact)
    except OverflowError:
        near = math.inf if exact > 0 else -math.inf
    if mode == "rn":
        return near
    larger = near > exact if math.isinf(near) else Fraction(near) > exact
    smaller = near < exact if math.isinf(near) else Fraction(near) < exact
    down = mode == "rm" or (mode == "rz" and exact > 0)
    if larger and down:
        return math.nextafter(near, -math.inf)
    return math.nextafter(near, math.inf) if smaller and not down else near


def _each(naive: np.ndarray, exact: Callable, mode: str, zero: Callable | None, *operands: np.ndarray) -> np.ndarray:
    """Returns ``naive``, with lanes of finite operands replaced by the rounded ``exact`` rational of the operands.

    Where that is zero, the lane becomes ``zero`` of the operands, or remains as it is without ``zero``.
    """
    out = np.array(naive)
    flat = out.reshape(-1)
    columns = [np.broadcast_to(x, out.shape).ravel().tolist() for x in operands]
    for j, values in enumerate(zip(*columns)):
        if not all(map(math.isfinite, values)):
            continue
        total = exact(*values)
        if total:
            flat[j] = _rounded(total, mode)
        elif zero is not None:
            flat[j] = zero(*values)
    return out
