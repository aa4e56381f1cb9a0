"""A block of 16 elements of a 16-bit type under an E4M3 scale: the usual way, cheaper than the definition's steps.

It gives the same bits, or says that it might not; the kernel then goes the exact way (:mod:`.quantize_exact`).

* What depends on a scale alone is looked up in shared memory, in a table with an entry for each E4M3 code.
* Where no instruction converts to E2M1, products y = x · (1 / (global scale · scale)), times 2⁻¹⁴, are cut to binary16,
  in which E2M1's codes are bits 9 to 11, subnormals included; half a unit is added, and that is rounding, except where
  y is exactly a tie, which must go to the even code. y comes from an x of 8 (bf16) or 11 (f16) significant bits: only
  one significand can give a given tie. It is found by multiplying, and tried, for each scale. With scales under
  which only those ties are possible that go down, everything is multiplied by a little less.
* 4/6 does not compare two errors but computes their difference: with a = element · scale of either candidate, without
  the global scale, and x′ = x / global scale, it is Σ a₆² − Σ a₄² − 2 Σ (a₆ − a₄) x′. Elements, their squares and
  a₆ − a₄ are exact in binary16; the difference decides where it is larger than all roundings together.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16, Uint32

from ..ptx.convert import e2m1x8_to_f16x2, e4m3x2_to_f16x2, f16x2_to_f32
from ..ptx.encode import (
    CODE_AND_SIGN,
    HALF_UNIT,
    abs_f32,
    add_by_fma,
    add_rn,
    bf16x2_to_f32_by_product,
    f32_bits,
    f32_from_bits,
    f32_to_e2m1x8,
    f32x2_to_e4m3x2,
    f32x2_to_f16x2_rz,
    fma_rn,
    mul_rn,
    pack_e2m1_halves,
    prmt,
    rcp_rn,
    scaled_to_e2m1x8,
    sub_rn,
)
from ..ptx.fma import fma_f16x2, mul_f16x2
from ..ptx.memory import load_shared, store_shared
from .arith import div, mod
from .quantize_config import WARP, QuantizeConfig
from .quantize_exact import to_f32, wanted_scale

# an entry: 1 / (global scale · scale) · unit in fp32, negative where ties spoil it; the scale in both halves. After the
# entries there is a word for each scale: what is added where ties that go up are to be raised.
ENTRIES, ENTRY_BYTES, NAN_CODE = 128, 8, 0x7F
TABLE_BYTES = ENTRIES * (ENTRY_BYTES + 4)
# products are times this in binary16, where the smallest normal number then is E2M1's; 2**14 undoes it
_UNIT, _UNDO_F16X2 = 2.0**-14, 0x74007400
_RAISE_F16X2, _ONE_F16X2 = 0x50005000, 0x3C003C00
# less by more than roundings can make up, and by less than elements that are not ties are away from them
_LOWERED_UNIT, _NEAR = 2.0**-14 * (1 - 2.0**-22), 2.0**-20
# how far below a tie numbers are cut to the last number in binary16 before it, and more
_BESIDE = 2.0**-8
# scales wanted in this range are not cut off, nor rounded so far that a product would round to more than E2M1 has
_LEAST_WANTED, _LARGEST_WANTED = 3.5 * 2.0**-9, 464.0
# global scales up to this keep the reciprocals of scales times _UNIT normal
_PLAIN_GLOBAL_SCALE = 2.0**100
# bits of a significand in fp32 that x does not have
_SPARE_BITS = {"bfloat16": 16, "float16": 13}
# 4/6, squares: differences below this part of Σ a₆² are not decided; all roundings, the definition's too, stay below
_LEAST_PART = 2.0**-19
# 4/6, magnitudes: errors below this, in units of the scale, are not decided, nor differences below this part
_LEAST_ERROR, _LEAST_DIFFERENCE = 2.0**-3, 2.0**-12


def _near(config: QuantizeConfig, divisor: Float32, inverse: Float32, tie: float) -> tuple:
    """Whether an element of a 16-bit type times ``inverse`` = 1 / ``divisor`` may be a tie; whether almost; whether
    an element that is not may be cut to the number before the tie in binary16."""
    spare = _SPARE_BITS[config.dtype]
    bits = f32_bits(mul_rn(divisor, Float32(tie))) + Uint32(1 << (spare - 1))
    significand = f32_from_bits(bits & Uint32(0xFFFFFFFF << spare & 0xFFFFFFFF))
    above = sub_rn(mul_rn(significand, inverse), Float32(tie))
    distance = abs_f32(above)
    exact = above == Float32(0.0)
    beside = (above < Float32(0.0)) & (above > Float32(-_BESIDE))
    return exact, (distance < Float32(_NEAR)) & (distance > Float32(0.0)), beside


@cute.jit
def fill_table(config: cutlass.Constexpr, table: Int32, flags: Int32, global_scale: Float32, thread: Int32):
    """Writes the entries of all scales to shared memory at ``table``; all threads of a block do this together.

    Returns whether ties spoil it for any scale (or the global scale is too large). ``flags``: a word for each warp.
    Where 4/6 does not tell the scales apart, the table then has plain reciprocals for :func:`_encode`.
    """
    threads = Int32(WARP * config.warps)
    found = Int32(0)
    for code in cutlass.range(thread, ENTRIES, threads, unroll=1):
        pair = e4m3x2_to_f16x2(Uint16(code))
        value = f16x2_to_f32(pair)[0]
        divisor = mul_rn(global_scale, value)
        inverse = rcp_rn(divisor)
        entry = inverse
        if cutlass.const_expr(config.sound_ties):
            # of ties 1/4, 5/4, 5/2 and 5 go down; 3/4, 7/4 and 7/2 go up, as all do that are cut and rounded half up
            ties = [_near(config, divisor, inverse, tie) for tie in (1.0, 1.25, 1.5, 1.75)]
            down, up = ties[0][0] | ties[1][0], ties[2][0] | ties[3][0]
            almost = ties[0][1] | ties[1][1] | ties[2][1] | ties[3][1]
            raised = down & up
            spoiled = down & almost
            if cutlass.const_expr(config.dtype == "bfloat16"):
                spoiled = spoiled | (raised & (ties[2][2] | ties[3][2]))
            else:
                spoiled = spoiled | raised
            entry = inverse * cutlass.select_(down, Float32(_LOWERED_UNIT), Float32(_UNIT))
            entry = cutlass.select_(spoiled, -entry, entry)
            found = cutlass.select_((spoiled | raised) & (code < NAN_CODE), Int32(1), found)
            if cutlass.const_expr(config.choice != ""):
                mask = cutlass.select_(raised, Uint32(0x00010001), Uint32(0))
                store_shared(table + ENTRIES * ENTRY_BYTES + code * 4, [mask])
        # everything is zero under a scale of zero
        entry = cutlass.select_(value == Float32(0.0), Float32(0.0), entry)
        store_shared(table + code * ENTRY_BYTES, [f32_bits(entry), prmt(pair, pair, 0x1010)])
    tied = Int32(0)
    if cutlass.const_expr(config.sound_ties):
        found = cutlass.select_(global_scale > Float32(_PLAIN_GLOBAL_SCALE), Int32(1), found)
        if cute.arch.vote_any_sync(found != 0):
            found = Int32(1)
        if mod(thread, WARP) == 0:
            store_shared(flags + div(thread, WARP) * 4, [Uint32(found)])
    cute.arch.sync_threads()
    if cutlass.const_expr(config.sound_ties):
        for w in cutlass.range_constexpr(config.warps):
            tied = tied | Int32(load_shared(flags + 4 * w, 4)[0])
        if cutlass.const_expr(not config.encodes_winner):
            if tied != 0:
                for code in cutlass.range(thread, ENTRIES, threads, unroll=1):
                    value = f16x2_to_f32(e4m3x2_to_f16x2(Uint16(code)))[0]
                    entry = rcp_rn(mul_rn(global_scale, value))
                    entry = cutlass.select_(value == Float32(0.0), Float32(0.0), entry)
                    store_shared(table + code * ENTRY_BYTES, [f32_bits(entry)])
            cute.arch.sync_threads()
    return tied


def largest_wanted(config: QuantizeConfig, global_scale: Float32) -> Float32:
    """Up to which wanted scale the usual way goes: none if the global scale is too large for it."""
    plain = global_scale <= Float32(_PLAIN_GLOBAL_SCALE)
    return cutlass.select_(plain, Float32(_LARGEST_WANTED), Float32(-1.0))


def _codes(
    config: QuantizeConfig, x: list[Float32], factor: Float32, one: Uint32
) -> tuple[list[Uint32], list[Float32]]:
    """Codes of x · factor: halves where there is no conversion, else words; and the products."""
    y = [mul_rn(a, factor) for a in x]
    if config.sound_ties:
        cut = [f32x2_to_f16x2_rz(low, high) for low, high in zip(y[0::2], y[1::2])]
        return [add_by_fma(half, HALF_UNIT, one) for half in cut], y
    return [f32_to_e2m1x8(y[i : i + 8]) for i in (0, 8)], y


def _elements(config: QuantizeConfig, codes: list[Uint32]) -> list[Uint32]:
    """The values of codes in f16x2, times ``_UNIT`` where there is no conversion."""
    if config.sound_ties:
        return [half & Uint32(CODE_AND_SIGN) for half in codes]
    return [pair for word in codes for pair in e2m1x8_to_f16x2(word, config.arch)]


@cute.jit
def _encode(config: cutlass.Constexpr, x: tuple, reciprocal: Float32, quick: tuple):
    """Two words of codes of x · reciprocal, an entry of the table: exactly if ties are possible."""
    _, _, units, tied = quick
    first, second = Uint32(0), Uint32(0)
    if tied != 0:
        first = Uint32(scaled_to_e2m1x8(x[:8], reciprocal, config.arch))
        second = Uint32(scaled_to_e2m1x8(x[8:], reciprocal, config.arch))
    else:
        first, second = _pack(config, _codes(config, list(x), reciprocal, units[0])[0])
    return first, second


def _pack(config: QuantizeConfig, codes: list[Uint32]) -> list[Uint32]:
    return [pack_e2m1_halves(codes[i : i + 4]) for i in (0, 4)] if config.sound_ties else codes


@cute.jit
def _pack_winner(config: cutlass.Constexpr, taken: tuple, place: Uint32, quick: tuple):
    """Two words of the codes that 4/6 took; ``place``: of their scale's entry in the table."""
    table, _, _, tied = quick
    if cutlass.const_expr(config.sound_ties):
        halves = cute.make_rmem_tensor(8, Uint32)
        for i in cutlass.range_constexpr(8):
            halves[i] = taken[i]
        if tied != 0:
            mask = load_shared(table + ENTRIES * ENTRY_BYTES + Int32(place >> Uint32(1)), 4)[0]
            for i in cutlass.range_constexpr(8):
                # an odd code, and all ones after it
                halves[i] = taken[i] + ((taken[i] >> Uint32(9)) & mask)
        first, second = _pack(config, [halves[i] for i in range(8)])
    else:
        first, second = taken
    return first, second


