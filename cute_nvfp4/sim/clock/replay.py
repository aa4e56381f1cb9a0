"""The event queue, in which warps of the sampled SMs issue their instructions in order, and wait where they must.

Time is in cycles of an SM from the start of the first CTA. A replay is deterministic: of two warps with the same time,
the one that came into the queue first goes first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import Any

from cute_nvfp4.sim.clock.effects import NOTES, Effects
from cute_nvfp4.sim.clock.flags import FLAG
from cute_nvfp4.sim.clock.machine import Machine
from cute_nvfp4.sim.clock.matching import MachineCode
from cute_nvfp4.sim.clock.memory import Shared
from cute_nvfp4.sim.clock.notes import Arrive, Bar, Commit, Copy, Passes, Request, Visit, fetched
from cute_nvfp4.sim.clock.recorder import Recorder
from cute_nvfp4.sim.clock.sampling import Place, Sample
from cute_nvfp4.sim.clock.sass import NO_SCOREBOARD
from cute_nvfp4.sim.clock.steps import CODE_LINE, PIPES, Step, stepper
from cute_nvfp4.sim.clock.warps import Happened, Sm, Warp
from cute_nvfp4.sim.errors import ClockError

INSTRUCTION = 16
"""Bytes of a SASS instruction."""
Program = list[tuple[list[Step], Happened]]
"""The lists of steps that a warp issues, each with the notes of its instructions."""


class Replay(Effects):
    """A replay of what a recorder has heard, on the sampled SMs of one machine."""

    def __init__(
        self, recorder: Recorder, code: MachineCode, sample: Sample, machine: Machine, l1_bytes: int,
        before: Replay | None = None,
    ) -> None:  # fmt: skip
        """``before`` is a replay with the same arguments, which this one repeats with other latencies of memory."""
        super().__init__(recorder.expected)
        self.machine, self.code, self.sample, self.recorder = machine, code, sample, recorder
        self._sequence = before._sequence + 1 if before else 0
        self._programs: dict[tuple[int, int], Program] = before._programs if before else {}
        if before:
            self._more, self._lists, self._made, self._moved = before._more, before._lists, before._made, before._moved
        else:
            step = stepper(machine)
            self._more = self._more_from_dram()
            self._lists = [[step(slot) for slot in slots] for slots in code.blocks]
            self._made = {s.source: b for b, steps in enumerate(self._lists) for s in steps if s.kind != "plain"}
            self._moved = dict(self._moves(recorder))
        self.shared = Shared(machine, self._more, self._sequence)
        self._queue: list[tuple[float, int, Warp]] = []
        self._order = 0
        self._places: list[tuple[Place, list[Sm]]] = []
        self.warps: list[Warp] = []
        self.sms: list[Sm] = []
        self._l1_bytes = l1_bytes
        self._next: dict[int, Iterator[tuple[int, ...]]] = {}
        self._place_of: dict[int, int] = {}
        self._cluster_of: dict[int, tuple[int, ...]] = {}
        self._still: Counter[tuple[int, ...]] = Counter()
        self.events, self.unmatched = 0, 0
        self.ends: dict[int, float] = {}
        """The cycle at which the last warp of each place has ended."""
        self.flags_given_up = 0

    def _more_from_dram(self) -> float:
        """Returns the factor of the bytes from DRAM to those that the sampled SMs stand for. It is 1 unless sectors are
        fetched again: which SM fetches them is chance, and a few SMs are no fair sample."""
        sectors = self.recorder.sectors
        if not sectors.again:
            return 1.0
        weight = {cta: place.weight for place in self.sample.places for cluster in place.clusters for cta in cluster}
        mine = 0.0
        for (cta, _), visits in self.recorder.visits.items():
            notes = (note for visit in visits for some in visit.happened.values() for note in some)
            mine += weight[cta] * sum(fetched(note) for note in notes)
        return sectors.fetched / mine if mine else 1.0

    # CTAs

    def run(self) -> float:
        """Returns the cycles from the start of the first CTA until all sampled warps have ended and all that they
        stored is written. Raises ``ClockError`` if warps wait for ever."""
        size = len(self.sample.places[0].clusters[0])
        for number, place in enumerate(self.sample.places):
            lines, warm = -(-len(self.code.opcodes) * INSTRUCTION // CODE_LINE), self.recorder.sectors.warm
            sms = [Sm(self.machine, self.shared, place.weight, self._l1_bytes, lines, warm) for _ in range(size)]
            for even, odd in zip(sms[::2], sms[1::2]):
                even.pair = odd.pair = (even, odd)
            self._places.append((place, sms))
            self.sms += sms
            self._next[number] = iter(place.clusters)
            skew = self.machine["launch.cluster_skew" if size > 1 else "launch.cta_skew"]
            begin = skew * place.number / max(1, self.machine.sms // size)
            for k in range(place.together):
                self._start(number, begin + k * self.machine["launch.cta_interval"])
        while self._queue or self._give_up_a_flag():
            time, _, warp = heapq.heappop(self._queue)
            self._go(warp, time)
        stuck = [w for waiting in self._waiting.values() for w in waiting]
        if stuck:
            raise ClockError.of("the replay", got=f"{len(stuck)} warps that wait for ever", expected="an end")
        return max(self.drained, *self.ends.values())

    @property
    def drained(self) -> float:
        """The cycle at which all stores are written; 0 where nothing was stored."""
        return self.shared.drained + self.machine["launch.drain"] if self.shared.drained else 0.0

    def _give_up_a_flag(self) -> bool:
        """Lets the warps go on that wait for one flag, when nothing else can happen: the replay raises the flag later
        than the functional run did. Returns whether there were any."""
        key = next((k for k, waiting in self._waiting.items() if k[1] == FLAG and waiting), None)
        if key is not None:
            self.flags_given_up += 1
            while key not in self._over:
                self._contribute(key, 0.0)
        return key is not None

    def _start(self, number: int, time: float) -> None:
        """Starts the next cluster of a place, if one is left."""
        cluster = next(self._next[number], None)
        if cluster is None:
            return
        _, sms = self._places[number]
        for rank, cta in enumerate(cluster):
            self._place_of[cta], self._cluster_of[cta] = number, cluster
            for w in self._warps_of(cta):
                if (cta, w) not in self._programs:
                    self._programs[cta, w] = self._program(self.recorder.visits[cta, w])
                warp = Warp(len(self.warps), cta, w, sms[rank], self._programs[cta, w])
                warp.begin, warp.ready = time, time + self.machine["launch.constants"]
                self.warps.append(warp)
                self._still[cluster] += 1
                self._push(warp.ready, warp)

    def _moves(self, recorder: Recorder) -> Iterator[tuple[int, int]]:
        """Yields (PTX instruction, holder) for instructions whose SASS lies in another holder than their block's."""
        index = {id(i): n for n, i in enumerate(recorder.kernel.source.code)}
        for b in recorder.kernel.blocks:
            holder = self.code.holders[self.code.leads[b.index]]
            mine = {step.source for step in self._lists[holder] if step.kind != "plain"}
            for i, _ in b.code:
                n = index[id(i)]
                if n in self._made and n not in mine:
                    yield n, self._made[n]

    def _warps_of(self, cta: int) -> list[int]:
        out, w = [], 0
        while (cta, w) in self.recorder.visits:
            out.append(w)
            w += 1
        return out

    def _program(self, visits: list[Visit]) -> Program:
        """Returns the program of a warp."""
        leads, holders, passes = self.code.leads, self.code.holders, self.code.passes
        visits = self._looked_once(visits)
        self.events += sum(len(what) for visit in visits for what in visit.happened.values())
        out: Program = []
        latest: dict[int, Happened] = {}
        sunk: dict[int, Happened] = {}  # of instructions that ptxas has moved to a block that runs later
        before, count = -1, 0
        for visit in visits:
            lead = leads[visit.block]
            holder = holders[lead]
            if visit.block == holder:
                again = lead == before and count % passes[lead]
                count = count + 1 if lead == before else 1
                new = not again
            else:
                new = holder not in latest
            if new:
                latest[holder] = sunk.pop(holder, {})
                out.append((self._lists[holder], latest[holder]))
            before = lead
            for key, what in visit.happened.items():
                host = self._moved.get(key[0], holder)
                if host != holder and (host not in latest or key in latest[host]):
                    sunk.setdefault(host, {}).setdefault(key, []).extend(what)
                else:
                    latest[host].setdefault(key, []).extend(what)
        for left in sunk.values():
            for key, what in left.items():
                out[-1][1].setdefault(key, []).extend(what)
        return out

    def _looked_once(self, visits: list[Visit]) -> list[Visit]:
        """Returns ``visits`` with only the last pass of each loop that polls memory: how often the functional run
        polled says nothing of time. The last poll waits for the store that it sees (``Effects``)."""
        polls = self.recorder.polls
        out: list[Visit] = []
        for visit in visits:
            if polls[visit.block] == visit.block:
                while out and polls[out[-1].block] == visit.block:
                    out.pop()
            out.append(visit)
        return out

    def _push(self, time: float, warp: Warp) -> None:
        self._order += 1
        heapq.heappush(self._queue, (time, self._order, warp))

    # issue

    def _go(self, warp: Warp, time: float) -> None:
        """Lets a warp issue from ``time`` on, until it is parked, ends, or another warp comes before it."""
        queue = self._queue
        while True:
            part, index = warp.at
            if part >= len(warp.program):
                self._finish(warp, max(time, warp.ready))
                return
            steps, happened = warp.program[part]
            if index >= len(steps):
                self._left_over(warp, happened)
                warp.at = (part + 1, 0)
                warp.used.clear()
                if steps:
                    warp.after = steps[-1].slot.address + INSTRUCTION
                continue
            step = steps[index]
            if step.line != warp.line or not index:
                self._fetch(warp, step, index)
            ready = warp.ready
            begin, reason = ready, "issue"
            if step.constant >= 0:
                begin, reason = warp.sm.parameter(step.constant, ready), "constants"
            for board in step.waits:
                if warp.boards[board] > begin:
                    begin, reason = warp.boards[board], warp.reasons[board]
            sm, sub = warp.sm, warp.sub
            free = sm.free[sub]
            pipes = sm.pipes[sub]
            actual = begin if begin > free else free
            pipe = step.pipe if pipes[step.pipe] <= pipes[step.other] else step.other
            if pipes[pipe] > actual:
                actual = pipes[pipe]
            if queue and actual > queue[0][0] and actual > time:
                self._push(actual, warp)
                return
            if actual > ready:
                if begin > ready:
                    self.lose(warp, ready, begin, reason, step)
                if actual > begin:  # another warp is issuing, then the pipe is busy
                    turn = begin if free < begin else free
                    self.lost[step.slot.address, "issue"] += sm.weight * (turn - begin)
                    self.lost[step.slot.address, "pipe"] += sm.weight * (actual - turn)
            sm.free[sub] = actual + 1.0
            pipes[pipe] = actual + step.interval
            sm.issued += 1
            warp.at = (part, index + 1)
            warp.ready = actual + step.stall
            if step.kind == "plain":
                if step.releases != NO_SCOREBOARD:
                    self.release(warp, step, actual + step.latency, PIPES[step.pipe])
            else:
                what = self._what(warp, step, happened)
                if self._handlers[step.kind](warp, step, what, actual) is None:
                    return  # parked
            time = warp.ready
            if queue and queue[0][0] < time:
                self._push(time, warp)
                return

    def _fetch(self, warp: Warp, step: Step, index: int) -> None:
        """Holds the warp until the line of the instruction is there, and longer behind a branch that was taken."""
        until = warp.ready
        if not index and step.slot.address != warp.after:
            until += self.machine["branch.taken"]
            warp.after = step.slot.address
        until = warp.sm.fetch(step.line, until)
        warp.line = step.line
        self._hold(warp, until, warp.ready, "fetch", step)

    def _what(self, warp: Warp, step: Step, happened: Happened) -> Any:
        """Returns the first note of this instruction that the visit has not used yet, None if there is none."""
        for kind in NOTES[step.kind]:
            key = (step.source, kind)
            notes = happened.get(key)
            if notes and step.kind == "far" and not warp.used[key]:  # each lane's store has a note
                warp.used[key] = len(notes)
                return Copy(False, 0, 0.0, 0, tuple(told for what in notes for told in what.keys))
            if notes and warp.used[key] < len(notes):
                warp.used[key] += 1
                return notes[warp.used[key] - 1]
        return None

    def _left_over(self, warp: Warp, happened: Happened) -> None:
        """Accounts for notes that the issued SASS has not used. Arrivals, copies and stores of flags count now, as
        others wait for them. Accesses without a SASS instruction are no loss: ptxas has left them out, or merged them.
        """
        for key, notes in happened.items():
            for what in notes[warp.used[key] :]:
                self.unmatched += key[0] in self._made or not isinstance(what, (Passes, Request))
                tells = isinstance(what, (Arrive, Commit, Copy)) or (isinstance(what, Request) and what.kind != "load")
                for told in (what.key,) if isinstance(what, Bar) else what.keys if tells else ():
                    self._contribute(told, warp.ready)

    def _finish(self, warp: Warp, time: float) -> None:
        cluster, number = self._cluster_of[warp.cta], self._place_of[warp.cta]
        self._still[cluster] -= 1
        if not self._still[cluster]:
            time = max(sm.leave(time) for sm in self._places[number][1])
            self._start(number, time + self.machine["launch.cta_gap"])
        self.ends[number] = max(self.ends.get(number, 0.0), time)
