"""The state of the SMs and warps in a replay: what keeps them busy, and until when."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from cute_nvfp4.sim.clock.machine import Machine
from cute_nvfp4.sim.clock.memory import Port, Shared
from cute_nvfp4.sim.clock.steps import PIPES, Step
from cute_nvfp4.sim.observe.timing import Wait

SCHEDULERS, BOARDS = 4, 6
WORTH_SHOWING = 40
"""The cycles of the shortest wait that a time line shows."""
Happened = dict[tuple[int, type], list[Any]]
"""The notes of one visit, by PTX instruction (index) and kind."""


class Sm:
    """One SM: until when its schedulers, pipes, tensor cores and memory are busy."""

    def __init__(
        self, machine: Machine, shared: Shared, weight: float, l1_bytes: int, code_lines: int, warm: bool
    ) -> None:
        self.free = [0.0] * SCHEDULERS
        self.pipes = [[0.0] * len(PIPES) for _ in range(SCHEDULERS)]
        self.tensor = [0.0] * SCHEDULERS
        self.tensor_free = self.tensor_done = self.tensor_busy = 0.0  # tcgen05 has one queue an SM
        self.pair: tuple[Sm, ...] = (self,)
        self.port, self.weight = Port(machine, shared, weight, l1_bytes), weight
        self.issued = 0
        self._line, self._lines = machine["fetch.cycles_per_line"], int(machine["fetch.lines"])
        self._parameter = machine["constant.cycles_per_line"]
        self._code: OrderedDict[int, float] = OrderedDict()
        self._parameters: dict[int, float] = {}
        self._fetched = self._left = 0.0
        self._kept = code_lines <= machine["fetch.kept_lines"]
        self._near, self._far = machine["fetch.near_lines"], 0.0 if warm else machine["fetch.far_cycles_per_line"]
        self._miss = machine["fetch.miss"]
        self._seen: set[int] = set()
        self._turnover = machine["launch.cta_turnover"]

    def fetch(self, line: int, time: float) -> float:
        """Returns when a line of code is there that a warp wants at ``time``. The next line is fetched as well."""
        if self._kept:  # the code is there since the launch before
            return time
        for wanted in (line, line + 1):
            if wanted not in self._code:
                far = wanted not in self._seen and len(self._seen) >= self._near
                self._seen.add(wanted)
                jump = self._miss if wanted == line and line - 1 not in self._code else 0.0
                self._fetched = max(time, self._fetched) + jump + (max(self._far, self._line) if far else self._line)
                self._code[wanted] = self._fetched
                if len(self._code) > self._lines:
                    self._code.popitem(last=False)
            else:
                self._code.move_to_end(wanted)
        return max(time, self._code[line])

    def leave(self, time: float) -> float:
        """Returns when the SM has given up a CTA that ends at ``time``."""
        self._left = max(time, self._left) + self._turnover
        return self._left

    def parameter(self, line: int, time: float) -> float:
        """Returns when a line of the kernel's parameters is there that a warp wants at ``time``."""
        if line not in self._parameters:
            self._parameters[line] = time + self._parameter
        return max(time, self._parameters[line])


class Warp:
    """One warp: its position in its program, its scoreboards and groups, and what it waits for."""

    __slots__ = (
        *(
            "after",
            "at",
            "begin",
            "line",
            "boards",
            "cta",
            "groups",
            "happened",
            "number",
            "open",
            "program",
            "ready",
            "reason",
        ),
        *("reasons", "sm", "stored", "sub", "tensor", "used", "waits", "warp"),
    )

    def __init__(self, number: int, cta: int, warp: int, sm: Sm, program: list[tuple[list[Step], Happened]]) -> None:
        self.number, self.cta, self.warp, self.sm, self.sub = number, cta, warp, sm, warp % SCHEDULERS
        self.program, self.at, self.ready = program, (0, 0), 0.0
        self.line, self.after = -1, 0
        self.boards, self.reasons = [0.0] * BOARDS, [""] * BOARDS
        self.groups: list[float] = []
        self.tensor: list[float] = []
        self.open, self.stored, self.reason = 0.0, -1e9, "issue"
        self.waits: list[Wait] = []
        self.used: Counter[tuple[int, type]] = Counter()
