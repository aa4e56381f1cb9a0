"""Exchanges of values between lanes, which can order a load of one lane before a store of another.

shfl, vote, match and redux order no memory accesses: what lanes do before them is not visible after them. But a value
that was sent has been read. A store may depend on a value that came, through one or more exchanges, from a load of
another lane of the warp. Then that load cannot return what the store writes, because the value would come out of thin
air (PTX ISA, "No-Thin-Air": not through chains of dependencies and communication between threads). So the load comes
before the store. No other load and no other store does for this reason.

``flows`` follows values through the code, only when there is a conflict. While the kernel runs, ``Exchanges`` records
when each warp has last executed each exchange, which lanes did, and from which lane each took its value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.checks.shadow import Actor
from cute_nvfp4.sim.checks.state import State
from cute_nvfp4.sim.frontend.flow import registers, successors
from cute_nvfp4.sim.frontend.model import Imm, Instruction, Operand, Reg
from cute_nvfp4.sim.frontend.opcodes import Op
from cute_nvfp4.sim.machine.events import Listener
from cute_nvfp4.sim.machine.kernel import CompiledKernel
from cute_nvfp4.sim.machine.wave import Group
from cute_nvfp4.sim.numerics.lanes import shuffle_source

_EVERYBODY = 0xFFFFFFFF


def is_exchange(i: Instruction) -> bool:
    """Whether an instruction gives lanes the values of other lanes."""
    return i.base in ("shfl", "vote", "match", "redux") and i.guard is None


@lru_cache(maxsize=64)
def sources(kernel: CompiledKernel) -> dict[int, Instruction]:
    """Returns the exchanges in which all lanes take part and which may carry a loaded value, by the block that begins
    with them."""
    loaded = _from_loads(kernel) if any(is_exchange(i) for i in kernel.source.code) else set()
    out = {}
    for block in kernel.blocks:
        if block.code and is_exchange(block.code[0][0]):
            i, op = block.code[0]
            everybody = isinstance(i.operands[-1], Imm) and i.operands[-1].value & _EVERYBODY == _EVERYBODY
            if everybody and not loaded.isdisjoint(registers(i.operands[len(op.dst)])):
                out[block.index] = i
    return out


def _from_loads(kernel: CompiledKernel) -> set[str]:
    """Returns the registers that may hold a value computed from a load of shared memory, anywhere in the kernel."""
    code = [pair for block in kernel.blocks for pair in block.code if pair[1].dst]
    found: set[str] = set()
    before = -1
    while len(found) > before:
        before = len(found)
        for i, op in code:
            split = len(op.dst)
            loads = i.base in ("ld", "ldu", "ldmatrix") and not {"global", "param", "const", "local"} & set(i.mods)
            if loads or not found.isdisjoint(n for o in i.operands[split:] for n in registers(o)):
                found.update(n for o in i.operands[:split] for n in registers(o))
    return found


@dataclass
class _Exchange:
    """The last execution of one exchange by each warp."""

    instruction: Instruction
    clock: np.ndarray  # (warps,) the warp's clock, 0 for no execution
    lanes: np.ndarray  # (warps, 32) the lanes that executed it
    source: np.ndarray | None  # (warps, 32) for shfl: the lane from which each lane took its value

    def reach(self, warp: int, given: np.ndarray) -> np.ndarray:
        """Returns (lanes, lanes) whose values each lane gets, from those that each lane's operand depends on."""
        lanes = self.lanes[warp]
        given = given & lanes[:, None]
        out = given[self.source[warp]] if self.source is not None else np.broadcast_to(given.any(axis=0), (32, 32))
        return out & lanes[:, None]


