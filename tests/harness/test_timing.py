"""Statistics, the stop rule, and the order of what is timed."""

from __future__ import annotations

import math

import pytest

from cute_nvfp4.harness import timing
from cute_nvfp4.harness.errors import CallFailed
from cute_nvfp4.harness.plausible import check_bandwidth, check_samples


def test_statistics():
    result = timing.Timing.of([10.0, 20.0, 30.0, 60.0])
    assert (result.runs, result.mean, result.best, result.worst, result.median) == (4, 30, 10, 60, 25)
    assert result.std == pytest.approx(math.sqrt((400 + 100 + 0 + 900) / 3))
    assert result.err == pytest.approx(result.std / 2)
    assert timing.Timing.of([5.0]).err == 0.0


def test_stop_rule():
    rule = timing.StopRule(repeats=200, relative_error=0.001, seconds=120)
    steady, noisy = [1000.0, 1001.0] * 10, [1000.0, 2000.0] * 10
    assert rule.done(steady, 1.0)
    assert not rule.done(noisy, 1.0)
    assert rule.done(noisy, 120.0)
    assert rule.done(noisy * 10, 1.0)
    assert not rule.done([1000.0] * 5, 1.0)  # too few to know
    assert not rule.done([], 500.0)  # never without a measurement


def test_geometric_mean():
    assert timing.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert timing.geometric_mean([18.4, 28.0, 12.6]) == pytest.approx(18.65, abs=0.01)


def test_l2_is_cleared_outside_the_timed_span(monkeypatch):
    happened = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            happened.append("record")

        def synchronize(self):
            happened.append("synchronize")

        def elapsed_time(self, end):
            return 0.25  # ms

    monkeypatch.setattr(timing, "_Event", Event)
    taken = timing.time_once(lambda: happened.append("call"), lambda: happened.append("clear"))
    assert happened == ["clear", "record", "call", "record", "synchronize"]
    assert taken == 250_000.0


@pytest.mark.parametrize("samples", [[], [0.0], [-1.0, 5.0], [math.nan], [math.inf], [2e9]])
def test_impossible_times_are_refused(samples):
    with pytest.raises(CallFailed, match="tampered"):
        check_samples(samples, elapsed=1.0)
    check_samples([1e6, 2e6], elapsed=1.0)


def test_times_that_dram_cannot_give_are_refused():
    check_bandwidth(66_000_000, 18_000.0, 4.25e12)
    with pytest.raises(CallFailed, match=r"implausible time: 66\.00 TB/s"):
        check_bandwidth(66_000_000, 1_000.0, 4.25e12)
