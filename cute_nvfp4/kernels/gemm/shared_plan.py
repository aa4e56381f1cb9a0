"""The plan of shared memory: where everything lies, with the arithmetic."""

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
"""The period of a 128-byte swizzle, at which matrix descriptors with base offset 0 must start."""
OUT_STAGES = 2
"""Epilogue tiles in shared memory: threads write one while TMA reads the other."""
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
    """The bytes of a CTA's operands in one stage; each operand lies at its offset from the start of the stage.

    Scale factors are whole atoms: ``atoms_k`` along K, ``atoms_n`` along the columns of the tile.
    """

    config: GemmConfig

    @property
    def atoms_k(self) -> int:
        return self.config.tile_k // (self.config.kind.block * ATOM_COLS)

    @property
    def atoms_n(self) -> int:
        """Atoms along N. A tile of 192 columns may start in the middle of an atom: it has parts of two, as 256 have."""
        return -(-self.config.tile_n // ATOM_ROWS)

    @property
    def a(self) -> int:
        return CTA_ROWS * TILE_BYTES

    @property
    def b(self) -> int:
        """Bytes of B. Each CTA of a pair holds half of the columns."""
        return self.config.tile_n // self.config.ctas * TILE_BYTES

    @property
    def sfa(self) -> int:
        return self.atoms_k * ATOM_BYTES

    @property
    def sfb(self) -> int:
        """Bytes of B's scales. Each CTA of a pair holds the scales of all columns."""
        return self.atoms_k * self.atoms_n * ATOM_BYTES

    @property
    def parts(self) -> list[tuple[str, int]]:
        """(name, bytes) of each operand in the order of their addresses: every A, every B, and their scales."""
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
        """The distance from one stage to the next in bytes."""
        return _round_up(sum(size for _, size in self.parts), SWIZZLE_BYTES)

    @cached_property
    def offsets(self) -> StageOffsets:
        starts = accumulate((size for _, size in self.parts), initial=0)
        a, b = self.config.counts
        return StageOffsets(*(tuple(islice(starts, count)) for count in (a, b, a, b)))


@dataclass(frozen=True)
class SharedPlan:
    """Shared memory of a CTA: the stages, the staged output, partial sums of other CTAs, the barriers."""

    config: GemmConfig

    @cached_property
    def stage(self) -> StagePlan:
        return StagePlan(self.config)

    def graph(self, stages: int) -> tuple[Edge, ...]:
        """The pipelines of the architecture with ``stages`` stages of operands."""
        raise NotImplementedError

    @property
    def staged_output(self) -> int:
        if self.config.store != "tma":
            return 0
        return OUT_STAGES * CTA_ROWS * self.config.epi_tile_n * self.config.out_bytes

    @property
    def partials(self) -> int:
        """Bytes of fp32 sums that the other CTAs along K send for this CTA's columns."""
        others = self.config.split_k - 1
        return others * self.config.products * CTA_ROWS * self.config.slice_n * 4

    @property
    def fixed(self) -> int:
        """Bytes of everything but the stages, with barriers for ``MAX_STAGES`` stages."""
        barriers = 8 * barrier_words(self.graph(MAX_STAGES)) + 16
        table = _round_up(self.config.table_bytes, 128)
        return self.staged_output + self.partials + table + _round_up(barriers, 128) + SWIZZLE_BYTES

    @cached_property
    def stages(self) -> int:
        """The number of stages: the configured one, or as many as fit."""
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
        """Why shared memory cannot hold the plan, or an empty string."""
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
