"""What L2 holds by the clock, and what comes from DRAM again."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from clock_lab import clocked, h200, needs_ptxas
from tma_lab import aligned

from cute_nvfp4.sim import GlobalMemory
from cute_nvfp4.sim.clock.memory import Shared
from cute_nvfp4.sim.clock.notes import Copy, Request, Visit
from cute_nvfp4.sim.clock.replay import Replay
from cute_nvfp4.sim.clock.sectors import Sectors


def test_what_l2_has_no_room_for_is_fetched_again():
    """The least recently used sectors leave; a touch keeps one; a step's readers share what one of them fetches."""
    memory, data = GlobalMemory(), aligned(bytes(8 * 32))
    memory.add(data, "data")
    first = data.ctypes.data // 32

    def shares(capacity: int, steps: list[list[int]], kind: str = "load") -> list[list[float]]:
        sectors = Sectors(memory, False, 32 * capacity)
        return [sectors.touch(first + np.array(step), kind).tolist() for step in steps]

    steps = [[0, 1], [2, 3], [0, 0], [4, 5], [1, 0], [2, 2]]
    assert shares(8, steps) == [[1, 1], [1, 1], [0, 0], [1, 1], [0, 0], [0, 0]]
    assert shares(3, steps) == [[1, 1], [1, 1], [0.5, 0.5], [1, 1], [1, 0], [0.5, 0.5]]
    assert shares(3, [[0], [1, 2], [0], [3, 4], [5, 6], [0]], "store") == [[1], [1, 1], [0], [1, 1], [1, 1], [1]]


@needs_ptxas
def test_evictions_take_time():
    """A kernel reads 16 KB, and again: both times from DRAM where L2 is smaller; an L2 it fits into changes nothing."""
    fits, small = clocked("again"), clocked("again", l2_bytes=4096)
    assert clocked("again", l2_bytes=1 << 20).timing() == fits.timing()
    assert small.recorder.sectors.fetched == 2 * fits.recorder.sectors.fetched
    assert small.recorder.sectors.again > 0 == fits.recorder.sectors.again
    assert small.timing().cycles > fits.timing().cycles


def test_replayed_sms_fetch_for_all():
    """Where sectors are fetched again, the replayed SMs bring as many bytes as the launch; else their own."""
    load, copy = Request("load", 4, 2.0, (1,), False), Copy(False, 128, 36.0, 1, ())
    notes = {(0, Request): [load, load._replace(kind="store")], (1, Copy): [copy, copy._replace(store=True)]}
    place = SimpleNamespace(clusters=((5,),), weight=10.0)
    sectors = SimpleNamespace(fetched=2500.0, again=32.0)
    recorder = SimpleNamespace(sectors=sectors, visits={(5, 0): [Visit(0, notes)]})
    launch = SimpleNamespace(recorder=recorder, sample=SimpleNamespace(places=(place,)))
    assert Replay._more_from_dram(launch) == pytest.approx(2500 / (10 * (64 + 36)))
    sectors.again = 0.0
    assert Replay._more_from_dram(launch) == 1.0
    m = h200()
    assert Shared(m, 2.5).fetch(0.0, 1e6, 1e6, 1, 0).time == pytest.approx(2.5e6 / m["dram.bytes_per_cycle"])