class Exchanges(Listener):
    """Records the exchanges of one wave; ``at_block`` has them by the block that begins with them."""

    def __init__(self, state: State, at_block: dict[int, Instruction]) -> None:
        self.clocks, self.labels, self.kernel = state.clocks, state.labels, state.wave.run.kernel
        warps = state.wave.warps
        self.at_block = {
            index: _Exchange(
                i,
                np.zeros(warps, np.int32),
                np.zeros((warps, 32), bool),
                np.zeros((warps, 32), np.int8) if i.base == "shfl" else None,
            )
            for index, i in at_block.items()
        }

    def block(self, g: Group, index: int) -> None:
        one = self.at_block.get(index)
        if one is None:
            return
        now = self.clocks.now
        one.clock[g.warps] = now[g.warps]
        one.lanes[g.warps] = g.lanes()
        now[g.warps] += 1
        if one.source is not None:
            b, c = (_value(g, o) for o in one.instruction.operands[2:4])
            mode = next(m for m in one.instruction.mods if m in ("up", "down", "bfly", "idx"))
            one.source[g.warps] = shuffle_source(mode, b, c)[0]

    def still_bad(self, who: Actor, bad: np.ndarray, epochs: np.ndarray) -> np.ndarray | None:
        """Returns which of the ``bad`` reads give no value to the store by ``who``, or None if all give one."""
        shape = np.broadcast_shapes(epochs.shape, bad.shape)
        bad = np.broadcast_to(bad, shape).copy()
        component = ep.components(np.ascontiguousarray(epochs), self.clocks.bits)
        component = self.clocks.thread_of(np.broadcast_to(component, shape))
        arrays = (who.thread, who.warps, ep.MANY if who.lane is None else who.lane, epochs)
        thread, warps, lane, epochs = (np.broadcast_to(a, shape) for a in arrays)
        known: dict[tuple[int, int, int], bool] = {}
        for at in zip(*np.nonzero(bad & (component == thread))):
            key = (int(warps[at]), int(lane[at]), int(epochs[at]))
            if key not in known:
                known[key] = self._has_come(who.instruction, *key)
            bad[at] = not known[key]
        return bad if bad.any() else None

    def _has_come(self, store: Instruction, warp: int, lane: int, read: int) -> bool:
        """Whether what ``store`` writes in ``lane`` depends on the value of ``read``, an epoch of the same warp."""
        e = np.array([read], np.uint64)
        load = self.labels.instruction(int(ep.labels(e, self.clocks.bits)[0]))
        after = int(ep.clocks(e)[0])
        edges = flows(self.kernel, id(load))
        reached: dict[int, np.ndarray] = {}
        arrived = np.eye(32, dtype=bool)
        later = [x for x in self.at_block.values() if x.clock[warp] >= after]
        for one in sorted(later, key=lambda x: int(x.clock[warp])):
            given = np.eye(32, dtype=bool) if id(one.instruction) in edges else np.zeros((32, 32), bool)
            for other, matrix in reached.items():
                if id(one.instruction) in flows(self.kernel, other):
                    given = given | matrix
            if given.any():
                reached[id(one.instruction)] = one.reach(warp, given)
        for other, matrix in reached.items():
            if id(store) in flows(self.kernel, other):
                arrived |= matrix
        writers = slice(None) if lane >= ep.MANY else slice(lane, lane + 1)
        reader = int(ep.lanes(e)[0])
        readers = slice(None) if reader >= ep.MANY else slice(reader, reader + 1)
        return bool(arrived[writers, readers].all())


def _value(g: Group, o: Operand) -> np.ndarray:
    if isinstance(o, Imm):
        return np.full((1, 1), o.value & _EVERYBODY, np.uint32)
    return g.regs[g.wave.run.kernel.slots[o.name]] if isinstance(o, Reg) else g.special(o.name)


@lru_cache(maxsize=4096)
def flows(kernel: CompiledKernel, instruction: int) -> frozenset[int]:
    """Returns the identities of the exchanges and stores that use the result of an ``instruction`` (an identity), or
    what is computed from it, before that instruction is executed again."""
    for block in kernel.blocks:
        for at, (i, op) in enumerate(block.code):
            if id(i) == instruction:
                return _forward(kernel, block.index, at, i, op)
    return frozenset()


def _forward(kernel: CompiledKernel, block: int, at: int, start: Instruction, op: Op) -> frozenset[int]:
    first = frozenset(n for o in start.operands[: len(op.dst)] for n in registers(o))
    found: set[int] = set()
    known: dict[int, frozenset[str]] = {}
    todo = [(block, at + 1, first)]
    while todo:
        index, begin, now = todo.pop()
        for i, op in kernel.blocks[index].code[begin:]:
            if i is start:
                break
            now = _after(i, op, now, found)
        else:
            for s in successors(kernel.blocks[index]):
                live = now & kernel.blocks[s].live_in
                if not live <= known.get(s, frozenset()):
                    known[s] = known.get(s, frozenset()) | live
                    todo.append((s, 0, known[s]))
    return frozenset(found)


def _after(i: Instruction, op: Op, now: frozenset[str], found: set[int]) -> frozenset[str]:
    """Returns the registers that depend on the start after ``i``, from those before; adds a use to ``found``."""
    split = len(op.dst)
    used: Any = (n for o in i.operands[split:] for n in registers(o))
    if is_exchange(i):
        if not now.isdisjoint(registers(i.operands[split])):
            found.add(id(i))
        used = ()
    results = frozenset(n for o in i.operands[:split] for n in registers(o))
    uses = not now.isdisjoint(used) or (i.guard is not None and i.guard.name in now)
    if uses and i.base in ("st", "stmatrix"):
        found.add(id(i))
    if uses:
        return now | results
    return now if i.guard is not None else now - results
