"""The dot-product engines of the GEMV: two classes with one interface, chosen by architecture.

A quad of lanes shares a slice of 256 elements of K. Lane q of the quad holds elements 64q … 64q+63 of two rows: eight
32-bit words of each row, which are four blocks of 16. An engine returns the sum of products with b of each block of
each row, unscaled and exact. The engines differ in b's layout in shared memory and in the instructions that multiply.

``FmaDot`` (sm_100a): the hardware converts E2M1 to f16x2, and eight f16x2 FMAs sum a block. Each half has eight terms,
multiples of 0.25 up to 288, so that the sum is exact. A byte takes one conversion and one FMA: one instruction for each
element.

``MmaDot`` (sm_90a): without an FP4 conversion, decoding eight elements to f16x2 takes fifteen integer instructions.
Doubled, the values are integers up to 12: ``prmt`` decodes eight of them to bytes in seven instructions, and the tensor
cores, otherwise idle, multiply and sum them in int32. One ``mma.m16n8k32`` takes two words of each row of the warp. Its
32 values of k belong to the four lanes of a quad, so column n of the 8-wide B operand holds the current block of lane
q = n // 2 only (zeros elsewhere), and each lane's accumulators are the sums of its own blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from ...formats import NVFP4
from ...ptx.convert import (
    E2M1_DOUBLED_MAGNITUDES,
    bits_to_f32,
    e2m1x8_to_f16x2,
    e2m1x8_to_s8x4,
    e2m1x8_to_s8x4_signs_apart,
    f16x2_to_f32,
)
from ...ptx.half import fma_e2m1
from ...ptx.memory import load_shared, store_shared
from ...ptx.mma import mma_m16n8k32_s8
from ...ptx.move import per_lane
from ...target import Architecture
from ..arith import div, mod

SLICE_K = 256
BLOCK_K = NVFP4.block
SLICE_BLOCKS = SLICE_K // BLOCK_K
QUAD = 4
LANE_BLOCKS = SLICE_BLOCKS // QUAD


# The bits of 1.5 · 2²³. Adding an integer n of magnitude below 2²² to them gives the bits of 1.5 · 2²³ + n. Two MMAs
# that start from them give two fp32 values, whose difference is that of the sums: one subtraction and no conversion.
_MAGIC = 0x4B400000


class FmaDot:
    """The engine of f16x2 FMAs. A cell of sixteen bytes of shared memory has eight elements of b in f16."""

    slice_bytes = 2 * SLICE_K
    # (WORD_OF_LANE, LANE_OF_QUAD) → byte of a slice
    cell_shape, cell_stride = (2 * LANE_BLOCKS, QUAD), (16 * QUAD, 16)
    constant_words = 0
    # sums are unscaled
    factor = 1.0

    def __init__(self, arch: Architecture) -> None:
        self.arch = arch

    def cell(self, word: Any, quad_lane: Any) -> Any:
        return cute.crd2idx((word, quad_lane), cute.make_layout(self.cell_shape, stride=self.cell_stride))

    def stage_block(self, base: Int32, block: Int32, words: list[Uint32]) -> None:
        """Decodes the 16 elements (two words) of ``block`` of b into shared memory at ``base``."""
        within = mod(block, SLICE_BLOCKS)
        quad_lane, first_word = div(within, LANE_BLOCKS), 2 * mod(within, LANE_BLOCKS)
        # :meth:`cell`, with the common factor of its strides taken out
        address = base + div(block, SLICE_BLOCKS) * self.slice_bytes + (first_word * QUAD + quad_lane) * 16
        for i in range(2):
            store_shared(address + self.cell(i, 0), e2m1x8_to_f16x2(words[i], self.arch))

    def lane_state(self, base: Int32, constants: Int32, lane: Int32) -> Int32:
        """The state of the lane that :meth:`block_sums` needs: the address of its b in slice 0."""
        return base + self.cell(0, mod(lane, QUAD))

    def block_sums(self, rows: list[list[Uint32]], state: Int32, slice_index: Int32) -> list[list]:
        """The fp32 sums of the four blocks of each of the two rows."""
        address = state + slice_index * self.slice_bytes
        sums: list[list] = [[], []]
        for block in range(LANE_BLOCKS):
            b = []
            for word in (2 * block, 2 * block + 1):
                b += load_shared(address + self.cell(word, 0), 16)
            for r in range(2):
                pair = fma_e2m1(Uint32(0), rows[r][2 * block : 2 * block + 2], b, self.arch)
                low, high = f16x2_to_f32(pair)
                sums[r].append(low + high)
        return sums


class ZeroOrBlock(NamedTuple):
    """A lane's source of b: its address in slice 0, and bytes between slices (0 for a lane that reads zeros)."""

    address: Int32
    step: Int32


