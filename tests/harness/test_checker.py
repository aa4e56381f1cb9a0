"""The checker of outputs: which it passes, which it refuses, and the errors that it reports."""

from __future__ import annotations

import numpy as np
import pytest

from cute_nvfp4.harness.checker import check_output
from cute_nvfp4.harness.problem import Expected
from cute_nvfp4.harness.schema import Tolerances

PUBLIC = Tolerances(rtol=1e-3, atol=1e-3)


def expected(*values: float, magnitude: float = 0.0) -> Expected:
    value = np.array(values, dtype=np.float64)
    return Expected(value, np.full_like(value, magnitude))


def out(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float16)


def test_equal_passes_with_zero_error():
    check = check_output(out(1, -2, 0), expected(1, -2, 0), PUBLIC)
    assert check.passed and check.max_abs == 0 and check.max_rel == 0


def test_the_reference_is_rounded_once_to_fp16():
    # halfway between 1 and 1 + 2^-10, a little above: through float32 this would round to even, to 1
    check = check_output(out(1 + 2**-10), expected(1 + 2**-11 + 2**-40), Tolerances(rtol=0, atol=0))
    assert check.passed


@pytest.mark.parametrize("got,passes", [(100.0625, True), (100.125, False), (99.9375, True), (99.875, False)])
def test_relative_tolerance(got, passes):
    check = check_output(out(got), expected(100.0), PUBLIC)  # 0.101 is allowed, fp16 steps are 0.0625
    assert check.passed is passes
    assert check.max_abs == abs(got - 100)


@pytest.mark.parametrize("got,passes", [(9.9e-4, True), (1.1e-3, False)])
def test_absolute_tolerance(got, passes):
    assert check_output(out(got), expected(0.0), PUBLIC).passed is passes


@pytest.mark.parametrize("got,passes", [(8.0, True), (-8.0, True), (9.0, False)])
def test_tolerance_relative_to_the_sum_of_absolute_products(got, passes):
    tolerances = Tolerances(rtol=0, atol=0, sum_rtol=2**-10)
    assert check_output(out(got), expected(0.0, magnitude=8192.0), tolerances).passed is passes


@pytest.mark.parametrize(
    "got,value,passes",
    [
        (np.inf, 1e6, True),  # overflows fp16
        (-np.inf, 1e6, False),
        (65504, 1e6, False),
        (np.nan, 1e6, False),
        (np.inf, 100, False),
        (np.nan, np.nan, True),
        (0, np.nan, False),
        (np.nan, 0, False),
    ],
)
def test_nan_and_infinity_patterns(got, value, passes):
    assert check_output(out(got, 1), expected(value, 1), PUBLIC).passed is passes


def test_the_message_shows_where_and_what():
    check = check_output(out(1, 5, np.nan), expected(1, 2, 3), PUBLIC)
    assert not check.passed
    assert "2 of 3 elements are wrong: (1,): got 5, expected 2; (2,): got nan, expected 3" in check.message
    assert "1 are NaN" in check.message
    assert np.isnan(check.max_abs) and np.isnan(check.max_rel)  # no number says how wrong a NaN is
    check = check_output(out(1, 5, 3), expected(1, 2, 3), PUBLIC)
    assert (check.passed, check.max_abs, check.max_rel) == (False, 3.0, 1.5)


def test_large_outputs_are_compared_in_parts(monkeypatch):
    rng = np.random.default_rng(3)
    value = rng.normal(size=(9, 50)) * 100
    got = value.astype(np.float16)
    got[0, 1], got[4, 7], got[8, 49] = 1e4, np.inf, -3
    reference = Expected(value, np.abs(value))
    whole = check_output(got, reference, PUBLIC)
    monkeypatch.setattr("cute_nvfp4.harness.checker._AT_ONCE", 16)
    parts = check_output(got, reference, PUBLIC)
    assert parts.message == whole.message and "3 of 450 elements are wrong: (0, 1): got 10000" in parts.message
    assert np.isnan([parts.max_abs, parts.max_rel, whole.max_abs, whole.max_rel]).all()
    got[4, 7] = value[4, 7]
    assert check_output(got, reference, PUBLIC).max_abs == pytest.approx(1e4 - value[0, 1], rel=1e-3)


def test_a_tolerance_of_magnitudes_needs_magnitudes():
    reference = Expected(np.zeros(2), None)
    assert check_output(out(0, 0), reference, PUBLIC).passed
    with pytest.raises(ValueError, match="without magnitudes"):
        check_output(out(0, 0), reference, Tolerances(rtol=0, atol=0, sum_rtol=1e-3))


def test_a_wrong_shape_is_a_failure_not_a_broadcast():
    check = check_output(out(1), expected(1, 1), PUBLIC)
    assert not check.passed and "shape (1,), expected (2,)" in check.message
