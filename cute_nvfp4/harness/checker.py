"""The check of an output against its reference; it runs only in the judge's process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .problem import Expected
from .schema import Tolerances

_SHOWN = 3
_AT_ONCE = 1 << 18  # elements whose temporaries stay in the caches


@dataclass(frozen=True)
class Check:
    """The verdict on one output, and its largest errors: NaN where a NaN or an infinity is wrong."""

    passed: bool
    message: str
    max_abs: float
    max_rel: float


def check_output(out: np.ndarray, expected: Expected, tolerances: Tolerances) -> Check:
    """Compares ``out``, in its own dtype, with the exact result rounded once to that dtype.

    It passes if NaN and infinities match in place and sign, and every finite element lies within
    ``atol + rtol |ref| + sum_rtol * magnitude``.
    """
    if out.shape != expected.value.shape:
        return Check(False, f"shape {out.shape}, expected {expected.value.shape}", np.nan, np.nan)
    if tolerances.sum_rtol and expected.magnitude is None:
        raise ValueError("sum_rtol is not zero, and the reference was made without magnitudes")
    got, value = out.reshape(-1), expected.value.reshape(-1)
    magnitude = expected.magnitude.reshape(-1) if tolerances.sum_rtol else None
    bad = np.zeros(got.shape, dtype=bool)
    max_abs = max_rel = 0.0
    for first in range(0, got.size, _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        size = None if magnitude is None else magnitude[part]
        bad[part], largest, relative = _compare(got[part], value[part], size, tolerances)
        max_abs, max_rel = np.maximum(max_abs, largest), np.maximum(max_rel, relative)  # NaN wins
    if not bad.any():
        return Check(True, "", float(max_abs), float(max_rel))
    return Check(False, _explain(bad.reshape(out.shape), out, expected.value), float(max_abs), float(max_rel))


def _round(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """``value`` rounded once to ``dtype``, as float64."""
    with np.errstate(over="ignore"):
        return _widen(value.astype(dtype))


def _widen(value: np.ndarray) -> np.ndarray:
    """``value`` in float64, exactly. numpy converts float16 to float32 first much faster than to float64 directly."""
    return value.astype(np.float32).astype(np.float64) if value.dtype == np.float16 else value.astype(np.float64)


def _compare(
    out: np.ndarray, value: np.ndarray, magnitude: np.ndarray | None, tolerances: Tolerances
) -> tuple[np.ndarray, float, float]:
    """The mask of wrong elements, and the largest absolute and relative error of the finite ones.

    The errors are NaN where a NaN or an infinity is wrong.
    """
    rounded, got = _round(value, out.dtype), _widen(out)
    finite = np.isfinite(got) & np.isfinite(rounded)
    same_special = (np.isnan(got) & np.isnan(rounded)) | (np.isinf(got) & (got == rounded))
    error = np.zeros_like(got)
    np.subtract(got, rounded, out=error, where=finite)
    np.abs(error, out=error)
    reference = np.abs(np.where(finite, rounded, 0.0))
    allowed = tolerances.atol + tolerances.rtol * reference
    if magnitude is not None:
        allowed += tolerances.sum_rtol * magnitude
    bad = np.where(finite, error > allowed, ~same_special)
    if (bad & ~finite).any():
        return bad, np.nan, np.nan
    relative = np.divide(error, reference, out=np.zeros_like(error), where=reference > 0)
    return bad, error.max(initial=0.0), relative.max(initial=0.0)


def _explain(bad: np.ndarray, out: np.ndarray, value: np.ndarray) -> str:
    places = np.argwhere(bad)
    shown = "; ".join(
        f"{tuple(int(i) for i in place)}: got {out[tuple(place)]:g}, "
        f"expected {_round(value[tuple(place)], out.dtype):g}"
        for place in places[:_SHOWN]
    )
    message = f"{len(places)} of {bad.size} elements are wrong: {shown}"
    unwritten = int((bad & np.isnan(out)).sum())
    if unwritten:
        message += f" ({unwritten} are NaN: c is filled with NaN before each call, so they may never have been written)"
    return message
