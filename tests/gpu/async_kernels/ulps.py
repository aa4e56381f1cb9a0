"""How far approximate results may lie from one another, by what the PTX ISA promises of each function.

Two results that both keep a bound are at most twice the bound apart.
"""

from __future__ import annotations

import numpy as np

from .case import Case

#: type -> (integer of its size, bits of infinity)
_LAYOUT = {"f32": ("i4", 0x7F800000), "f16": ("i2", 0x7C00), "bf16": ("i2", 0x7F80)}
#: function and type -> bound in units of the last place; 2^-n of the value is 2^(p - n) of them, p bits of mantissa
_ULPS = {
    **{
        "ex2.approx.f32": 2,
        "ex2.approx.ftz.f32": 2,
        "rcp.approx.f32": 1,
        "rcp.approx.ftz.f32": 1,
        "sqrt.approx.f32": 2,
    },
    **{"rsqrt.approx.f32": 2, "rsqrt.approx.ftz.f32": 2, "tanh.approx.f32": 1 << 12, "div.full.f32": 2},
    **{"div.approx.f32": 2, "div.approx.ftz.f32": 2, "ex2.approx.f16": 1, "ex2.approx.ftz.bf16": 1},
    **{"tanh.approx.f16": 2, "tanh.approx.bf16": 1},
}
#: function -> (absolute bound, predicate of the inputs for which it holds)
_ABSOLUTE = {
    "sin.approx.f32": (2**-20.5, lambda x: np.abs(x) <= 2 * np.pi),
    "cos.approx.f32": (2**-20.5, lambda x: np.abs(x) <= 2 * np.pi),
    "lg2.approx.f32": (2.0**-22, lambda x: (x > 0.5) & (x < 2)),
}


def ordered(raw: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(bits as integers in the order of the values, whether they are NaNs)."""
    integer, infinity = _LAYOUT[kind]
    bits = raw.view(integer).astype(np.int64)
    magnitude = bits & (1 << 8 * np.dtype(integer).itemsize - 1) - 1
    return np.where(bits < 0, -magnitude, magnitude), magnitude > infinity


def distance(found: np.ndarray, known: np.ndarray, kind: str) -> np.ndarray:
    """Units of the last place between results; NaNs are equal, and far from everything else."""
    (a, a_nan), (b, b_nan) = ordered(found, kind), ordered(known, kind)
    return np.where(a_nan | b_nan, np.where(a_nan == b_nan, 0, 1 << 40), np.abs(a - b))


def far_apart(case: Case, found: np.ndarray, known: np.ndarray) -> str:
    """What is too far from the recorded results; empty when nothing is."""
    function = case.name.split()[1].replace("f16x2", "f16")
    kind = function.rsplit(".", 1)[1]
    apart = distance(found, known, kind)
    if function in _ABSOLUTE:
        bound, holds = _ABSOLUTE[function]
        with np.errstate(all="ignore"):
            x, a, b = (r.view("f4").astype(np.float64) for r in (case.buffers[1], found, known))
            near = (np.abs(a - b) <= 2 * bound) | (apart == 0)
            wrong = ~near & holds(x)
    else:
        wrong = apart > 2 * _ULPS[function]
        if function.startswith("div.approx"):
            wrong &= divisible(case)
    worst = int(apart[wrong].max()) if wrong.any() else 0
    return f"{int(wrong.sum())} results, by up to {worst} units of the last place" if worst else ""


def divisible(case: Case) -> np.ndarray:
    """Where div.approx keeps its bound: divisors in [2^-126, 2^126]."""
    with np.errstate(invalid="ignore"):
        b = np.abs(case.buffers[2].view("f4").astype(np.float64))
    return (b >= 2.0**-126) & (b <= 2.0**126)
