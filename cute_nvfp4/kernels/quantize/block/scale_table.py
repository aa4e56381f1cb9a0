"""What the fast path looks up for a scale: a table in shared memory, an entry for each E4M3 code.

An entry starts with 1 / (global scale · scale) in fp32. Where no instruction converts to E2M1, it is times 2⁻¹⁴, and a
little less under scales under which ties are possible that go down (:mod:`.fast_path` says why).

For 4/6 three words follow (:class:`TableEntry`; :mod:`.four_six_fast_path` derives weight and margin). NaN as weight
or margin makes every comparison false: where ties spoil the entry, where too small a scale was rounded too much, and
where no entry is good.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint16, Uint32
from cutlass.memory import SmemAllocator

from ....ptx.arithmetic import abs_f32, add_rn, fma_rn, mul_rn, rcp_rn, sub_rn
from ....ptx.convert import e4m3x2_to_f16x2, f16x2_to_f32
from ....ptx.encode import CODE_AND_SIGN
from ....ptx.memory import load_shared, store_shared
from ....ptx.move import f32_bits, f32_from_bits
from ....ptx.warp import max_lanes
from ...arith import div, mod
from ..config import WARP, QuantizeConfig
from .records import GlobalFactor, ScaleTable

ENTRIES, NAN_CODE, _LARGEST_CODE = 128, 0x7F, 0x7E
# 4/6: bytes from the entries for the 6 to those for the 4
FOURS = 16 * ENTRIES
# products are times this in binary16, where the smallest normal number then is E2M1's
UNIT = 2.0**-14
# less by more than roundings can make up, and by less than elements that are not ties are away from them
_LOWERED_UNIT, _NEAR = UNIT * (1 - 2.0**-22), 2.0**-20
# how far below a tie numbers are cut to the last number in binary16 before it, and more
_BESIDE = 2.0**-8
# scales wanted in this range are not cut off, nor rounded so far that a product would round to more than E2M1 has; and
# the code from which on all of them are so
LEAST_WANTED, LARGEST_WANTED = 3.5 * 2.0**-9, 464.0
_FIRST_CODE = 4
# global scales up to this keep the reciprocals of scales times UNIT normal
_PLAIN_GLOBAL_SCALE = 2.0**100
# bits of a significand in fp32 that x does not have
_SPARE_BITS = {"bfloat16": 16, "float16": 13}
# 4/6: parts of the weight, under scales without ties that are nearly met, and under others
_MARGINS = {
    "mse": (2 * (80 * 2.0**-24) ** 2 * 2.0**16, 2 * (248 * 2.0**-24) ** 2 * 2.0**16),
    "mae": (320 * 2.0**-24, 992 * 2.0**-24),
    "abs_max": (20 * 2.0**-24, 62 * 2.0**-24),
}
# raised codes, by the bits of them that are added: none (the sign alone, so that -0 stays), odd ones, all but zero
NONE, ODD, NONZERO = 0x80008000, 0x82008200, CODE_AND_SIGN
# 2**-9 in f16x2, by which those bits are multiplied: an odd code's then is a unit in the last place of binary16, or
# half of one, which is as good under all ones
RAISING = 0x18001800
_NAN = float("nan")


class TableEntry(NamedTuple):
    """An entry for 4/6.

    reciprocal: 1 / (global scale · scale), see above. weight: of the error: the scale, or its square for squares.
    margin: how much of the difference between two weighted errors may be due to rounding under this scale. raised:
    which codes with all ones after them are to be raised, where some ties go up and others down under one scale: the
    bits of a code that, times ``RAISING``, are added to it.
    """

    reciprocal: Float32
    weight: Float32
    margin: Float32
    raised: Uint32


def load_entry(address: Int32) -> TableEntry:
    """The entry for 4/6 at an address in shared memory."""
    reciprocal, weight, margin, raised = load_shared(address, 16)
    return TableEntry(f32_from_bits(reciprocal), f32_from_bits(weight), f32_from_bits(margin), raised)


class _NearTie(NamedTuple):
    """Whether an element may be a tie of one kind, or almost, and must go up; or down; whether one that is not a tie
    may be cut to the number before it in binary16."""

    up: Boolean
    down: Boolean
    beside: Boolean


class _Ties(NamedTuple):
    """Under a scale, whether elements that are ties, or almost, must go up; whether the entry is to be lowered, as any
    must go down; the entry's ``raised``; and whether no mask does it."""

    any_up: Boolean
    lowered: Boolean
    mask: Uint32
    spoiled: Boolean


