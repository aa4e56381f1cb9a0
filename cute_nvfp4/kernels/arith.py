"""Integer arithmetic for traced values that are known to be non-negative.

The DSL's ``//`` and ``%`` on signed integers round as Python's do, for which negative values cost half a dozen
instructions. For a non-negative value and a power of two, one instruction is enough.
"""

from __future__ import annotations

from typing import Any


def _log2(n: int) -> int:
    if n < 1 or n & (n - 1):
        raise ValueError(f"divisor: got {n}, expected a power of two")
    return n.bit_length() - 1


def div(x: Any, n: int) -> Any:
    """x // n, for x ≥ 0 and n a power of two."""
    return x >> _log2(n)


def mod(x: Any, n: int) -> Any:
    """x % n, for x ≥ 0 and n a power of two."""
    return x & ((1 << _log2(n)) - 1)


def ceil_div(x: Any, n: int) -> Any:
    """⌈x / n⌉, for x ≥ 0 and n a power of two."""
    return (x + (n - 1)) >> _log2(n)
