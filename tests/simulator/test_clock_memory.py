"""The clock's queues of memory: DRAM, L2, and the ways of an SM to them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from clock_lab import h200

from cute_nvfp4.sim.clock.machine import machine
from cute_nvfp4.sim.clock.memory import Port, Shared
from cute_nvfp4.sim.clock.notes import Copy, Request
from cute_nvfp4.sim.clock.recorder import sectors_of

DIRTY = ("l2.dirty_bytes", "dram.write_back", "dram.dirty_more", "dram.dirty_queue")
BOXES = ("tma.first", "dram.bytes_per_draw", "tma.queue", "tma.store_latency")
"""Figures of copies."""


def test_queues():
    """DRAM serves one after the other at its rate; an SM that stands for ten takes ten times as long; L1 remembers."""
    m = h200(**{f"dram__latency_{p}": 700 for p in (10, 50, 90, 99, 100)})
    shared = Shared(m)
    port, ten = Port(m, shared, 1, 1 << 16), Port(m, shared, 10, 1 << 16)
    miss = Request("load", 16, 16.0, (1, 2, 3, 4), True)
    alone = port.load(0.0, miss)
    assert alone.by == "dram" and alone.time == pytest.approx(
        700 + 4 * m["l1.cycles_per_request"] + 512 / m["l2.to_sm"]
    )
    ten.load(0.0, miss)
    shared.fetch(0.0, 10_000_000, 10_000_000, 1, 0)
    behind = port.load(0.0, miss._replace(lines=(5, 6, 7, 8)))
    assert behind.time == pytest.approx(700 + 4 + (10_000_000 + 12 * 512) / m["dram.bytes_per_cycle"])
    hit = port.load(5000.0, miss._replace(new=0.0))
    assert hit.by == "l1" and hit.time == 5000 + 4 * m["l1.cycles_per_request"] + m["l1.latency"]


def test_a_busy_bank_makes_requests_wait():
    """DRAM at half of its rate: nobody stands in the queue, and all wait for others of their bank."""

    def last(queue: float) -> float:
        shared, bytes_ = Shared(machine("h200")), 100 * machine("h200")["dram.bytes_per_cycle"]
        return [shared.fetch(200.0 * k, bytes_, bytes_, 1, queue).time - 200.0 * k for k in range(100)][-1]

    assert last(0) == pytest.approx(100) and last(900) == pytest.approx(900 * 0.5 / (2 - 2 * 0.5), rel=0.15)


@pytest.mark.parametrize("gpu", ["h200", "b200"])
@pytest.mark.parametrize("name", [*DIRTY, *BOXES, "dram.queue"])
def test_every_figure_of_copies_counts(gpu, name):
    """Boxes of 16 KB and loads through a dirty L2, and a store: what they wait for changes with each figure."""

    def times(**figures: float) -> list[float]:
        m = machine(gpu).changed(**{"l2__dirty_bytes": 1e6} | figures)
        port = Port(m, Shared(m), 10, 0)
        boxes = [port.copy(500.0 * k, Copy(False, 16384, 16384.0, 1, ()), 7) for k in range(8)]
        loads = [port.load(5000.0 + k, Request("load", 4, 4.0, (k,), False)) for k in range(2)]
        return [answer.time for answer in (*boxes, *loads, port.copy(9000.0, Copy(True, 4096, 4096.0, 1, ())))]

    figure = name.replace(".", "__")
    assert times(**{figure: 3e6 if "dirty_bytes" in name else 3 * machine(gpu)[name]}) != times()


def test_lines_that_lie_together_come_together():
    """Four lines of one 2 KB of DRAM take one latency, of four such blocks the longest of four."""
    m = h200(dram__queue=0)

    def mean(step: int) -> float:
        port = Port(m, Shared(m), 1, 0)
        lines = [tuple(1600 * k + step * j for j in range(4)) for k in range(400)]
        return (
            sum(port.load(1e5 * k, Request("load", 16, 16.0, of, False)).time - 1e5 * k for k, of in enumerate(lines))
            / 400
        )

    assert mean(16) > mean(1) + 50


def test_written_bytes_have_a_rate_of_their_own():
    m = h200(dram__written_bytes_per_cycle=100, dram__bytes_per_cycle=1000, l2__bytes_per_cycle=1e9)
    shared = Shared(m)
    shared.write(0.0, 5000, 5000, 1)
    assert shared.drained == pytest.approx(50, rel=1e-3) and shared.dram_busy == pytest.approx(50)


def test_sectors_of_a_box_count_once():
    """A box at the edge of a tensor is known by its chunks of 16 bytes, two a sector."""
    assert sectors_of(np.array([[5, 5, 6, -1], [-1, -1, -1, -1], [4, 2, 3, 1]])).tolist() == [2, 0, 4]


@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_the_first_box_of_a_tensor_map_takes_longer(gpu):
    port = Port(m := machine(gpu).changed(tma__first=1e6), Shared(m), 1, 0)
    found = [port.copy(0.0, Copy(False, 4096, 0.0, 1, ()), tensor).time > 1e6 for tensor in (7, 7, 8, 0)]
    assert found == [True, False, True, False]


@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_a_dirty_l2_is_written_back(gpu):
    """What is read first costs DRAM more, the less the more has been read; requests take longer."""
    clean = machine(gpu).changed(dram__bytes_per_cycle=1000)
    m = clean.changed(l2__dirty_bytes=1e6, dram__write_back=0.5, dram__dirty_more=100)
    shared, plain = Shared(m), Shared(clean)
    more = [shared.fetch(1e9 * k, 1e6, 1e6, 1, 0).time - plain.fetch(1e9 * k, 1e6, 1e6, 1, 0).time for k in range(3)]
    assert more == pytest.approx([math.exp(-k) * (100 + 0.5 * 1000) for k in (1, 2, 3)], rel=1e-3)


def test_copies_of_the_same_bytes_are_served_together():
    """L2 spends as much on four copies of the same bytes as on two where it serves two at once; others on their own."""
    m = h200(l2__together=2, l2__bytes_per_cycle=100)

    def busy(alike: int) -> float:
        shared = Shared(m)
        port = Port(m, shared, 1, 0)
        for _ in range(4):
            port.copy(0.0, Copy(False, 1000, 0.0, alike, ()))
        return shared.l2_busy

    assert (busy(1), busy(4)) == (40.0, 20.0)
