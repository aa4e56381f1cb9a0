"""The scale table of the fast path: in shared memory, one entry for each E4M3 code.

An entry starts with 1 / (global scale · scale) in fp32. Where no instruction converts to E2M1, it is times 2⁻¹⁴, and a
little smaller under scales that have ties which go down (:mod:`.fast_path` gives the reason).

4/6 has three more words (:class:`TableEntry`; :mod:`.four_six_fast_path` derives weight and margin). A NaN as weight or
margin makes every comparison false: where ties spoil the entry, where a scale is so small that it was rounded too much,
and where no entry is usable.
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
# 4/6: bytes from the 6's entries to the 4's
FOURS = 16 * ENTRIES
# the unit of products in binary16, in which E2M1's smallest normal value is the smallest normal value
UNIT = 2.0**-14
# lowered by more than roundings can make up for, and by less than the distance of other elements from a tie
_LOWERED_UNIT, _NEAR = UNIT * (1 - 2.0**-22), 2.0**-20
# the most by which values below a tie lie below it that are truncated to the last binary16 value before it, and more
_BESIDE = 2.0**-8
# wanted scales in this range are neither clipped nor rounded so far that a product would exceed E2M1's range; and the
# first code from which on that holds
LEAST_WANTED, LARGEST_WANTED = 3.5 * 2.0**-9, 464.0
_FIRST_CODE = 4
# up to this global scale, the reciprocals of scales times UNIT are normal
_PLAIN_GLOBAL_SCALE = 2.0**100
# bits that x's significand lacks in fp32
_SPARE_BITS = {"bfloat16": 16, "float16": 13}
# 4/6: margins as parts of the weight, under scales without near ties, and under other scales
_MARGINS = {
    "mse": (2 * (80 * 2.0**-24) ** 2 * 2.0**16, 2 * (248 * 2.0**-24) ** 2 * 2.0**16),
    "mae": (320 * 2.0**-24, 992 * 2.0**-24),
    "abs_max": (20 * 2.0**-24, 62 * 2.0**-24),
}
# which codes are raised, as the bits of them that are added: none (the sign alone, so that -0 stays), odd, nonzero ones
NONE, ODD, NONZERO = 0x80008000, 0x82008200, CODE_AND_SIGN
# 2**-9 in f16x2, the factor of those bits: an odd code's bits become a unit in the last place of binary16, or half of
# one, which is as good where all lower bits are ones
RAISING = 0x18001800
_NAN = float("nan")


class TableEntry(NamedTuple):
    """An entry for 4/6.

    reciprocal: 1 / (global scale · scale), as above. weight: the factor of the error: the scale, or its square for
    squares. margin: the part of a difference of two weighted errors that rounding under this scale may cause. raised:
    the bits of a code that, times ``RAISING``, are added to it where all its lower bits are ones, under scales that
    have both ties that go up and ties that go down.
    """

    reciprocal: Float32
    weight: Float32
    margin: Float32
    raised: Uint32


def load_entry(address: Int32) -> TableEntry:
    """The entry for 4/6 at ``address`` in shared memory."""
    reciprocal, weight, margin, raised = load_shared(address, 16)
    return TableEntry(f32_from_bits(reciprocal), f32_from_bits(weight), f32_from_bits(margin), raised)


class _NearTie(NamedTuple):
    """Elements near one kind of tie. up, down: whether an element may be a tie, or almost one, that must go up, or
    down; beside: whether one that is not a tie may be truncated to the binary16 value before it."""

    up: Boolean
    down: Boolean
    beside: Boolean


class _Ties(NamedTuple):
    """The ties under a scale. any_up: whether some, or near ones, must go up; lowered: whether the reciprocal is to be
    lowered, since some must go down; mask: the entry's ``raised``; spoiled: whether no mask is right."""

    any_up: Boolean
    lowered: Boolean
    mask: Uint32
    spoiled: Boolean


def _near(config: QuantizeConfig, divisor: Float32, inverse: Float32, kind: int) -> _NearTie:
    """The ties of elements of a 16-bit type times ``inverse`` = 1 / ``divisor``.

    The ties 1/4 (kind 0), 5/4, 5/2 and 5 (kind 1) go down; 3/4 (2), 7/4 and 7/2 (3) go up, as every tie does that is
    truncated and rounded half up.
    """
    tie, spare = 1.0 + kind / 4, _SPARE_BITS[config.dtype]
    bits = f32_bits(mul_rn(divisor, Float32(tie))) + Uint32(1 << (spare - 1))
    significand = f32_from_bits(bits & Uint32(0xFFFFFFFF << spare & 0xFFFFFFFF))
    above = sub_rn(mul_rn(significand, inverse), Float32(tie))
    near = abs_f32(above) < Float32(_NEAR)
    over = above >= Float32(0.0) if kind >= 2 else above > Float32(0.0)
    return _NearTie(near & over, near & ~over, (above < Float32(0.0)) & (above > Float32(-_BESIDE)))