def _near(config: QuantizeConfig, divisor: Float32, inverse: Float32, kind: int) -> _NearTie:
    """The ties of elements of a 16-bit type times ``inverse`` = 1 / ``divisor``.

    Ties 1/4 (kind 0), 5/4, 5/2 and 5 (1) go down; 3/4 (2), 7/4 and 7/2 (3) go up, as all do that are cut and rounded
    half up.
    """
    tie, spare = 1.0 + kind / 4, _SPARE_BITS[config.dtype]
    bits = f32_bits(mul_rn(divisor, Float32(tie))) + Uint32(1 << (spare - 1))
    significand = f32_from_bits(bits & Uint32(0xFFFFFFFF << spare & 0xFFFFFFFF))
    above = sub_rn(mul_rn(significand, inverse), Float32(tie))
    near = abs_f32(above) < Float32(_NEAR)
    over = above >= Float32(0.0) if kind >= 2 else above > Float32(0.0)
    return _NearTie(near & over, near & ~over, (above < Float32(0.0)) & (above > Float32(-_BESIDE)))


def _ties(config: QuantizeConfig, divisor: Float32, inverse: Float32) -> _Ties:
    """How elements under one scale round.

    There are too many f16 numbers: those next to a tie are cut to the same binary16. All is encoded step by step then.
    """
    up, down, beside = zip(*(_near(config, divisor, inverse, kind) for kind in range(4)))
    any_up, any_down = up[0] | up[1] | up[2] | up[3], down[0] | down[1] | down[2] | down[3]
    both = any_up & any_down
    mask = cutlass.select_(both, cutlass.select_(up[1], Uint32(NONZERO), Uint32(ODD)), Uint32(NONE))
    if config.dtype == "float16":
        return _Ties(any_up, any_down & ~any_up, mask, Boolean(False))
    no_mask = up[0] | down[2] | down[3] | beside[2] | beside[3] | (up[1] & beside[1])
    return _Ties(any_up, any_down, mask, both & no_mask)


def _refined(global_scale: Float32, value: Float32, divisor: Float32, inverse: Float32) -> Float32:
    """1 / (global scale · value), rounded nearly once; ``inverse`` is 1 / ``divisor``, which is the product rounded."""
    lost = fma_rn(global_scale, value, -divisor)
    remainder = fma_rn(-lost, inverse, fma_rn(-divisor, inverse, Float32(1.0)))
    return fma_rn(remainder, inverse, inverse)


class _WeightAndMargins(NamedTuple):
    """Bits of the weight of an entry for 4/6, and of its margins for the 6 and for the 4."""

    weight: Uint32
    six: Uint32
    four: Uint32


def _weight_and_margins(
    config: QuantizeConfig, code: Int32, value: Float32, inexact: Boolean, unusable: Boolean
) -> _WeightAndMargins:
    """Weight and margins of an entry for 4/6; ``inexact``: whether the reciprocal is not the refined one."""
    not_weight = cutlass.select_(unusable | ((code > 0) & (code < _FIRST_CODE)), Float32(_NAN), Float32(0.0))
    unit = UNIT if config.rounds_in_f16 else 1.0
    plain, other = _MARGINS[config.choice]
    weight = value
    if config.choice == "mse":
        weight, unit = mul_rn(value, value), unit * unit
    margin = mul_rn(weight, cutlass.select_(inexact, Float32(other * unit), Float32(plain * unit)))
    # zeros are certain to be zeros
    margin = cutlass.select_(code == 0, Float32(-1.0), margin)
    # and if the 6's scale is the largest, the 4's is the same
    of_six = cutlass.select_(code == _LARGEST_CODE, Float32(-float("inf")), margin)
    return _WeightAndMargins(*(f32_bits(add_rn(part, not_weight)) for part in (weight, of_six, margin)))


