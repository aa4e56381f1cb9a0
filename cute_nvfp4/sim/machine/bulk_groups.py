"""Each thread's groups of asynchronous copies (PTX ISA, "cp.async.commit_group", "cp.async.bulk.commit_group").

A copy belongs to the group that its thread commits next. Each thread numbers its groups from 0; ``wait_group N`` waits
for all but the last N groups that the thread has committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.engine import Pending, Wait
from cute_nvfp4.sim.machine.wave import Group, Wave

_NEVER = np.iinfo(np.int64).max
NAMES = {"bulk_group": "bulk copy", "cp_async": "cp.async"}


class CopyGroups:
    """The groups of one kind ("bulk_group" or "cp_async") of every thread of a wave.

    ``committed`` (warps, 32) counts the groups that each thread has committed, which is also the number of its open
    group. ``in_flight`` maps each incomplete operation to the warps, lanes and group numbers (k,) of its copies.
    """

    def __init__(self, wave: Wave, kind: str) -> None:
        self.wave, self.kind = wave, kind
        self.committed = np.zeros((wave.warps, 32), np.int64)
        self.in_flight: dict[Pending, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._watchers: list[tuple[dict[Pending, None], Callable[[], Any]]] = []

    def begin(self, pending: Pending, warps: np.ndarray, lanes: np.ndarray) -> None:
        """Adds ``pending``, which is one copy of each of the threads (warps, lanes) (k,), to their open groups."""
        pending.group = self.committed[warps, lanes]
        self.in_flight[pending] = (warps, lanes, pending.group)

    def finish(self, pending: Pending) -> None:
        """Marks ``pending`` as complete, and makes the calls that ``when_done`` has delayed until then."""
        del self.in_flight[pending]
        for left, _ in self._watchers:
            left.pop(pending, None)
        over = [then for left, then in self._watchers if not left]
        self._watchers = [(left, then) for left, then in self._watchers if left]
        for then in over:
            then()

    def commit(self, warps: np.ndarray, lanes: np.ndarray) -> None:
        """Commits the open groups of the threads ``lanes`` (n, 32) of ``warps`` (n,)."""
        self.committed[warps] += lanes

    def oldest(self) -> np.ndarray:
        """Returns the number of each thread's first incomplete group, (warps, 32), or ``_NEVER`` if it has none."""
        out = np.full(self.committed.shape, _NEVER)
        for warps, lanes, group in self.in_flight.values():
            np.minimum.at(out, (warps, lanes), group)
        return out

    def open_copies(self, warps: np.ndarray, lanes: np.ndarray) -> list[dict[Pending, None]]:
        """Returns the copies in flight of each of the threads (warps, lanes) (k,), in the order of their issue."""
        row = np.full(self.committed.shape, -1)
        row[warps, lanes] = np.arange(len(warps))
        found: list[dict[Pending, None]] = [{} for _ in warps]
        for pending, (w, lane, _) in self.in_flight.items():
            for k in row[w, lane].tolist():
                if k >= 0:
                    found[k][pending] = None
        return found

    def when_done(self, copies: dict[Pending, None], then) -> None:
        """Calls ``then`` when all of ``copies`` are complete, at once if there are none."""
        if copies:
            self._watchers.append((dict(copies), then))
        else:
            then()


def groups(wave: Wave, kind: str) -> CopyGroups:
    """Returns the wave's groups of one kind, and makes them at the first call."""
    if kind not in wave.copy_groups:
        wave.copy_groups[kind] = CopyGroups(wave, kind)
    return wave.copy_groups[kind]


class GroupWait(Wait):
    """The wait of threads until their groups with numbers below ``until`` (n, 32) are complete.

    ``read`` says whether the instruction was wait_group.read; the wait itself is the same.
    """

    def __init__(self, group: Group, instruction: Instruction, kind: str, until: np.ndarray, read: bool) -> None:
        super().__init__(group, instruction)
        self.kind, self.until, self.read = kind, until, read

    def ready(self) -> np.ndarray:
        over = groups(self.group.wave, self.kind).oldest()[self.group.warps] >= self.until
        return (over | ~self.group.lanes()).all(axis=1)

    def part(self, rows: np.ndarray, group: Group) -> GroupWait:
        return GroupWait(group, self.instruction, self.kind, self.until[rows], self.read)

    def passed(self, rows: np.ndarray, group: Group) -> None:
        group.wave.events.group_waited(group, group.lanes(), self.kind, self.until[rows], self.read)

    def describe(self, row: int) -> str:
        held = groups(self.group.wave, self.kind)
        late = held.oldest()[self.group.warps[row]] < self.until[row]
        lane = int((late & self.group.lanes()[row]).argmax())
        count = sum(
            int(((w == self.group.warps[row]) & (x == lane) & (n < self.until[row, lane])).sum())
            for w, x, n in held.in_flight.values()
        )
        return f"{count} {NAMES[self.kind]} operation(s) of lane {lane} to complete"


def commit(g: Group, mask: np.ndarray | None, kind: str) -> None:
    """Executes commit_group for the active lanes."""
    lanes = g.lanes(mask)
    groups(g.wave, kind).commit(g.warps, lanes)


def wait(g: Group, mask: np.ndarray | None, instruction: Instruction, kind: str, pending: int, read: bool):
    """Executes wait_group: returns None if at most the last ``pending`` committed groups of every active lane are
    incomplete, else a ``GroupWait``."""
    lanes = g.lanes(mask)
    held = groups(g.wave, kind)
    until = held.committed[g.warps] - pending
    if not held.in_flight or ((held.oldest()[g.warps] >= until) | ~lanes).all():
        g.wave.events.group_waited(g, lanes, kind, until, read)
        return None
    return GroupWait(g, instruction, kind, until, read)
