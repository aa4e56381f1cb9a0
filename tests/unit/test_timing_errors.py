"""How far the clock is off: the package's file is what the records say, and a score of kernels follows from it."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import timing_errors

from cute_nvfp4.harness.modelled_score import FILE, clock_errors, modelled_kernels, said_of
from cute_nvfp4.sim.clock.machine import machine


def test_the_package_has_the_errors_of_the_records():
    assert FILE.read_text() == timing_errors.text(), "run benchmarks/timing_errors.py --write"


def test_errors_are_ratios_of_kernels_without_their_launches():
    found = timing_errors.ratios("h100")
    (rows,) = timing_errors.held_out("h100")
    first = rows[0]
    assert found[0] == pytest.approx((first.measured - first.launch) / (first.modelled - first.launch))
    assert len(found) == len(rows) == clock_errors("h100").launches


def test_a_score_of_kernels_has_no_launches_and_the_span_of_the_records():
    b200, known = machine("b200"), clock_errors("b200")
    launch, empty = b200["launch.empty_us"], b200["launch.duration_us"]
    found = modelled_kernels([(launch + 2.0, 1), (2 * launch + 8.0, 2)], "b200", "geom")
    assert found.score_us == pytest.approx(math.sqrt((2.0 + empty) * (8.0 + 2 * empty)))
    assert (found.low_us, found.high_us) == (known.low * found.score_us, known.high * found.score_us)
    assert f"{found.high_us:.2f} µs" in said_of(found, "geometric mean")


def test_a_gpu_that_nobody_has_compared_has_no_span(monkeypatch):
    monkeypatch.setattr("cute_nvfp4.harness.modelled_score.clock_errors", lambda clock: None)
    assert modelled_kernels([(5.0, 1)], "b200", "geom") is None
