"""The error table: errors of single bf16 elements under the scales that ``optimal`` tries, in shared memory.

A bf16 value has eight significant bits, and a block's candidates are an octave of scales. An element's errors under all
of them depend on its bits and on where the octave begins, which is one of eight significands m. Each m has a table of
squares (y − q)² · scale² in f16, with eight candidates in an entry, and a second table of the two scales below the
octave, under which the largest elements are clipped. A block's eight errors therefore are 16 loads of 16 bytes, which
the tensor cores sum in fp32; computed, each would take some 60 instructions.

* Elements are taken times 2⁻ᵉ, where e is the exponent of the octave's first scale: their bits less 128 · e index the
  table. It begins where all candidates round an element to zero. Its first entry holds zeros, since what smaller
  elements add to an error is the same under all candidates, at most top² / 12 together. It ends at the largest
  possible element of a block, 7 · scale.
* Entries are rounded to eleven bits: sums have a relative error of 2⁻¹¹, besides that of estimates in :mod:`.optimal`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.memory import SmemAllocator

from ....ptx.arithmetic import add_product_of_half, add_rn, mul_rn, sub_rn
from ....ptx.encode import f32x2_to_16bit
from ....ptx.half import max_u16x2
from ....ptx.memory import load_shared, store_shared
from ....ptx.mma import diagonal, mma_m16n8k8_f16, sum_halves
from ....ptx.move import f32_bits, f32_from_bits
from ..config import WARP
from .records import ErrorTable, GlobalFactor
from .scale_table import scale_value

SIGNIFICANDS = range(8, 16)
_ONE_F16 = 0x3C00
# 7 · m / 8 is that many bf16 values above the first entry, or a few less
ENTRIES = 664
_ENTRY_BYTES, _LOWER_BYTES = 16, 4
_TABLE_BYTES, _LOWER_TABLE_BYTES = ENTRIES * _ENTRY_BYTES, ENTRIES * _LOWER_BYTES
# ratio of the first entry's value to the octave's first scale: at most 1/4 of the second scale below that one
_FLOOR = 0.2
# the unit of errors is (global scale · 2**e)² / 4096: small squares are normal in binary16, large ones below 65504
ERROR_UNIT = 4096.0
_LARGEST = 6.0


class Lookup(NamedTuple):
    """A block's lookup: ``numbers``, (8) words of two magnitudes, not below ``floor``; and the table of its octave."""

    numbers: tuple[Uint32, ...]
    floor: Int32
    table: Int32


def _floor(least: Float32, factor: GlobalFactor) -> Uint32:
    """The bf16 bits of the first entry's value, for an octave that begins with the scale ``least``."""
    return f32_bits(mul_rn(mul_rn(factor.value, least), Float32(_FLOOR))) >> Uint32(16)


def _squares(x: Float32, inverses: Sequence[Float32], factors: Sequence[Float32]) -> list[Float32]:
    """((y − E2M1(y)) · factor)² with y = x · inverse, for each inverse and factor. x is positive."""
    found = []
    for inverse, factor in zip(inverses, factors):
        y = mul_rn(x, inverse)
        # half of y's power of two (at least 1/2) is the unit in the last place of 2**22 times that power
        power = f32_from_bits(cutlass.max(f32_bits(y) & Uint32(0x7F800000), Uint32(0x3F800000)))
        rounder = mul_rn(power, Float32(2.0**22))
        q = cute.arch.fmin(sub_rn(add_rn(y, rounder), rounder), Float32(_LARGEST))
        d = mul_rn(sub_rn(y, q), factor)
        found.append(mul_rn(d, d))
    return found