def _compare_squares(config: QuantizeConfig, x: list[Float32], q: list, entries: list, inverse: Float32) -> tuple:
    """(whether 4 is better, whether that is certain): the sign of the difference of the errors."""
    if config.sound_ties:
        q = [[mul_f16x2(pair, Uint32(_UNDO_F16X2)) for pair in pairs] for pairs in q]
    six, four = entries[0][1], entries[1][1] ^ Uint32(0x80008000)
    squares = [mul_f16x2(pairs[0], pairs[0]) for pairs in q]
    chains: list = [None] * 4
    for i, (a, b) in enumerate(zip(*q)):
        if i:
            squares = [fma_f16x2(pair, pair, total) for pair, total in zip((a, b), squares)]
        difference = f16x2_to_f32(fma_f16x2(a, six, mul_f16x2(b, four)))
        for half in range(2):
            chain = (2 * i + half) % 4
            term = x[2 * i + half]
            old = chains[chain]
            chains[chain] = mul_rn(difference[half], term) if old is None else fma_rn(difference[half], term, old)
    product = add_rn(add_rn(chains[0], chains[1]), add_rn(chains[2], chains[3]))
    weighted = []
    for pair, (_, scale) in zip(squares, entries):
        low, high = f16x2_to_f32(pair)
        value = f16x2_to_f32(scale)[0]
        weighted.append(mul_rn(add_rn(low, high), mul_rn(value, value)))
    difference = fma_rn(product, mul_rn(inverse, Float32(-2.0)), sub_rn(weighted[0], weighted[1]))
    # false where something is not a number
    return difference > Float32(0.0), abs_f32(difference) > mul_rn(weighted[0], Float32(_LEAST_PART))


