"""L2 and DRAM, which all SMs share, and the paths of one SM to them, as queues with a rate and a latency."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

from cute_nvfp4.sim.clock.machine import Machine
from cute_nvfp4.sim.clock.notes import Copy, Request

SECTOR, LINE = 32, 128


class Answer(NamedTuple):
    """The cycle at which a request is answered, and what answers it: "l1", "l2" or "dram"."""

    time: float
    by: str


PERCENTILES = (10, 50, 90, 99, 100)
MULTIPLIER, INCREMENT, MODULUS = 1664525, 1013904223, 1 << 32
"""A linear congruential generator ("Numerical Recipes", 7.1), which gives the same latencies in every run."""
APART = 0x9E3779B9
"""The distance between the first states of two sequences."""
WINDOW, FULLEST = 2000.0, 0.85
"""The cycles over which DRAM's load is averaged, and the load beyond which waiting grows no more."""


class Latency:
    """A random sequence of latencies with the measured distribution of ``name`` ("l2", "dram"). ``sequence`` selects
    one of several such sequences. A percentile that the machine has no figure for is as long as p99."""

    def __init__(self, machine: Machine, name: str, sequence: int = 0) -> None:
        self._known = [machine.first(f"{name}.latency_{p}", f"{name}.latency_99") for p in PERCENTILES]
        self._drawn = (1 + sequence * APART) % MODULUS

    def next(self, lines: int = 1) -> float:
        """Returns the longest of ``lines`` random latencies, from a single random number."""
        self._drawn = (self._drawn * MULTIPLIER + INCREMENT) % MODULUS
        percent, known = 100 * (self._drawn / MODULUS) ** (1 / max(1, lines)), self._known
        k = sum(percent > p for p in PERCENTILES[1:-1])
        low, high = PERCENTILES[k], PERCENTILES[k + 1]
        share = min(max((percent - low) / (high - low), 0.0), 1.0)
        return known[k] + share * (known[k + 1] - known[k])


class Shared:
    """The queues of L2 and DRAM. A request of an SM that stands for ``weight`` SMs takes ``weight`` times its bytes.
    ``more`` is the factor of the bytes that come from DRAM to those that the replayed SMs fetched. ``sequence`` is that
    of the latencies."""

    def __init__(self, machine: Machine, more: float = 1.0, sequence: int = 0) -> None:
        self._more = more
        self._l2_rate, self._dram_rate = machine["l2.bytes_per_cycle"], machine["dram.bytes_per_cycle"]
        self._written_rate, self._together = machine["dram.written_bytes_per_cycle"], machine["l2.together"]
        self.latency = {name: Latency(machine, name, sequence) for name in ("l2", "dram")}
        self._l2_free = self._dram_free = self._asked = self._load = 0.0
        self._dirty, self._write_back = machine["l2.dirty_bytes"], machine["dram.write_back"]
        self._dirty_more, self._dirty_queue, self._read = machine["dram.dirty_more"], machine["dram.dirty_queue"], 0.0
        self.l2_busy = self.dram_busy = self.drained = 0.0

    def fetch(self, time: float, size: float, new: float, weight: float, queue: float, alike: int = 1) -> Answer:
        """Returns when the queues have served ``size`` bytes that are asked for at ``time``, ``new`` of them from DRAM.
        ``queue`` is for how many cycles such a request keeps a bank of DRAM busy. ``alike`` requests ask for the same
        bytes at once, of which L2 serves some together."""
        busy = weight * size / self._l2_rate / min(alike, self._together)
        self._l2_free = max(time, self._l2_free) + busy
        self.l2_busy += busy
        if new <= 0:
            return Answer(self._l2_free, "l2")
        new *= self._more
        busy = weight * new / self._dram_rate
        if self._dirty:  # lines that come in evict others, of which ever fewer are dirty
            self._read += weight * new
            dirty = math.exp(-self._read / self._dirty)
            time, busy = time + self._dirty_more * dirty, busy * (1 + self._write_back * dirty)
            queue *= 1 + self._dirty_queue * dirty
        self._dram_free = max(time, self._dram_free) + busy
        self.dram_busy += busy
        return Answer(max(self._l2_free, self._dram_free, time + self._waiting(time, busy, queue)), "dram")

    def _waiting(self, time: float, busy: float, queue: float) -> float:
        """Returns how long a request waits for others of its bank on average: as in a queue with random arrivals and a
        constant service time (Pollaczek and Khinchine), at the load of the last ``WINDOW`` cycles."""
        self._load = self._load * math.exp(min(0.0, self._asked - time) / WINDOW) + busy
        self._asked = max(self._asked, time)
        load = min(self._load / WINDOW, FULLEST)
        return queue * load / (2 - 2 * load)

    def write(self, time: float, size: float, new: float, weight: float) -> float:
        """Queues ``size`` bytes for L2, and then ``new`` of them for DRAM. Returns when L2 has taken them; ``drained``
        is when all is written."""
        busy, later = weight * size / self._l2_rate, weight * new / self._written_rate
        self._l2_free = max(time, self._l2_free) + busy
        self._dram_free = max(time, self._dram_free) + later
        self.l2_busy, self.dram_busy = self.l2_busy + busy, self.dram_busy + later
        self.drained = max(self._l2_free, self._dram_free)
        return self._l2_free


