"""The order of cases: streams of cases, one for each family, architecture and part, mixed at random."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.long.family import Family
from tests.long.ledger import Ledger


@dataclass(frozen=True)
class Work:
    """A case of a stream; without text, the request to list the stream's cases. seen: kernels with which the case has
    passed. seconds: its CPU time then; a guess for a case that never ran."""

    stream: Stream
    text: str
    seen: tuple[str, ...] = ()
    seconds: float = 1.0


@dataclass(eq=False)
class Stream:
    """Cases of one family, architecture and part: first those that failed last time, then those missing in the ledger,
    then those that the ledger has with other sources.

    left: how many random cases are still to be drawn, or the cases of a list, once a worker has listed them.
    """

    family: Family
    arch: str
    part: str
    seed: int
    again: list[Work] = field(default_factory=list)
    left: int = 0
    drawn: int = 0
    listed: list[str] | None = None
    asked: bool = False
    known: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.family.name} {self.arch} {self.part}".rstrip()

    @property
    def waits(self) -> bool:
        """Whether a worker is listing the stream's cases."""
        return self.family.every is not None and self.asked and self.listed is None

    def next(self) -> Work | None:
        """The next case; None if none is left."""
        if self.family.every is not None and not self.asked:
            self.asked = True
            return Work(self, "")
        if self.failed:
            return Work(self, self.failed.pop())
        if self.family.draw is not None and self.left > 0:
            self.left -= 1
            return Work(self, self._draw())
        if self.listed:
            return Work(self, self.listed.pop())
        return self.again.pop() if self.again else None

    def _draw(self) -> str:
        """Draws a case that the ledger lacks."""
        while True:
            self.drawn += 1
            generator = np.random.default_rng([self.seed, zlib.crc32(self.name.encode()), self.drawn])
            text = self.family.text(self.family.draw(generator, self.arch))
            if text not in self.known:
                return text

    def take_list(self, cases: Iterable[tuple[str, str]]) -> list[str]:
        """Takes the listed cases and what each stands for. It keeps those for which the ledger has no record, in a
        random order. Returns those that failed and are no longer listed."""
        there, failed = dict(cases), self.failed
        self.failed = [text for text in failed if text in there]
        done = {*self.known, *(there[text] for text in self.failed)}
        new = [text for text, stands_for in there.items() if stands_for not in done]
        order = np.random.default_rng([self.seed, zlib.crc32(self.name.encode())]).permutation(len(new))
        self.listed = [new[i] for i in order]
        return [text for text in failed if text not in there]


def streams(
    families: Iterable[Family],
    ledger: Ledger,
    seed: int,
    archs: Iterable[str] = (),
    again: bool = False,
    new: bool = False,
    known: bool = False,
) -> list[Stream]:
    """One stream for each part of each family on each architecture. again: ignores earlier runs. new: skips cases that
    passed with other sources. known: only cases that passed with this simulator."""
    found = []
    wanted = set(archs)
    for family in families:
        for arch in family.archs:
            if wanted and arch not in wanted:
                continue
            found += [Stream(family, arch, part, seed, left=family.goal) for part in family.parts(arch)]
    if not again:
        for stream in found:
            _resume(stream, ledger)
            if new:
                stream.again.clear()
            if known:
                stream.again = [work for work in stream.again if work.seen]
                stream.left, stream.failed = 0, []
                # no worker lists the other cases
                stream.asked, stream.listed = True, []
    return found


def _resume(stream: Stream, ledger: Ledger) -> None:
    """Takes over the ledger's records of the stream."""
    family = stream.family
    for record in ledger.records.values():
        if (record.family, record.arch) != (family.name, stream.arch) or record.outcome == "gone":
            continue
        if stream.part and stream.part != family.part_of(record.case):
            continue
        stream.left -= 1
        if record.outcome != "passed":
            stream.failed.append(record.case)
        if record.outcome == "passed" or family.every is None:
            stream.known.add(family.stands_for(record.case))
        if record.outcome == "passed" and (record.simulator, record.sources) != (now := family.state(stream.arch)):
            # a case that passed with another simulator runs again, whatever its PTX
            seen = record.kernels if record.simulator == now[0] else ()
            stream.again.append(Work(stream, record.case, seen, record.seconds))


def cheapest(every: list[Stream], seed: int) -> Iterator[Work | None]:
    """Yields work of the kind of cases that has had the least time so far; within a kind the cheapest first, and last
    the cases that ran with this simulator. Yields None where all that is left waits for a list."""
    spent: dict[tuple[str, str], float] = {(s.family.name, s.arch): 0.0 for s in every}
    mine, live = dict.fromkeys(every, 0.0), list(every)
    for stream in every:
        stream.again.sort(key=lambda work: (not work.seen, -work.seconds))
    while live:
        ready = [stream for stream in live if not stream.waits]
        if not ready:
            yield None
            continue
        stream = min(ready, key=lambda s: (spent[s.family.name, s.arch], mine[s]))
        work = stream.next()
        if work is None:
            live.remove(stream)
            continue
        spent[stream.family.name, stream.arch] += work.seconds
        mine[stream] += work.seconds
        yield work


def mixed(every: list[Stream], seed: int) -> Iterator[Work | None]:
    """Yields the streams' work in a random order by the families' weights, but failures first. Yields None where all
    that is left waits for a list."""
    generator, live = np.random.default_rng(seed), list(every)
    shares = {s.family.name: sum(t.family is s.family for t in every) for s in every}
    while live:
        ready = [stream for stream in live if not stream.waits]
        if not ready:
            yield None
            continue
        ready = [stream for stream in ready if stream.failed] or ready
        weights = np.array([s.family.weight / shares[s.family.name] for s in ready])
        stream = ready[generator.choice(len(ready), p=weights / weights.sum())]
        work = stream.next()
        if work is None:
            live.remove(stream)
        else:
            yield work
