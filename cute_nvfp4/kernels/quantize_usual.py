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
    max_abs_f32,
    mul_rn,
    pack_e2m1_halves,
    prmt,
    rcp_rn,
    sub_rn,
)
from ..ptx.fma import fma_f16x2, mul_f16x2
from ..ptx.memory import load_shared, store_shared
from .quantize_config import QuantizeConfig
from .quantize_exact import to_f32, wanted_scale

# an entry: 1 / (global scale · scale) · unit in fp32, negative where ties spoil it; the scale in both halves
ENTRIES, ENTRY_BYTES = 128, 8
# products are times this in binary16, where the smallest normal number then is E2M1's; 2**14 undoes it
_UNIT, _UNDO_F16X2 = 2.0**-14, 0x74007400
# less by more than roundings can make up, and by less than elements that are not ties are away from them
_LOWERED_UNIT, _NEAR = 2.0**-14 * (1 - 2.0**-22), 2.0**-20
# scales wanted in this range are not cut off, nor rounded so far that a product would round to more than E2M1 has
_LEAST_WANTED, _LARGEST_WANTED = 3.5 * 2.0**-9, 464.0
# global scales up to this keep the reciprocals of scales times _UNIT normal
_PLAIN_GLOBAL_SCALE = 2.0**100
# bits of a significand in fp32 that x does not have
_SPARE_BITS = {"bfloat16": 16, "float16": 13}
# 4/6, squares: differences below this part of Σ a₆² are not decided; all roundings, the definition's too, stay below
_LEAST_PART = 2.0**-19
# 4/6, other errors: errors below this, in units of the scale, are not decided, nor differences below this part
_LEAST_ERROR, _LEAST_DIFFERENCE = {"mae": 2.0**-3, "abs_max": 2.0**-6}, 2.0**-12


def _near(config: QuantizeConfig, divisor: Float32, inverse: Float32, tie: float) -> tuple:
    """Whether an element of a 16-bit type times ``inverse`` = 1 / ``divisor`` may be a tie; whether almost."""
    spare = _SPARE_BITS[config.dtype]
    bits = f32_bits(mul_rn(divisor, Float32(tie))) + Uint32(1 << (spare - 1))
    significand = f32_from_bits(bits & Uint32(0xFFFFFFFF << spare & 0xFFFFFFFF))
    distance = abs_f32(sub_rn(mul_rn(significand, inverse), Float32(tie)))
    exact = distance == Float32(0.0)
    return exact, (distance < Float32(_NEAR)) & (distance > Float32(0.0))


@cute.jit
def fill_table(config: cutlass.Constexpr, table: Int32, global_scale: Float32, thread: Int32, threads: Int32):
    """Writes the entries of all scales to shared memory at ``table``."""
    for code in cutlass.range(thread, ENTRIES, threads, unroll=1):
        pair = e4m3x2_to_f16x2(Uint16(code))
        value = f16x2_to_f32(pair)[0]
        divisor = mul_rn(global_scale, value)
        inverse = rcp_rn(divisor)
        entry = inverse
        if cutlass.const_expr(config.sound_ties):
            # of ties 1/4, 5/4, 5/2 and 5 go down; 3/4, 7/4 and 7/2 go up, as all do that are cut and rounded half up
            (one, near_one), (five, near_five) = (_near(config, divisor, inverse, tie) for tie in (1.0, 1.25))
            (three, near_three), (seven, near_seven) = (_near(config, divisor, inverse, tie) for tie in (1.5, 1.75))
            down = one | five
            spoiled = down & (three | seven | near_one | near_five | near_three | near_seven)
            entry = inverse * cutlass.select_(down, Float32(_LOWERED_UNIT), Float32(_UNIT))
            entry = cutlass.select_(spoiled, -entry, entry)
        # everything is zero under a scale of zero
        entry = cutlass.select_(value == Float32(0.0), Float32(0.0), entry)
        store_shared(table + code * ENTRY_BYTES, [f32_bits(entry), prmt(pair, pair, 0x1010)])


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


def _pack(config: QuantizeConfig, codes: list[Uint32]) -> list[Uint32]:
    return [pack_e2m1_halves(codes[i : i + 4]) for i in (0, 4)] if config.sound_ties else codes


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


def _compare(config: QuantizeConfig, q: list, y: list, entries: list) -> tuple:
    """(whether 4 is better, whether that is certain) of the other errors, each computed with few roundings."""
    totals, errors = [], []
    for pairs, products, (_, scale) in zip(q, y, entries):
        difference = [sub_rn(a, b) for a, b in zip((v for pair in pairs for v in f16x2_to_f32(pair)), products)]
        total = abs_f32(difference[0])
        for d in difference[1:]:
            total = add_rn(total, abs_f32(d)) if config.choice == "mae" else max_abs_f32(total, d)
        errors.append(total)
        totals.append(mul_rn(total, f16x2_to_f32(scale)[0]))
    unit = _UNIT if config.sound_ties else 1.0
    distance = abs_f32(sub_rn(totals[0], totals[1]))
    least = cute.arch.fmin(errors[0], errors[1])
    clear = (distance > mul_rn(cute.arch.fmax(totals[0], totals[1]), Float32(_LEAST_DIFFERENCE))) & (
        least > Float32(_LEAST_ERROR[config.choice] * unit)
    )
    return totals[1] < totals[0], clear


def usual(config: QuantizeConfig, words: list[Uint32], largest: Float32, factor: tuple, quick: tuple) -> tuple:
    """(scale code, two words of codes, whether those may be wrong, whether only because of ties).

    quick: address of the table, :func:`largest_wanted`, and (1, 2**16), unknown to the compiler: the integer pipe has
    half the lanes of the FMA pipe and more to do, so that sums and shifts are made products.
    """
    table, limit, units = quick
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
        inside = wanted <= limit
        if config.sound_ties:
            inside = inside & (wanted >= Float32(_LEAST_WANTED)) & (reciprocal >= Float32(0.0))
        first, second = _pack(config, _codes(config, x, abs_f32(reciprocal), units[0])[0])
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
    else:
        take_four, clear = _compare(config, q, [y for _, y in found], entries)
    inside = clear & (wanted <= limit)
    if config.sound_ties:
        inside = inside & (wanted >= Float32(_LEAST_WANTED))
    # q and codes pack alike, and q has no other bits
    candidates = q if config.sound_ties else [codes for codes, _ in found]
    first, second = _pack(config, [Uint32(cutlass.select_(take_four, b, a)) for a, b in zip(*candidates)])
    place = Uint32(cutlass.select_(take_four, places[1], places[0]))
    reciprocal = cutlass.select_(take_four, entries[1][0], entries[0][0])
    tied = cutlass.select_(reciprocal < Float32(0.0), Int32(1), Int32(0)) if config.sound_ties else Int32(0)
    return place >> Uint32(3), first, second, cutlass.select_(inside, Int32(0), Int32(1)), tied