def _compare_sums(config: QuantizeConfig, q: list, y: list, entries: list) -> tuple:
    """(whether 4 is better, whether that is certain) of sums of magnitudes, computed with few roundings."""
    totals, errors = [], []
    for pairs, products, (_, scale) in zip(q, y, entries):
        difference = [sub_rn(a, b) for a, b in zip((v for pair in pairs for v in f16x2_to_f32(pair)), products)]
        total = abs_f32(difference[0])
        for d in difference[1:]:
            total = add_rn(total, abs_f32(d))
        errors.append(total)
        totals.append(mul_rn(total, f16x2_to_f32(scale)[0]))
    unit = _UNIT if config.sound_ties else 1.0
    distance = abs_f32(sub_rn(totals[0], totals[1]))
    least = cute.arch.fmin(errors[0], errors[1])
    clear = (distance > mul_rn(cute.arch.fmax(totals[0], totals[1]), Float32(_LEAST_DIFFERENCE))) & (
        least > Float32(_LEAST_ERROR * unit)
    )
    return totals[1] < totals[0], clear


def _compare_largest(config: QuantizeConfig, x: list[Float32], q: list, entries: list, factor: tuple) -> tuple:
    """(whether 4 is better, whether that is certain) of the largest magnitudes, step by step: they are often equal."""
    _, _, mantissa, shift = factor
    # elements times scales are exact in binary16, with 2**-14 as with 2**5 more
    raised, unit = (_RAISE_F16X2, 2.0**9) if config.sound_ties else (_ONE_F16X2, 1.0)
    scaled = [mul_rn(a, shift) for a in x]
    errors = []
    for pairs, (_, scale) in zip(q, entries):
        weight = mul_f16x2(scale, Uint32(raised))
        values = [v for pair in pairs for v in f16x2_to_f32(mul_f16x2(pair, weight))]
        difference = [sub_rn(mul_rn(v, mul_rn(mantissa, Float32(unit))), a) for v, a in zip(values, scaled)]
        largest = abs_f32(difference[0])
        for d in difference[1:]:
            largest = cute.arch.fmax(largest, abs_f32(d))
        errors.append(largest)
    return errors[1] < errors[0], (entries[0][0] >= Float32(0.0)) & (entries[1][0] >= Float32(0.0))