class MmaLane(NamedTuple):
    """A lane's state: the sources of b for blocks of half 0 and 1, and the table of magnitudes in registers."""

    halves: tuple[ZeroOrBlock, ZeroOrBlock]
    table: list


class MmaDot:
    """The engine of integer MMAs. A cell of sixteen bytes of shared memory has a block of b as doubled s8.

    A lane whose column of B is zero reads zeros from memory of their own, instead of masking what it reads. The table
    of magnitudes passes through ``per_lane``: if ptxas knew that it is the same in all lanes, it would copy the table
    to a register before each of the 64 lookups of a slice.
    """

    slice_bytes = SLICE_K
    # ((PAIR g, HALF h) of the lane's blocks, LANE_OF_QUAD) → byte of a slice
    cell_shape, cell_stride = ((2, 2), QUAD), ((32 * QUAD, 16 * QUAD), 16)
    # zeros for h = 0 and h = 1 (64 bytes each), at the offsets of g = 0 and g = 1 (128 bytes apart)
    constant_words = 64
    # both operands are doubled, so that sums are four times too large
    factor = 0.25

    def __init__(self, arch: Architecture) -> None:
        self.arch = arch

    def constant(self, index: Int32) -> Uint32:
        """Word ``index`` of the constants in shared memory."""
        return Uint32(0)

    def cell(self, pair: Any, half: Any, quad_lane: Any) -> Any:
        return cute.crd2idx(((pair, half), quad_lane), cute.make_layout(self.cell_shape, stride=self.cell_stride))

    def stage_block(self, base: Int32, block: Int32, words: list[Uint32]) -> None:
        """Decodes the 16 elements (two words) of ``block`` of b into shared memory at ``base``."""
        within = mod(block, SLICE_BLOCKS)
        quad_lane, pair, half = div(within, LANE_BLOCKS), mod(div(within, 2), 2), mod(within, 2)
        address = base + div(block, SLICE_BLOCKS) * self.slice_bytes
        address = address + self.cell(pair, 0, 0) + self.cell(0, half, 0) + self.cell(0, 0, quad_lane)
        store_shared(address, [*e2m1x8_to_s8x4(words[0]), *e2m1x8_to_s8x4(words[1])])

    def lane_state(self, base: Int32, constants: Int32, lane: Int32) -> MmaLane:
        """The state of the lane that :meth:`block_sums` needs."""
        column, quad_lane = div(lane, QUAD), mod(lane, QUAD)
        halves = []
        for h in range(2):
            active = column == 2 * quad_lane + h
            # the zeros of half h lie in the banks that the values of half h leave unused
            zeros = constants + self.cell(0, 1 - h, 0)
            address = cutlass.select_(active, base + self.cell(0, h, quad_lane), zeros)
            halves.append(ZeroOrBlock(address, cutlass.select_(active, Int32(self.slice_bytes), Int32(0))))
        return MmaLane(tuple(halves), [per_lane(Uint32(word)) for word in E2M1_DOUBLED_MAGNITUDES])

    def block_sums(self, rows: list[list[Uint32]], state: MmaLane, slice_index: Int32) -> list[list]:
        """The fp32 sums, four times too large, of the four blocks of each of the two rows: small integers."""
        sums: list[list] = [[], []]
        for g in range(2):
            positive = [Int32(_MAGIC)] * 4
            negative = [Int32(_MAGIC)] * 4
            for h, half in enumerate(state.halves):
                b = load_shared(half.address + slice_index * half.step + self.cell(g, 0, 0), 16)
                for i in range(2):
                    word = 4 * g + 2 * h + i
                    # (k 0–15 | 16–31 of the instruction) × (row | row + 8): positive and negative elements apart
                    p0, p2, n0, n2 = e2m1x8_to_s8x4_signs_apart(rows[0][word], state.table)
                    p1, p3, n1, n3 = e2m1x8_to_s8x4_signs_apart(rows[1][word], state.table)
                    positive = mma_m16n8k32_s8([p0, p1, p2, p3], b[2 * i : 2 * i + 2], positive)
                    negative = mma_m16n8k32_s8([n0, n1, n2, n3], b[2 * i : 2 * i + 2], negative)
            for r in range(2):
                for h in range(2):
                    i = 2 * r + h
                    sums[r].append(bits_to_f32(positive[i]) - bits_to_f32(negative[i]))
        return sums


def dot_engine(arch: Architecture, name: str = "") -> FmaDot | MmaDot:
    """The engine for ``arch``, or the one called ``name`` (``fma`` or ``mma``)."""
    name = name or ("fma" if arch.has_fp4_convert else "mma")
    return {"fma": FmaDot, "mma": MmaDot}[name](arch)