def _ties(config: QuantizeConfig, divisor: Float32, inverse: Float32) -> _Ties:
    """The ties under one scale.

    In f16 the values next to a tie are truncated to the same binary16 value. The definition then encodes all elements.
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
    """1 / (global scale · value) with nearly one rounding. ``inverse`` is 1 / ``divisor``, the rounded product."""
    lost = fma_rn(global_scale, value, -divisor)
    remainder = fma_rn(-lost, inverse, fma_rn(-divisor, inverse, Float32(1.0)))
    return fma_rn(remainder, inverse, inverse)


class _WeightAndMargins(NamedTuple):
    """The bits of an entry's weight, and of its margins for the 6 and for the 4."""

    weight: Uint32
    six: Uint32
    four: Uint32


def _weight_and_margins(
    config: QuantizeConfig, code: Int32, value: Float32, inexact: Boolean, unusable: Boolean
) -> _WeightAndMargins:
    """Weight and margins of an entry for 4/6. inexact: whether the reciprocal is not the refined one."""
    not_weight = cutlass.select_(unusable | ((code > 0) & (code < _FIRST_CODE)), Float32(_NAN), Float32(0.0))
    unit = UNIT if config.rounds_in_f16 else 1.0
    plain, other = _MARGINS[config.choice]
    weight = value
    if config.choice == "mse":
        weight, unit = mul_rn(value, value), unit * unit
    margin = mul_rn(weight, cutlass.select_(inexact, Float32(other * unit), Float32(plain * unit)))
    # a block of zeros is certain
    margin = cutlass.select_(code == 0, Float32(-1.0), margin)
    # if the 6's scale is the largest one, the 4's is the same
    of_six = cutlass.select_(code == _LARGEST_CODE, Float32(-float("inf")), margin)
    return _WeightAndMargins(*(f32_bits(add_rn(part, not_weight)) for part in (weight, of_six, margin)))


@cute.jit
def fill_table(config: cutlass.Constexpr, smem: SmemAllocator, factor: GlobalFactor, thread: Int32) -> ScaleTable:
    """Allocates the table and writes the entries of all scales, by all threads of a CTA together.

    With one candidate scale, the table has plain reciprocals, for conversions that heed ties, where under any scale
    some ties go up and others down, or where the global scale is too large.
    """
    threads = Int32(WARP * config.warps)
    size = 16 if config.choice else 4
    # (ENTRIES) of ``size`` bytes, for 4/6 twice; and (WARPS): whether a warp has found ties of both kinds
    tables = 2 if config.choice else 1
    table = smem.allocate_array(cutlass.Uint8, ENTRIES * size * tables, byte_alignment=16).toint()
    flags = smem.allocate_array(cutlass.Uint32, config.warps, byte_alignment=16).toint()
    usable = is_usable(factor)
    found = Int32(0)
    for code in cutlass.range(thread, ENTRIES, threads, unroll=1):
        value = scale_value(code)
        divisor = mul_rn(factor.value, value)
        # the reciprocals of zero and NaN are not kept, and would take long
        inverse = rcp_rn(cutlass.select_((code > 0) & (code < NAN_CODE), divisor, factor.value))
        entry, raised, unusable, inexact = inverse, Uint32(NONE), ~usable, Boolean(True)
        if cutlass.const_expr(config.rounds_in_f16):
            ties = _ties(config, divisor, inverse)
            raised, unusable, inexact = ties.mask, ties.spoiled | ~usable, ties.any_up | ties.lowered
            if cutlass.const_expr(config.choice != ""):
                entry = cutlass.select_(inexact, inverse, _refined(factor.value, value, divisor, inverse))
            entry = entry * cutlass.select_(ties.lowered, Float32(_LOWERED_UNIT), Float32(UNIT))
            found = cutlass.select_((raised != Uint32(NONE)) & (code < NAN_CODE), Int32(1), found)
        # all elements are zero under a scale of zero; 4/6 recognises its entry by the sign
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
    """The value of an E4M3 code."""
    return f16x2_to_f32(e4m3x2_to_f16x2(Uint16(code)))[0]


def is_usable(factor: GlobalFactor) -> Boolean:
    """Whether the fast path works under this global scale."""
    return (factor.value <= Float32(_PLAIN_GLOBAL_SCALE)) & (factor.valid != 0)


def largest_wanted(usable: Boolean) -> Float32:
    """The largest wanted scale of the fast path."""
    return cutlass.select_(usable, Float32(LARGEST_WANTED), Float32(-1.0))