@cute.jit
def fill_table(config: cutlass.Constexpr, smem: SmemAllocator, factor: GlobalFactor, thread: Int32) -> ScaleTable:
    """Allocates the table and writes the entries of all scales; all threads of a CTA do this together.

    Where ties go both ways under any scale (or the global scale is too large) and only one scale is tried, the table
    has plain reciprocals, which are for conversions that heed ties.
    """
    threads = Int32(WARP * config.warps)
    size = 16 if config.choice else 4
    # (ENTRIES) of ``size`` bytes, for 4/6 twice; and (WARPS): what each warp found of ties
    tables = 2 if config.choice else 1
    table = smem.allocate_array(cutlass.Uint8, ENTRIES * size * tables, byte_alignment=16).toint()
    flags = smem.allocate_array(cutlass.Uint32, config.warps, byte_alignment=16).toint()
    usable = is_usable(factor)
    found = Int32(0)
    for code in cutlass.range(thread, ENTRIES, threads, unroll=1):
        value = scale_value(code)
        divisor = mul_rn(factor.value, value)
        # of zero and NaN nothing is kept; their reciprocals would take long
        inverse = rcp_rn(cutlass.select_((code > 0) & (code < NAN_CODE), divisor, factor.value))
        entry, raised, unusable, inexact = inverse, Uint32(NONE), ~usable, Boolean(True)
        if cutlass.const_expr(config.rounds_in_f16):
            ties = _ties(config, divisor, inverse)
            raised, unusable, inexact = ties.mask, ties.spoiled | ~usable, ties.any_up | ties.lowered
            if cutlass.const_expr(config.choice != ""):
                entry = cutlass.select_(inexact, inverse, _refined(factor.value, value, divisor, inverse))
            entry = entry * cutlass.select_(ties.lowered, Float32(_LOWERED_UNIT), Float32(UNIT))
            found = cutlass.select_((raised != Uint32(NONE)) & (code < NAN_CODE), Int32(1), found)
        # everything is zero under a scale of zero; for 4/6 the sign tells it apart
        nothing = Float32(-0.0 if config.choice else 0.0)
        words = [f32_bits(cutlass.select_(value == Float32(0.0), nothing, entry))]
        if cutlass.const_expr(config.choice != ""):
            parts = _weight_and_margins(config, code, value, inexact, unusable)
            store_shared(table + FOURS + code * size, [*words, parts.weight, parts.four, raised])
            words = [*words, parts.weight, parts.six, raised]
        store_shared(table + code * size, words)
    all_found = Int32(0)
    if cutlass.const_expr(config.rounds_in_f16):
        found = cutlass.select_(factor.value > Float32(_PLAIN_GLOBAL_SCALE), Int32(1), found)
        any_found = Uint32(max_lanes(Uint32(found)))
        if mod(thread, WARP) == 0:
            store_shared(flags + div(thread, WARP) * 4, [any_found])
    cute.arch.sync_threads()
    if cutlass.const_expr(config.rounds_in_f16):
        for w in cutlass.range_constexpr(config.warps):
            all_found = all_found | Int32(load_shared(flags + 4 * w, 4)[0])
        if cutlass.const_expr(config.choice == ""):
            if all_found != 0:
                for code in cutlass.range(thread, ENTRIES, threads, unroll=1):
                    value = scale_value(code)
                    entry = rcp_rn(mul_rn(factor.value, value))
                    entry = cutlass.select_(value == Float32(0.0), Float32(0.0), entry)
                    store_shared(table + code * size, [f32_bits(entry)])
            cute.arch.sync_threads()
    return ScaleTable(table, largest_wanted(usable), all_found)


def scale_value(code: Any) -> Float32:
    """The number that an E4M3 code stands for."""
    return f16x2_to_f32(e4m3x2_to_f16x2(Uint16(code)))[0]


def is_usable(factor: GlobalFactor) -> Boolean:
    """Whether the fast path is possible under this global scale."""
    return (factor.value <= Float32(_PLAIN_GLOBAL_SCALE)) & (factor.valid != 0)


def largest_wanted(usable: Boolean) -> Float32:
    """Up to which wanted scale the fast path goes."""
    return cutlass.select_(usable, Float32(LARGEST_WANTED), Float32(-1.0))
