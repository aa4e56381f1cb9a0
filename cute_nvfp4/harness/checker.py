"""Whether an output is right; runs in the harness's process only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .problem import Expected
from .schema import Tolerances

_SHOWN = 3


@dataclass(frozen=True)
class Check:
    """The verdict on one output, with its largest errors; NaN where a NaN or an infinity is out of place."""

    passed: bool
    message: str
    max_abs: float
    max_rel: float


def check_output(out: np.ndarray, expected: Expected, tolerances: Tolerances) -> Check:
    """Compares ``out`` (the output's own dtype) with the exact result rounded once to that dtype.

    Passes where NaN and infinities match in place and sign, and every finite element lies within
    ``atol + rtol |ref| + sum_rtol * sum |a_k b_k|``.
    """
    if out.shape != expected.value.shape:
        return Check(False, f"shape {out.shape}, expected {expected.value.shape}", np.nan, np.nan)
    with np.errstate(over="ignore"):
        rounded = expected.value.astype(out.dtype).astype(np.float64)
    got = out.astype(np.float64)
    finite = np.isfinite(got) & np.isfinite(rounded)
    same_special = (np.isnan(got) & np.isnan(rounded)) | (np.isinf(got) & (got == rounded))
    error = np.zeros_like(got)
    np.subtract(got, rounded, out=error, where=finite)
    error = np.abs(error)
    reference = np.abs(np.where(finite, rounded, 0.0))
    allowed = tolerances.atol + tolerances.rtol * reference + tolerances.sum_rtol * expected.magnitude
    bad = np.where(finite, error > allowed, ~same_special)
    relative = error[reference > 0] / reference[reference > 0]
    max_abs = float(error.max(initial=0.0))
    max_rel = float(relative.max(initial=0.0))
    if (bad & ~finite).any():
        max_abs = max_rel = float("nan")
    if not bad.any():
        return Check(True, "", max_abs, max_rel)
    return Check(False, _explain(bad, got, rounded), max_abs, max_rel)


def _explain(bad: np.ndarray, got: np.ndarray, rounded: np.ndarray) -> str:
    places = np.argwhere(bad)
    shown = "; ".join(
        f"{tuple(int(i) for i in place)}: got {got[tuple(place)]:g}, expected {rounded[tuple(place)]:g}"
        for place in places[:_SHOWN]
    )
    message = f"{len(places)} of {bad.size} elements are wrong: {shown}"
    unwritten = int((bad & np.isnan(got)).sum())
    if unwritten:
        message += f" ({unwritten} are NaN: c is filled with NaN before each call, so they may never have been written)"
    return message
