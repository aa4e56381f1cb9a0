"""tcgen05.mma as a queued operation, and the fusion of queued neighbours into one product (``Pending.joined``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cute_nvfp4.sim.frontend.model import Instruction
from cute_nvfp4.sim.machine.engine import Cells, Completion, Footprint, Pending
from cute_nvfp4.sim.machine.wave import Wave
from cute_nvfp4.sim.tcgen05 import operands, product
from cute_nvfp4.sim.tcgen05.descriptor import PERIOD, MatrixDescriptor
from cute_nvfp4.sim.tcgen05.instruction import InstructionDescriptor
from cute_nvfp4.sim.tcgen05.layouts import Part, accumulator

LONGEST = 16
"""Greatest number of instructions in one product."""
LONGEST_UNSIGNED = 8
"""Greatest number for u8 times u8: a sum of 256 such products is below 2 ** 24, so that f32 is exact; of s8, of 512."""
STRETCH = 256
"""Greatest number of queued instructions that are sorted into runs together."""


@dataclass(frozen=True)
class Spec:
    """The properties that fused instructions have in common."""

    idesc: InstructionDescriptor  # with scale factor ids 0, because fused instructions differ in them
    cta_group: int
    ws: bool
    a: MatrixDescriptor | None  # None when A is in tensor memory
    b: MatrixDescriptor
    lane: int = 0  # base lane of D
    disabled: tuple[int, ...] = ()  # words of the disable-output-lane operand, empty when no lane is disabled
    ashift: bool = False


@lru_cache(maxsize=4096)
def shared_spec(*fields) -> Spec:
    """Returns ``Spec(*fields)``; equal fields give the same object, which makes comparison cheap."""
    return Spec(*fields)


@lru_cache(maxsize=256)
def disabled_lanes(words: tuple[int, ...]) -> np.ndarray:
    """Returns whether each lane (g, 128) is disabled, from the words of the disable-output-lane operand."""
    bits = np.array(words, "u4")[:, None] >> np.arange(32, dtype="u4") & np.uint32(1)
    return bits.astype(bool).reshape(-1, 128)


def pair(wave: Wave, ctas: np.ndarray, cta_group: int) -> np.ndarray:
    """Returns the CTAs (k, g) of the CTA groups of ``ctas`` (k,); in a pair, the CTA of even rank comes first."""
    if cta_group == 1:
        return ctas[:, None]
    even = wave.rank[ctas] & ~1
    return np.stack([wave.peer(ctas, even), wave.peer(ctas, even + 1)], axis=1)


class Mma(Pending):
    """One tcgen05.mma of k threads (rows) with the same ``spec``.

    ``a`` and ``b`` (k,) are start addresses in shared memory, which agree modulo 1024; for A in tensor memory, ``a``
    holds first columns. ``d``, ``sfa`` and ``sfb`` (k,) are the first columns of D and of the scale factors, whose ids
    are ``sf_ids``. Where ``enable`` (k,) is set, D times 2 ** -``scale_d`` is added to the product.
    """

    engine = "tensor"
    completion = Completion("tensor")

    def __init__(self, instruction: Instruction, wave: Wave, warps: np.ndarray, spec: Spec, **rows) -> None:
        super().__init__(instruction, wave, warps)
        self.spec = spec
        self.a: np.ndarray = rows["a"]
        self.b: np.ndarray = rows["b"]
        self.d: np.ndarray = rows["d"]
        self.enable: np.ndarray = rows["enable"]
        self.sfa: np.ndarray | None = rows.get("sfa")
        self.sfb: np.ndarray | None = rows.get("sfb")
        self.sf_ids: tuple[int, int] = rows.get("sf_ids", (0, 0))
        self.scale_d: int = rows.get("scale_d", 0)
        self.a_low, self.b_low = int(self.a[0]) % PERIOD, int(self.b[0]) % PERIOD

    def group(self, wave: Wave) -> np.ndarray:
        return pair(wave, self.ctas, self.spec.cta_group)

    def parts(self) -> tuple[Part, ...]:
        d = self.spec.idesc
        return accumulator(d.m, d.n, self.spec.cta_group, self.spec.ws, self.spec.lane)

    @property
    def width(self) -> int:
        """Number of columns of D in tensor memory."""
        part = self.parts()[0]
        return part.n.stop - part.n.start

    def scale_spans(self) -> list[tuple[np.ndarray, int]]:
        """Returns (first columns (k,), number of columns) of the scale factors of A and of B."""
        d, rows, out = self.spec.idesc, self.parts()[0].rows, []
        if d.block:
            sides = ((self.sfa, rows.stop - rows.start, self.sf_ids[0]), (self.sfb, self.width, self.sf_ids[1]))
            for column, count, first in sides:
                further = operands.scale_words(first, d.scales) - 1
                out.append((column, -(-count // 32) + further * operands.scale_stride(count)))
        return out

    def disabled_lanes(self, j: int) -> np.ndarray | None:
        """Returns whether each lane (128,) of CTA j of the group is disabled, or None when no lane is."""
        return disabled_lanes(self.spec.disabled)[j] if self.spec.disabled else None

    def occupies(self, wave: Wave) -> np.ndarray:
        return self.group(wave).ravel()

    def run(self, wave: Wave) -> None:
        product.execute(wave, [[self]])

    def joined(self, following: Pending) -> Pending | None:
        return MmaRuns([[self]]).joined(following)

    def footprints(self, wave: Wave) -> list[Footprint]:
        d, spec, out = self.spec.idesc, self.spec, []
        ctas = self.group(wave)
        for cta in ctas.T:
            if spec.a is None:
                out.append(Footprint("tensor", False, cta, Cells(slice(0, 128), _columns(self.a, 8))))
                if spec.ashift:
                    out.append(Footprint("tensor", True, cta, Cells(slice(0, 128), _columns(self.a, 8))))
            else:
                rows = d.m // spec.cta_group
                chunks = self._shared_chunks(wave, self.a, self.a_low, spec.a, d.a_mn_major, rows, d.a)
                out.append(Footprint("shared", False, cta, chunks))
            chunks = self._shared_chunks(wave, self.b, self.b_low, spec.b, d.b_mn_major, d.n // spec.cta_group, d.b)
            out.append(Footprint("shared", False, cta, chunks))
            for column, count in self.scale_spans():
                out.append(Footprint("tensor", False, cta, Cells(slice(0, 128), _columns(column, count))))
            out += self._accumulator_footprints(cta)
        return out

    def _shared_chunks(self, wave, start, low: int, desc: MatrixDescriptor, mn_major: bool, rows: int, t: str):
        """Returns the addresses (k, m) of the 16-byte chunks of one operand, or (1, m) when all rows read the same."""
        table = operands.operand_chunks(
            desc, mn_major, low, (0,), rows, product.operand_bits(t), self.spec.idesc.chunks
        )
        base = (start if (start != start[0]).any() else start[:1]) - low
        operands.check_inside(base, table, wave.shared_bytes, self.instruction.where)
        return base[:, None] + 16 * table.reshape(1, -1)

    def _accumulator_footprints(self, cta: np.ndarray) -> list[Footprint]:
        lanes = slice(0, 128)
        if not isinstance(self.parts()[0].lanes, slice):
            lanes = np.array(self.parts()[0].lanes)
        columns, reads = _columns(self.d, self.width), self.enable
        out = [Footprint("tensor", True, cta, Cells(lanes, columns))]
        if reads.any():
            out.insert(0, Footprint("tensor", False, cta[reads], Cells(lanes, columns[reads]), np.flatnonzero(reads)))
        return out


def _columns(first: np.ndarray, count: int) -> np.ndarray:
    return first[:, None] + np.arange(count)


class MmaRuns(Pending):
    """A stretch of the queue, sorted into runs of instructions on the same accumulators."""

    engine = "tensor"
    completion = Completion("tensor")

    def __init__(self, runs: list[list[Mma]]) -> None:
        first = runs[0][0]
        self.instruction, self.warps, self.ctas = first.instruction, first.warps, first.ctas
        self.runs, self.count = runs, sum(map(len, runs))

    def occupies(self, wave: Wave) -> np.ndarray:
        return np.unique(np.concatenate([m.occupies(wave) for run in self.runs for m in run]))

    def footprints(self, wave: Wave) -> list[Footprint]:
        return [f for run in self.runs for m in run for f in m.footprints(wave)]

    def run(self, wave: Wave) -> None:
        product.execute(wave, self.runs)

    def joined(self, following: Pending) -> Pending | None:
        """Adds ``following`` to the runs, or returns None if it is no tcgen05.mma or the stretch is full. Instructions
        on the same accumulators become one product with a longer K. An instruction may move before others that use
        other accumulators."""
        if not isinstance(following, Mma) or self.count >= STRETCH:
            return None
        _place(self.runs, following)
        self.count += 1
        return self


def _place(stretch: list[list[Mma]], m: Mma) -> None:
    """Appends ``m`` to the run that it continues, or starts a new run."""
    for run in reversed(stretch[-4:]):
        if _continues(run, m):
            run.append(m)
            return
        if not _independent(run, m):
            break
    stretch.append([m])


def _continues(run: list[Mma], m: Mma) -> bool:
    first, spec = run[0], m.spec
    if (first.spec is not spec and first.spec != spec) or m.scale_d or not m.enable.all():
        return False
    if len(run) >= (LONGEST_UNSIGNED if spec.idesc.a == spec.idesc.b == "u8" else LONGEST):
        return False
    if spec.ashift or spec.idesc.d == "f16" or spec.idesc.saturate or spec.idesc.k == 96:
        return False
    if len(first.ctas) != len(m.ctas) or (first.ctas != m.ctas).any() or (first.d != m.d).any():
        return False
    if len(m.ctas) > 1 and (len(np.unique(m.ctas)) < len(m.ctas) or _uneven(first, m)):
        return False
    return not _reads_own_result(m)


def _uneven(first: Mma, m: Mma) -> bool:
    """Returns whether the distance between the operands of two instructions differs from row to row."""
    far_a, far_b = m.a - first.a, m.b - first.b
    return bool((far_a != far_a[0]).any() or (far_b != far_b[0]).any())


def _spans(m: Mma) -> list[tuple[np.ndarray, int]]:
    """Returns (first columns (k,), number of columns) of what ``m`` reads in tensor memory besides D."""
    return ([(m.a, 8)] if m.spec.a is None else []) + m.scale_spans()


def _overlap(a: np.ndarray, wide_a: int, b: np.ndarray, wide_b: int) -> bool:
    return bool(((a < b + wide_b) & (b < a + wide_a)).any())


def _reads_own_result(m: Mma) -> bool:
    return any(_overlap(m.d, m.width, column, count) for column, count in _spans(m))


def _independent(run: list[Mma], m: Mma) -> bool:
    """Returns whether ``m`` may move before all instructions of ``run``. With the same CTAs, neither may write what the
    other reads or writes. Otherwise they have cta_group::1 and no CTA in common."""
    first = run[0]
    if len(first.ctas) != len(m.ctas) or (first.ctas != m.ctas).any():
        return not np.isin(first.ctas, m.ctas).any() and first.spec.cta_group == m.spec.cta_group == 1
    if first.spec.ashift or m.spec.ashift or _overlap(first.d, first.width, m.d, m.width):
        return False
    if any(_overlap(first.d, first.width, column, count) for column, count in _spans(m)):
        return False
    return not any(_overlap(m.d, m.width, column, count) for r in run for column, count in _spans(r))