def usual(config: QuantizeConfig, words: list[Uint32], largest: Float32, factor: tuple, quick: tuple) -> tuple:
    """(scale code, two words of codes, whether those may be wrong, whether only because of ties).

    quick: address of the table; :func:`largest_wanted`; (1, 2**16), unknown to the compiler: the integer pipe has half
    the lanes of the FMA pipe and more to do, so that sums and shifts are made products; :func:`fill_table`'s result.
    """
    table, limit, units, tied = quick
    if config.dtype == "bfloat16":
        x = [a for word in words for a in bf16x2_to_f32_by_product(word, units[1])]
    else:
        x = to_f32(config, words)
    wanted = wanted_scale(config, largest, factor[1])
    if not config.choice:
        if config.min_scale:
            wanted = cute.arch.fmax(wanted, Float32(config.min_scale))
        code = Uint32(f32x2_to_e4m3x2(wanted, Float32(0.0)))
        reciprocal = f32_from_bits(load_shared(table + Int32(code << Uint32(3)), 4)[0])
        if not config.sound_ties:
            first, second = _codes(config, x, reciprocal, units[0])[0]
            return code, first, second, Int32(0), Int32(0)
        first, second = _encode(config, tuple(x), reciprocal, quick)
        inside = (wanted <= limit) & (wanted >= Float32(_LEAST_WANTED)) | (tied != 0)
        return code, first, second, cutlass.select_(inside, Int32(0), Int32(1)), Int32(0)
    pair = Uint32(f32x2_to_e4m3x2(wanted, mul_rn(wanted, Float32(1.5))))
    places = [(pair & Uint32(0xFF)) << Uint32(3), (pair >> Uint32(5)) & Uint32(0x7F8)]
    entries = []
    for place in places:
        bits, scale = load_shared(table + Int32(place), 8)
        entries.append((f32_from_bits(bits), scale))
    found = [_codes(config, x, abs_f32(entry[0]), units[0]) for entry in entries]
    q = [_elements(config, codes) for codes, _ in found]
    if config.choice == "mse":
        take_four, clear = _compare_squares(config, x, q, entries, factor[1])
    elif config.choice == "mae":
        take_four, clear = _compare_sums(config, q, [y for _, y in found], entries)
    else:
        take_four, clear = _compare_largest(config, x, q, entries, factor)
    inside = clear & (wanted <= limit)
    if config.sound_ties:
        inside = inside & (wanted >= Float32(_LEAST_WANTED))
    taken = [Uint32(cutlass.select_(take_four, b, a)) for a, b in zip(*(codes for codes, _ in found))]
    place = Uint32(cutlass.select_(take_four, places[1], places[0]))
    first, second = _pack_winner(config, tuple(taken), place, quick)
    reciprocal = cutlass.select_(take_four, entries[1][0], entries[0][0])
    spoiled = cutlass.select_(reciprocal < Float32(0.0), Int32(1), Int32(0)) if config.sound_ties else Int32(0)
    return place >> Uint32(3), first, second, cutlass.select_(inside, Int32(0), Int32(1)), spoiled
