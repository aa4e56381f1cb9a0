"""The effects of instructions with a variable latency: what they do to the queues, and which events release a warp."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from cute_nvfp4.sim.clock.flags import Key
from cute_nvfp4.sim.clock.machine import Machine
from cute_nvfp4.sim.clock.notes import Arrive, Await, Bar, Commit, Copy, Passes, Product, Request, Transfer
from cute_nvfp4.sim.clock.sass import NO_SCOREBOARD
from cute_nvfp4.sim.clock.steps import REASONS, Step
from cute_nvfp4.sim.clock.warps import WORTH_SHOWING, Warp
from cute_nvfp4.sim.observe.timing import Wait

NOTES = {
    **{"shared": (Passes,), "load": (Request, Passes), "store": (Request, Passes), "atomic": (Request, Passes)},
    **{
        "copy": (Request,),
        "barrier": (Bar,),
        "mbarrier": (Arrive, Await),
        "bulk": (Copy,),
        "far": (Copy,),
        "cluster_arrive": (Bar,),
    },
    **{"cluster_wait": (Await,), "copies_end": (), "copies_wait": (), "wgmma": (), "wgmma_wait": (), "fence": ()},
    **{"product": (Product,), "transfer": (Transfer,), "commit": (Commit,), "tensor_memory": ()},
}
"""The kinds of notes that may belong to a step of each kind."""


def product(what: Product, machine: Machine) -> tuple[float, float]:
    """Returns the cycles for which a tcgen05.mma keeps the tensor core of each of its CTAs busy, and the cycles until
    its result is there. Its operands have 32 bytes a row. The tensor core is busy for the slower of multiplying, and of
    reading A and B from shared memory (each CTA of a pair reads half of B)."""
    rows = what.m // what.ctas
    size = f"{what.ctas}_{64 if rows <= 64 else 128}"
    read = (rows * (what.a == "shared") + what.n // what.ctas) * 32 / machine["tcgen05.shared_bytes_per_cycle"]
    latency = machine[f"tcgen05.latency_{size}"] - (what.a == "tensor") * machine["tcgen05.latency_less_tensor"]
    multiply = machine[f"tcgen05.column_{size}"] * what.n
    return max(multiply, read), latency + multiply


def _width(opcode: str) -> int:
    """Returns the bytes that a lane stores."""
    return next((int(word) // 8 for word in opcode.split(".") if word in ("64", "128")), 4)


def in_short(reason: str) -> str:
    """Returns a reason without what ended the wait: "mbarrier" for "mbarrier: copies"."""
    return reason.partition(":")[0]


class Effects:
    """The queues and events of a replay. Each kind of step has a method (``_load`` for "load"), which gets the warp,
    the step, the step's note, and the cycle of its issue. It returns None where it parks the warp."""

    machine: Machine

    def __init__(self, expected: Counter[Key]) -> None:
        self._left = Counter(expected)
        self._when: dict[Key, float] = defaultdict(float)
        self._by: dict[Key, str] = {}  # what contributed last
        self._over: dict[Key, float] = {}
        self._barriers: dict[Key, float] = defaultdict(float)
        self._waiting: dict[Key, list[Warp]] = defaultdict(list)
        self.lost: Counter[tuple[int, str]] = Counter()
        """Cycles of waits, weighted like the warps' SMs, by the waiting instruction's address and the reason."""
        self._handlers = {kind: getattr(self, f"_{kind}") for kind in NOTES}

    def _push(self, time: float, warp: Warp) -> None:
        raise NotImplementedError

    def lose(self, warp: Warp, begin: float, end: float, reason: str, step: Step) -> None:
        """Counts a wait of the warp at ``step``."""
        self.lost[step.slot.address, reason] += warp.sm.weight * (end - begin)
        if end - begin >= WORTH_SHOWING:
            warp.waits.append(Wait(begin, end, in_short(reason), step.source))

    def release(self, warp: Warp, step: Step, time: float, reason: str) -> None:
        """Releases the scoreboards of ``step`` at ``time``. ``reason`` is that of the warp's later waits for them."""
        for board in (step.releases, step.reads):
            if board != NO_SCOREBOARD and time > warp.boards[board]:
                warp.boards[board], warp.reasons[board] = time, REASONS.get(reason, reason)

    def _shared(self, warp: Warp, step: Step, what: Passes | None, time: float) -> float:
        passes = 1.0
        if what is not None:
            passes = what.ideal + self.machine["shared.conflict_passes"] * (what.passes - what.ideal)
        done = warp.sm.port.passes(time, passes)
        self.release(warp, step, done + step.latency, "shared")
        return done

    def _load(self, warp: Warp, step: Step, what: Any, time: float) -> float | None:
        if isinstance(what, Passes):
            return self._shared(warp, step, what, time)
        if what is None:
            return time
        answer = warp.sm.port.load(time, what)
        self.release(warp, step, answer.time, answer.by)
        if what.keys and self._left[what.keys[0]] + (
            what.keys[0] in self._over
        ):  # polls until the flag's store is there, and sees it one poll later
            return self._await(warp, what.keys[0], time, step, "l2.latency_50", "flag")
        return time

    def _store(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        if isinstance(what, Request):
            warp.stored = warp.sm.port.store(time, what)
            self.release(warp, step, warp.stored, "l1")
            self._raise(what, warp.stored)
        elif what is not None:
            return self._shared(warp, step, what, time)
        return time

    def _atomic(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        if isinstance(what, Request):
            answer = warp.sm.port.atomic(time, what)
            self.release(warp, step, answer.time + self.machine["atomic.latency"], "atomic")
            self._raise(what, answer.time)
        return time

    def _raise(self, what: Request, time: float) -> None:
        """Contributes a store of flags to the loads that wait for it."""
        for key in what.keys:
            self._contribute(key, time)

    def _copy(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        if isinstance(what, Request):
            answer = warp.sm.port.load(time, what)
            warp.open = max(warp.open, answer.time)
            self.release(warp, step, time + self.machine["l1.cycles_per_request"], "l1")
        return time

    def _copies_end(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        warp.groups.append(warp.open)
        warp.open = 0.0
        return time

    def _copies_wait(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        left = int(step.slot.operands.split(",")[1].strip(), 0) if "," in step.slot.operands else 0
        gone = warp.groups[: len(warp.groups) - left] if left else warp.groups
        if gone:
            self._hold(warp, max(gone), time, "copies", step)
            warp.groups = warp.groups[len(gone) :]
        return time

    def _hold(self, warp: Warp, until: float, time: float, reason: str, step: Step) -> None:
        """Lets the warp issue nothing more before ``until``."""
        if until > warp.ready:
            self.lose(warp, warp.ready, until, reason, step)
            warp.ready = until

    def _barrier(self, warp: Warp, step: Step, what: Bar | None, time: float) -> float | None:
        if what is None:
            return time
        done = self._barriers[what.key] = max(self._barriers[what.key], time) + self.machine["barrier.interval"]
        self._contribute(what.key, done)
        return time if "ARV" in step.slot.opcode else self._await(warp, what.key, time, step, "barrier.wake", "barrier")

    def _mbarrier(self, warp: Warp, step: Step, what: Any, time: float) -> float | None:
        self.release(warp, step, time + self.machine["mbarrier.latency"], "mbarrier")
        if isinstance(what, Arrive):
            for key in what.keys:
                far = key[0] != warp.cta
                self._contribute(key, time + self.machine["mbarrier.remote" if far else "mbarrier.arrive"])
        if isinstance(what, Await) and what.key is not None:
            return self._await(warp, what.key, time, step, "mbarrier.wake", "mbarrier")
        return time

    def _cluster_arrive(self, warp: Warp, step: Step, what: Bar | None, time: float) -> float:
        if what is not None:
            self._contribute(what.key, time)
        return time

    def _cluster_wait(self, warp: Warp, step: Step, what: Await | None, time: float) -> float | None:
        if what is None:
            return time
        return self._await(warp, what.key, time, step, "cluster.barrier", "cluster")

    def _bulk(self, warp: Warp, step: Step, what: Copy | None, time: float) -> float:
        if what is None:
            return time
        warp.ready = max(warp.ready, time + self.machine["tma.interval"])  # other warps of its scheduler go on
        tensor = step.source if step.slot.base == "UTMALDG" else 0
        answer = warp.sm.port.copy(time + self.machine["tma.issue"], what, tensor)
        for key in what.keys:
            self._contribute(key, answer.time, "copies")
        if what.store:
            warp.open = max(warp.open, answer.time)
        return time

    def _far(self, warp: Warp, step: Step, what: Copy | None, time: float) -> float:
        """Sends a warp's st.async to the shared memory of another CTA, where an mbarrier counts the bytes."""
        keys = what.keys if what is not None else ()
        there = warp.sm.port.send(time, len(keys) * _width(step.slot.opcode)) + self.machine["mbarrier.remote"]
        for key in keys:
            self._contribute(key, there)
        return time

    def _wgmma(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        begin = max(time, warp.sm.tensor[warp.sub])
        warp.sm.tensor[warp.sub] = begin + step.interval
        warp.open = max(warp.open, begin + step.latency)
        if "gsb0" in step.slot.operands:
            warp.tensor.append(warp.open)
            warp.open = 0.0
        return time

    def _wgmma_wait(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        left = int(step.slot.operands.split(",")[1].strip(), 0)
        gone = warp.tensor[: len(warp.tensor) - left] if left else warp.tensor
        if gone:
            self._hold(warp, max(gone), time, "tensor", step)
            warp.tensor = warp.tensor[len(gone) :]
        return time

    def _product(self, warp: Warp, step: Step, what: Product | None, time: float) -> float:
        """Issues a tcgen05.mma, which the tensor cores of its CTAs execute after all that was issued before."""
        if what is not None:
            self._take_turn(warp, what.ctas, time, *product(what, self.machine))
        return time

    def _transfer(self, warp: Warp, step: Step, what: Transfer | None, time: float) -> float:
        """Issues a tcgen05.cp or .shift. It takes its turn among the products, since later ones need its data."""
        if what is not None:
            busy = what.size / self.machine["tcgen05.copy_bytes_per_cycle"]
            self._take_turn(warp, what.ctas, time, busy, busy)
        return time

    def _take_turn(self, warp: Warp, ctas: int, time: float, busy: float, latency: float) -> None:
        sms = warp.sm.pair if ctas == 2 else (warp.sm,)
        begin = max(time, *(sm.tensor_free for sm in sms))
        for sm in sms:
            sm.tensor_free = begin + busy
            sm.tensor_busy += busy
        warp.sm.tensor_done = max(warp.sm.tensor_done, begin + latency)

    def _commit(self, warp: Warp, step: Step, what: Commit | None, time: float) -> float:
        done = max(time, warp.sm.tensor_done) + self.machine["tcgen05.commit"]
        for key in what.keys if what is not None else ():
            far = key[0] != warp.cta
            self._contribute(key, done + self.machine["mbarrier.remote"] if far else done, "tensor")
        return time

    def _tensor_memory(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        """Issues a tcgen05.ld or .st, which moves one column of the warp's 32 lanes of tensor memory at a time."""
        begin = max(time, warp.sm.tensor[warp.sub])
        warp.sm.tensor[warp.sub] = begin + step.interval
        self.release(warp, step, begin + step.interval + step.latency, "tensor memory")
        return time

    def _fence(self, warp: Warp, step: Step, what: Any, time: float) -> float:
        """Holds the warp; at a fence of GPU or system scope, until L2 has answered the warp's stores."""
        gpu = "GPU" in step.slot.opcode or "SYS" in step.slot.opcode
        until = warp.stored + self.machine["fence.gpu"] if gpu else 0.0
        self._hold(warp, max(until, time + self.machine["fence.cta"]), time, "fence", step)
        return time

    # events

    def _contribute(self, key: Key, time: float, by: str = "") -> None:
        """Counts one of the contributions that event ``key`` expects. ``time`` is its cycle, and ``by`` is "copies",
        "tensor", or "" for a thread. The last contribution wakes the warps that wait."""
        self._left[key] -= 1
        if time >= self._when[key]:
            self._when[key], self._by[key] = time, by
        if not self._left[key]:
            self._over[key] = self._when.pop(key)
            for warp in self._waiting.pop(key, ()):
                self._wake(warp, key)

    def _await(self, warp: Warp, key: Key, time: float, step: Step, figure: str, reason: str) -> float | None:
        """Lets the warp go on after event ``key``, later by the machine's ``figure``. Returns None if the time of the
        event is not known yet."""
        warp.reason = reason
        warp.happened = (figure, step)
        if key in self._over:
            self._resume(warp, key)
            return time
        self._waiting[key].append(warp)
        return None

    def _resume(self, warp: Warp, key: Key) -> None:
        figure, step = warp.happened
        by = self._by.get(key) if warp.reason == "mbarrier" else ""
        reason = f"{warp.reason}: {by}" if by else warp.reason
        self._hold(warp, self._over[key] + self.machine[figure], warp.ready, reason, step)

    def _wake(self, warp: Warp, key: Key) -> None:
        self._resume(warp, key)
        self._push(warp.ready, warp)