class Port:
    """The L1 of one SM: its load and store unit, its links from and to L2, and the lines that it holds."""

    def __init__(self, machine: Machine, shared: Shared, weight: float, l1_bytes: int) -> None:
        self._shared, self._weight = shared, weight
        self._turn, self._pass = machine["l1.cycles_per_request"], machine["shared.cycles_per_pass"]
        self._l1, self._in, self._out = machine["l1.latency"], machine["l2.to_sm"], machine["l2.from_sm"]
        self._more = {"l2": -machine["tma.l2_less"], "dram": machine["tma.dram_more"]}
        self._tma_rate, self._tma_store = machine["tma.bytes_per_cycle"], machine["tma.store_latency"]
        self._part, self._queue = int(machine["dram.bytes_per_draw"]), machine["dram.queue"]
        self._tma_queue = machine["tma.queue"]
        self._first, self._used = machine["tma.first"], set[int]()
        self._lines: OrderedDict[int, None] = OrderedDict()
        self._room = max(0, l1_bytes // LINE)
        self._across, self._sent = machine["cluster.bytes_per_cycle"], 0.0
        self._turns = self._arrivals = self._leavings = 0.0
        self.busy, self.asked, self.held = 0.0, 0, 0
        """The cycles of the load and store unit; the sectors that loads asked for, and those of them that L1 had."""

    def passes(self, time: float, passes: float) -> float:
        """Returns when shared memory has served a request of ``passes`` passes."""
        return self._take(time, passes * self._pass)

    def _take(self, time: float, cycles: float) -> float:
        """Keeps the load and store unit busy for ``cycles`` more, and returns when they are over."""
        self._turns = max(time, self._turns) + cycles
        self.busy += cycles
        return self._turns

    def load(self, time: float, request: Request) -> Answer:
        """Returns when a warp's load is answered."""
        self._take(time, self._turn * max(1, len(request.lines)))
        self.asked += request.sectors
        if request.through_l1 and self._holds(request.lines):
            self.held += request.sectors
            return Answer(self._turns + self._l1, "l1")
        return self._fetch(self._turns, request)

    def _fetch(self, time: float, request: Request) -> Answer:
        size = request.sectors * SECTOR
        self._arrivals = max(time, self._arrivals) + size / self._in
        served = self._shared.fetch(time, size, request.new * SECTOR, self._weight, self._queue)
        lines = request.lines
        blocks = {(line - lines[0]) * LINE // self._part for line in lines} if served.by == "dram" else lines
        latency = self._shared.latency[served.by].next(len(blocks))
        return Answer(max(served.time, self._arrivals) + latency, served.by)

    def _once(self, tensor: int) -> float:
        """Returns the latency that a copy's tensor map adds at its first use by the SM. 0 is no tensor map."""
        if not tensor or tensor in self._used:
            return 0.0
        self._used.add(tensor)
        return self._first

    def _holds(self, lines: tuple[int, ...]) -> bool:
        """Returns whether L1 has all of ``lines``, and puts them there."""
        hit = all(line in self._lines for line in lines)
        for line in lines:
            self._lines[line] = None
            self._lines.move_to_end(line)
        while len(self._lines) > self._room:
            self._lines.popitem(last=False)
        return hit

    def store(self, time: float, request: Request) -> float:
        """Queues a store or reduction of a warp, and returns when the load and store unit has taken it."""
        self._take(time, self._turn * max(1, len(request.lines)))
        self._leavings = max(self._turns, self._leavings) + request.sectors * SECTOR / self._out
        self._shared.write(self._leavings, request.sectors * SECTOR, request.new * SECTOR, self._weight)
        return self._turns

    def send(self, time: float, size: int) -> float:
        """Returns when ``size`` bytes have left for another SM of the cluster."""
        self._sent = max(time, self._sent) + size / self._across
        return self._sent

    def atomic(self, time: float, request: Request) -> Answer:
        self.store(time, request)
        return self._fetch(self._turns, request._replace(new=0.0))

    def copy(self, time: float, copy: Copy, tensor: int = 0) -> Answer:
        """Returns when the bytes of a bulk copy have arrived or are written. ``tensor`` stands for the
        tensor map of a tensor load: it is the index of the PTX instruction, and 0 for other copies."""
        if copy.store:
            self._leavings = max(time, self._leavings) + copy.size / self._out
            return Answer(self._shared.write(self._leavings, copy.size, copy.new, self._weight) + self._tma_store, "l2")
        self._arrivals = max(time, self._arrivals) + copy.size / self._tma_rate
        served = self._shared.fetch(time, copy.size, copy.new, self._weight, self._tma_queue, copy.alike)
        draws = -(-int(copy.size) // self._part) if served.by == "dram" else 1
        latency = self._shared.latency[served.by].next(draws) + self._more[served.by] + self._once(tensor)
        return Answer(max(served.time, self._arrivals) + latency, served.by)