@cute.jit
def fill_error_table(
    config: cutlass.Constexpr,
    smem: SmemAllocator,
    factor: GlobalFactor,
    all_inverses: tuple[Float32, ...],
    thread: Int32,
    lane: Int32,
) -> ErrorTable:
    """Allocates and writes the tables, by all threads of a CTA together. all_inverses: 1 / (global scale · m)."""
    count = len(SIGNIFICANDS)
    errors = smem.allocate_array(cutlass.Uint8, count * _TABLE_BYTES, byte_alignment=16).toint()
    lower = smem.allocate_array(cutlass.Uint8, count * _LOWER_TABLE_BYTES, byte_alignment=16).toint()
    # a warp's entries all belong to one table; warps that do not divide evenly among the tables have no entries
    warp = cute.arch.make_warp_uniform(thread // WARP)
    first, part, parts = warp % count, warp // count, config.warps // count
    inverses, significands = [], []
    for i, m in enumerate(SIGNIFICANDS):
        doubled = Int32(i) < first
        inverses.append(mul_rn(all_inverses[i], cutlass.select_(doubled, Float32(4.0), Float32(8.0))))
        significands.append(cutlass.select_(doubled, Float32(float(2 * m)), Float32(float(m))))
    for n in (1, 2):
        inverse, m = _below(inverses, significands, first, n)
        inverses.append(inverse)
        significands.append(m)
    factors = [mul_rn(m, Float32(ERROR_UNIT**0.5 / count)) for m in significands]
    least = _floor(mul_rn((first + count).to(Float32), Float32(1 / count)), factor)
    first_entry = cutlass.select_(part < parts, part * WARP + lane, Int32(ENTRIES))
    for entry in cutlass.range(first_entry, ENTRIES, WARP * parts, unroll=1):
        x = f32_from_bits((least + Uint32(entry)) << Uint32(16))
        found = _squares(cutlass.select_(entry == 0, Float32(0.0), x), inverses, factors)
        words = [f32x2_to_16bit(found[i], found[i + 1], "float16") for i in range(0, count + 2, 2)]
        item = first * ENTRIES + entry
        store_shared(errors + item * _ENTRY_BYTES, words[:4])
        store_shared(lower + item * _LOWER_BYTES, words[4:])
    cute.arch.sync_threads()
    return ErrorTable(errors, lower, diagonal(_ONE_F16, lane))


def _below(
    inverses: Sequence[Float32], significands: Sequence[Float32], first: Int32, n: int
) -> tuple[Float32, Float32]:
    """Inverse and significand of the ``n``-th scale below the octave: half of the octave's ``n``-th from the end."""
    place = (first - n) & 7
    inverse, m = inverses[0], significands[0]
    for i in range(1, len(SIGNIFICANDS)):
        inverse = cutlass.select_(place == i, inverses[i], inverse)
        m = cutlass.select_(place == i, significands[i], m)
    return mul_rn(inverse, Float32(2.0)), mul_rn(m, Float32(0.5))


def lookup(words: Sequence[Uint32], lowest: Int32, regular: Boolean, factor: GlobalFactor, table: ErrorTable) -> Lookup:
    """The lookup of a block. lowest: code of the octave's first scale; unless ``regular``, all elements use entry 0."""
    floor = Int32(_floor(scale_value(Uint32(lowest)), factor))
    floor = cutlass.select_(regular, floor, Int32(0x7FFF))
    both = Uint32(floor) * Uint32(0x00010001)
    numbers = tuple(max_u16x2(word & Uint32(0x7FFF7FFF), both) for word in words)
    return Lookup(numbers, floor, (lowest & 7) * ENTRIES)


def _sums(addresses: Sequence[Int32], num_bytes: int, ones: Uint32) -> list[Float32]:
    """The sums of 16 entries of f16, each of ``num_bytes``: eight sums of 16-byte entries, two of 4-byte entries."""
    entries = [load_shared(address, num_bytes) for address in addresses]
    if num_bytes == _LOWER_BYTES:
        # four elements at a time, as two pairs of two
        sums = [Float32(0.0)] * 4
        for i in range(0, 16, 4):
            sums = sum_halves([entry[0] for entry in entries[i : i + 4]], ones, sums)
        return [add_rn(sums[0], sums[2]), add_rn(sums[1], sums[3])]
    low, high = [Float32(0.0)] * 4, [Float32(0.0)] * 4
    # one entry at a time: the words of two entries would have to be moved to the registers of one instruction
    for entry in entries:
        low = mma_m16n8k8_f16(entry[:2], ones, low)
        high = mma_m16n8k8_f16(entry[2:], ones, high)
    return [*low, *high]


def octave_errors(found: Lookup, table: ErrorTable) -> list[Float32]:
    """The block's errors under the eight scales of its octave, in the order of their significands."""
    start = table.errors + (found.table - found.floor) * _ENTRY_BYTES
    return _sums(_addresses(found, Uint32(start), Uint32(_ENTRY_BYTES)), _ENTRY_BYTES, table.ones)


def lower_errors(found: Lookup, table: ErrorTable, wanted: Boolean) -> list[Float32]:
    """The block's errors under the two scales below its octave; if not ``wanted``, arbitrary values of one address."""
    start = cutlass.select_(wanted, table.lower + (found.table - found.floor) * _LOWER_BYTES, table.lower)
    step = cutlass.select_(wanted, Uint32(_LOWER_BYTES), Uint32(0))
    return _sums(_addresses(found, Uint32(start), step), _LOWER_BYTES, table.ones)


def _addresses(found: Lookup, start: Uint32, step: Uint32) -> list[Int32]:
    """start + step · bits, for each element."""
    upper = step << Uint32(8)
    return [Int32(add_product_of_half(word, b, start)) for word in found.numbers for b in (step, upper)]
