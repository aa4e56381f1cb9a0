"""Where everything lies in shared memory, and the arithmetic that says so."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import NamedTuple

from ...errors import explain
from ...scale_layout import ATOM_BYTES, ATOM_COLS, ATOM_ROWS
from .config import CTA_ROWS, TILE_BYTES, GemmConfig
from .pipeline_graph import Edge, barrier_words

SWIZZLE_BYTES = 1024
"""A 128-byte swizzle repeats every 1024 bytes, and matrix descriptors with base offset 0 start on such a boundary."""
OUT_STAGES = 2
"""Epilogue tiles in shared memory: one is written while TMA reads the other."""
MAX_STAGES = 16
MIN_STAGES = 2


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


class StageOffsets(NamedTuple):
    """Bytes from the start of a stage to each A, each B, and the scales of each."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    sfa: tuple[int, ...]
    sfb: tuple[int, ...]


@dataclass(frozen=True)
class StagePlan:
    """Bytes of a CTA's operands in one stage; each lies at its offset from the start of the stage.

    Scale factors come in whole atoms: ``atoms_k`` along K, ``atoms_n`` along the columns of the tile.
    """

    config: GemmConfig

    @property
    def atoms_k(self) -> int:
        return self.config.tile_k // (self.config.kind.block * ATOM_COLS)

    @property
    def atoms_n(self) -> int:
        """A tile of 192 columns may start in the middle of an atom: it then has parts of two, as 256 have."""
        return -(-self.config.tile_n // ATOM_ROWS)

    @property
    def a(self) -> int:
        return CTA_ROWS * TILE_BYTES

    @property
    def b(self) -> int:
        """Each CTA of a pair holds half of the columns."""
        return self.config.tile_n // self.config.ctas * TILE_BYTES

    @property
    def sfa(self) -> int:
        return self.atoms_k * ATOM_BYTES

    @property
    def sfb(self) -> int:
        """Each CTA of a pair holds the scales of all columns."""
        return self.atoms_k * self.atoms_n * ATOM_BYTES

    @property
    def parts(self) -> list[tuple[str, int]]:
        """(name, bytes) in the order in which they lie: every A, every B, and their scales."""
        sizes = (("A", self.a), ("B", self.b), ("SFA", self.sfa), ("SFB", self.sfb))
        return [(f"{name}{i}", size) for name, size in sizes for i in range(self.config.counts[name[-1] == "B"])]

    @property
    def loaded(self) -> int:
        """Bytes that arrive in one CTA for a stage: all but the padding of elements that TMA unpacks."""
        padding = sum(
            count * size // 2
            for count, size, unpacked in zip(self.config.counts, (self.a, self.b), self.config.unpacked)
            if unpacked
        )
        return sum(size for _, size in self.parts) - padding

    @property
    def bytes(self) -> int:
        """Distance from one stage to the next."""
        return _round_up(sum(size for _, size in self.parts), SWIZZLE_BYTES)

    @cached_property
    def offsets(self) -> StageOffsets:
        starts = accumulate((size for _, size in self.parts), initial=0)
        a, b = self.config.counts
        return StageOffsets(*(tuple(islice(starts, count)) for count in (a, b, a, b)))


@dataclass(frozen=True)
class SharedPlan:
    """Shared memory of a CTA: the stages, the output on its way out, partial sums from other CTAs, the barriers."""

    config: GemmConfig

    @cached_property
    def stage(self) -> StagePlan:
        return StagePlan(self.config)

    def graph(self, stages: int) -> tuple[Edge, ...]:
        """The pipelines with ``stages`` of operands: the architecture's."""
        raise NotImplementedError

    @property
    def staged_output(self) -> int:
        if self.config.store != "tma":
            return 0
        return OUT_STAGES * CTA_ROWS * self.config.epi_tile_n * self.config.out_bytes

    @property
    def partials(self) -> int:
        """fp32 sums of this CTA's columns from each of the other CTAs along K."""
        others = self.config.split_k - 1
        return others * self.config.products * CTA_ROWS * self.config.slice_n * 4

    @property
    def fixed(self) -> int:
        """Everything but the stages; barriers are counted for the most stages there can be."""
        barriers = 8 * barrier_words(self.graph(MAX_STAGES)) + 16
        table = _round_up(self.config.table_bytes, 128)
        return self.staged_output + self.partials + table + _round_up(barriers, 128) + SWIZZLE_BYTES

    @cached_property
    def stages(self) -> int:
        """Stages asked for, or as many as fit."""
        fit = (self.config.arch.shared_bytes - self.fixed) // self.stage.bytes
        return self.config.stages or min(max(fit, 0), MAX_STAGES)

    @property
    def bytes(self) -> int:
        return self.stages * self.stage.bytes + self.fixed

    @property
    def arithmetic(self) -> str:
        parts = " + ".join(f"{name} {size}" for name, size in self.stage.parts)
        return (
            f"{self.stages} stages of {self.stage.bytes} ({parts}) + output {self.staged_output} + "
            f"partial sums {self.partials} + barriers and alignment "
            f"{self.fixed - self.staged_output - self.partials} = {self.bytes} bytes"
        )

    @property
    def reason(self) -> str:
        """Why the plan cannot be, or an empty string."""
        if not 0 <= self.config.stages <= MAX_STAGES:
            return explain("stages", got=self.config.stages, expected=f"0 (as many as fit) to {MAX_STAGES}")
        limit = self.config.arch.shared_bytes
        needed = max(self.stages, MIN_STAGES)
        total = needed * self.stage.bytes + self.fixed
        if total > limit:
            return explain(
                "shared memory",
                got=f"{needed} stages of {self.stage.bytes} + {self.fixed} = {total} bytes",
                expected=f"at most {limit}: {total - limit} too many",
            )
        return ""
