"""The vectorised race detection against a slow one: dictionaries of clocks, and every access ever made to each byte."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.clocks import Clocks
from cute_nvfp4.sim.checks.shadow import Actor
from cute_nvfp4.sim.checks.spaces import SharedShadow

CTAS, WARPS, CLUSTER, SLOTS, BYTES = 2, 2, 2, 2, 32
ALL = CTAS * WARPS
KINDS = ("thread", "init", "tensor", "bulk_read")


class Found(Exception):
    pass


@dataclass(eq=False)
class Access:
    """One access to one byte: of ``who`` (a component) at ``clock``; ``before`` are the accesses it comes after."""

    who: tuple
    clock: int
    lane: int
    write: bool
    strong: bool
    generic: bool
    before: set = field(default_factory=set)


class Slow:
    """Happens-before by the book: a dictionary of clocks a warp, one for each proxy."""

    def __init__(self) -> None:
        self.know = [({}, {}) for _ in range(ALL)]
        self.now, self.pipe, self.group = [2] * ALL, [1] * ALL, [1] * ALL
        self.gather, self.ended, self.phase = {}, {}, {}
        self.named, self.cluster = {}, {}
        self.bytes = [[[] for _ in range(BYTES)] for _ in range(CTAS)]

    def full(self, w: int) -> tuple[dict, dict]:
        """What warp ``w`` releases: all it knows, and its own clock."""
        return {**self.know[w][0], ("thread", w): self.now[w]}, dict(self.know[w][1])

    @staticmethod
    def join(into: tuple[dict, dict], more: tuple[dict, dict]) -> None:
        for a, b in zip(into, more):
            for k, v in b.items():
                a[k] = max(a.get(k, 0), v)

    def release(self, w: int, into: tuple[dict, dict]) -> None:
        self.join(into, self.full(w))
        self.now[w] += 1

    def access(self, w: int, lane: int, cta: int, span: range, write, strong, agent, clock, proxy):
        """(hazards, accesses to note) of an access by warp ``w`` on behalf of ``agent`` (None: the thread itself)."""
        hazards, new = set(), []
        for byte in span:
            history = self.bytes[cta][byte]
            known = {a for a in history if self._knows(w, lane, agent, a)}
            for a in list(known):
                known |= a.before
            writes = [a for a in history if a.write]
            if not write and not writes:
                hazards.add("uninitialized")
            for a in history:
                if (a.write or write) and a not in known and not (a.strong and strong):
                    hazards.add("race")
            for last in (a for a in writes if proxy and not any(a in b.before for b in writes)):
                if last.generic and last.clock > self.know[w][1].get(last.who, 0):
                    hazards.add("proxy")
            who = ("thread", w) if agent is None else agent
            one = Access(who, self.now[w] if agent is None else clock, lane, write, strong, agent is None, known)
            new.append((history, one))
        return hazards, new

    def _knows(self, w: int, lane: int, agent, a: Access) -> bool:
        if a.clock <= self.know[w][0].get(a.who, 0):
            return True
        if agent is not None and a.who == agent and agent[0] == "tensor":
            return True
        return a.who == ("thread", w) and a.lane == lane


class Both:
    """Runs every event through both."""

    def __init__(self, grain: int) -> None:
        self.grain = grain
        self.slow = Slow()
        self.fast = Clocks(ALL, WARPS, CLUSTER, KINDS, SLOTS)
        self.shadow = SharedShadow(CTAS, BYTES, grain, self.report)
        self.kind, self.tried = "", 0

    def report(self, size, kind, who, index, bad, epochs) -> None:
        self.kind = {"uninitialized": "uninitialized", "proxy": "proxy"}.get(kind, "race")
        raise Found

    def actor(self, w: int, lane: int, component: int, clock: int, strong: bool, proxy: bool, own=()) -> Actor:
        one = np.array([w])
        c = self.fast
        epoch = ep.pack(1, component, clock, lane if component == c.component("thread", one)[0] else ep.MANY, strong)
        return Actor(
            c, None, np.atleast_1d(epoch)[:, None], c.base(one)[:, None], one[:, None],
            c.component("thread", one)[:, None], lane=np.array([[lane]]), own=own, strong=strong, proxy=proxy,
            distinct=False,
        )  # fmt: skip

    def access(self, w, lane, cta, first, width, write, strong=False, agent=None, careful=False) -> None:
        """With ``careful`` an access that is a hazard is only tried, so that the history goes on."""
        slow, c, one = self.slow, self.fast, np.array([w])
        component, clock, proxy, own = int(c.component("thread", one)[0]), slow.now[w], agent is not None, ()
        if agent is not None and agent[0] == "bar":
            slot = agent[2]
            component = c.first_barrier + int(c.barrier(np.array([agent[1]]), np.array([slot]))[0])
            clock = slow.phase.get(agent[1:], 0) + 1
        elif agent is not None:
            kind = agent[0]
            component, clock = int(c.component(kind, one)[0]), (slow.pipe if kind == "tensor" else slow.group)[w]
            own = (np.array([[component]]),) if kind == "tensor" else ()
        who = self.actor(w, lane, component, clock, strong, proxy, own)
        at = np.array([[cta * BYTES + first]])
        span = range(first, first + width)
        want, new = slow.access(w, lane, cta, span, write, strong, agent, clock, proxy)
        if want and careful:
            self.tried += 1
            with pytest.raises(Found):
                self.do(copy.deepcopy(self.shadow, {id(self): self}), at, width, who, write)
            assert self.kind in want, (self.kind, want)
            return
        for history, access in new:
            history.append(access)
        try:
            self.do(self.shadow, at, width, who, write)
        except Found:
            assert self.kind in want, (self.kind, want)
            raise
        assert not want, want

    @staticmethod
    def do(shadow: SharedShadow, at: np.ndarray, width: int, who: Actor, write: bool) -> None:
        if width >= 16:
            shadow.whole(at // 16, who, write)
        else:
            shadow.part(at, width, who, write)


def step(rng: random.Random, both: Both) -> str:
    """One random event; most of them synchronise, so that histories grow."""
    slow, fast = both.slow, both.fast
    w = rng.randrange(ALL)
    one, cta = np.array([w]), w // WARPS
    peer = cta // CLUSTER * CLUSTER + rng.randrange(CLUSTER)
    near = rng.random() < 0.7
    slot = rng.randrange(SLOTS)
    kind, careful = rng.choice(EVENTS), rng.random() < 0.97
    if kind in ("read", "write", "atomic"):
        width = rng.choice([x for x in (1, 4, 16) if x >= both.grain])
        first = rng.randrange((4 if near and width < 16 else BYTES) // min(width, 4)) * min(width, 4)
        first -= first % width
        both.access(
            w, rng.randrange(2), 0 if near else peer, first, width, kind != "read", kind == "atomic", careful=careful
        )
    elif kind in ("tma", "tensor_read", "tensor_write", "bulk"):
        agent = {"tma": ("bar", peer, slot), "bulk": ("bulk_read", w)}.get(kind, ("tensor", w))
        unit, write = rng.randrange(BYTES // 16) * 16, kind in ("tma", "tensor_write")
        both.access(w, 0, peer, unit, 16, write, agent=agent, careful=careful)
    elif kind == "meet":
        fast.meet(one)
        slow.know[w][0]["thread", w] = slow.now[w]
        slow.now[w] += 1
    elif kind == "barrier":
        warps = np.array([cta * WARPS + j for j in range(WARPS)])
        waits = rng.sample(warps.tolist(), rng.randrange(1, WARPS + 1))
        fast.named_arrive(warps, np.full(WARPS, 3))
        fast.named_open(np.array(sorted(waits)), np.full(len(waits), 3))
        fast.named_end(np.array([cta]), np.array([3]))
        joined: tuple[dict, dict] = ({}, {})
        for x in warps.tolist():
            slow.release(x, joined)
        for x in waits:
            slow.join(slow.know[x], joined)
    elif kind == "cluster":
        warps = np.arange(ALL)[np.arange(ALL) // (WARPS * CLUSTER) == cta // CLUSTER]
        parity = np.full(len(warps), rng.randrange(2))
        fast.cluster_arrive(warps, parity, True)
        fast.cluster_wait(warps, parity)
        held = slow.cluster.setdefault((cta // CLUSTER, int(parity[0])), ({}, {}))
        for x in warps.tolist():
            slow.release(x, held)
        for x in warps.tolist():
            slow.join(slow.know[x], held)
    elif kind == "arrive":
        fast.gather(fast.release(one), np.array([peer]), np.array([slot]))
        slow.release(w, slow.gather.setdefault((peer, slot), ({}, {})))
    elif kind == "end":
        phase = slow.phase[peer, slot] = slow.phase.get((peer, slot), 0) + 1
        fast.end_phase(np.array([peer]), np.array([slot]), np.array([phase]))
        held = slow.gather.setdefault((peer, slot), ({}, {}))
        slow.join(held, ({("bar", peer, slot): phase}, {}))
        slow.ended[peer, slot] = tuple(dict(x) for x in held)
    elif kind == "pass":
        fast.pass_phase(one, np.array([peer]), np.array([slot]))
        slow.join(slow.know[w], slow.ended.get((peer, slot), ({}, {})))
    elif kind == "fence":
        fast.fence_async(one)
        slow.know[w][1].update(slow.full(w)[0])
        slow.now[w] += 1
    elif kind == "commit":
        component = fast.component("tensor", one)
        rows = fast.known[one].copy()
        rows[:, :, component] = fast.open["tensor"][one]
        fast.gather(rows, np.array([peer]), np.array([slot]))
        fast.commit("tensor", one)
        held = slow.gather.setdefault((peer, slot), ({}, {}))
        slow.join(held, (slow.know[w][0] | {("tensor", w): slow.pipe[w]}, slow.know[w][1]))
        slow.pipe[w] += 1
    elif kind == "wait_group":
        fast.learn("bulk_read", one, np.array([slow.group[w]]))
        slow.know[w][0]["bulk_read", w] = slow.group[w]
        slow.group[w] += 1
    return kind


EVENTS = [
    *["read"] * 12, *["write"] * 5, *["atomic"] * 5, "tma", "tensor_read", "tensor_write", "bulk", *["meet"] * 3,
    *["barrier"] * 6, *["cluster"] * 6, *["arrive"] * 4, *["end"] * 6, *["pass"] * 6, *["fence"] * 6, *["commit"] * 4,
    *["wait_group"] * 3,
]  # fmt: skip


@pytest.mark.parametrize("grain", [1, 4, 16])
def test_random_histories(grain: int) -> None:
    """Both find the first hazard of a history at the same event, and agree on its kind."""
    lengths, tried = [], 0
    for seed in range(60):
        rng = random.Random(seed)
        both = Both(grain)
        if seed % 2:
            for cta in range(CTAS):
                for unit in range(0, BYTES, 16):
                    both.access(cta * WARPS, 0, cta, unit, 16, True)
            for w in range(0, ALL, WARPS):
                both.fast.fence_async(np.array([w]))
                both.slow.know[w][1].update(both.slow.full(w)[0])
                both.slow.now[w] += 1
        for count in range(400):  # noqa: B007
            try:
                step(rng, both)
            except Found:
                break
        lengths.append(count)
        tried += both.tried
    assert tried > 1200 and np.mean(lengths) > 100, (tried, np.mean(lengths))
