"""The layout of weights for the tensor-core kernels of sm_90a: repacked once, decoded with few instructions.

The decoded weight is operand A of a 16-bit MMA, from registers. Memory is a grid of tiles of 128 rows and 64 columns
along K, (L, row tiles, K tiles, bytes), K innermost, so that a range of K of some rows is contiguous; the number of K
tiles is even, padded with zeros. A tile has the codes of its 8 slabs of 16 rows, and then their scales:

* codes: 32-bit words (SLAB, LOAD, LANE, STEP). A word is what lane 4·g + c holds of A for step s, 16 columns, in a slab
  (PTX ISA, "wgmma, register fragments for m64k16"): registers 0 to 3 are rows g, g + 8, g, g + 8 at columns 2c, 2c + 1
  and (registers 2 and 3) 8 + 2c, 9 + 2c. These are one word of 4-bit codes, or two of 8-bit codes with two registers
  each. A load is sixteen bytes of a lane: its four steps, or two of them.
* scales: bytes (SLAB, ROW g, PAIR of blocks, ROW g or g + 8, BLOCK of the pair). Those of NVFP4 have five bits of
  exponent and three of mantissa, and stand for 2**7 times the scale: fp16 needs a shift, bf16 a shift and an OR. Those
  of MX are UE8M0, which is the exponent of bf16 (2**-127 is a subnormal), or exponents of fp16.

A code in a 16-bit float is its sign, zeros, exponent, mantissa and zeros. E2M1 in bf16 is s0000000 0ee m0…, 2**-126
times its value; in fp16 it is s000eem0…, 2**-14 times its value; subnormals stay right. Only bits need to move.
``PACKINGS`` says how a word becomes registers: each register is the exclusive or of some shifts of the word, masked.
Shifts that fetch each element from one place cannot tile a word. But the map from word to registers is linear over
GF(2), and those chosen here have an inverse, which packing applies. That takes eight instructions for eight 4-bit
elements, where a table, or masks with one place an element, need fifteen; and eight for eight 8-bit elements.

Products with the scales are exact: a scale of NVFP4 has at most four significant bits, E2M1 two, E4M3 four, E5M2 three,
and powers of two one. For NVFP4 they are 2**-7 times the weight. MX with scales of any exponent is first multiplied by
a constant, since 2**127 is the largest power of two in bf16. A block whose scale is zero has zero codes; the sign of a
negative scale goes to the codes. NaN stays NaN; a block of MX that has a NaN or an infinity becomes all NaN. MXFP4 with
scales near one another has exponents of five bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

TILE_ROWS, TILE_K = 128, 64
SLAB_ROWS = 16
"""Rows of a warp's fragment of A; a thread has one row of each half."""
HALF_SLAB = SLAB_ROWS // 2
STEP_K = 16
"""Columns of one MMA."""
STEPS, SLABS = TILE_K // STEP_K, TILE_ROWS // SLAB_ROWS
LANES = 32
LOAD_BYTES = 16
"""Bytes of codes that a lane loads at a time."""


class Shift(NamedTuple):
    """A shift of a word by ``bits``: "left" and "right" fill with zeros, "rotate" rotates to the right."""

    kind: str
    bits: int


class Packing(NamedTuple):
    """How weights of a format are packed for MMAs of ``dtype``.

    element_bits: the bits of a code. block_steps: the steps that share a scale. mask, registers: how a word of codes
    becomes registers of 16-bit pairs, each the exclusive or of shifts of the word, masked. scale_shift: from a scale
    byte to its place in a 16-bit float; scale_bits: bits that are ORed to it; least_scale: the smallest such pattern.
    boost: the power of two that multiplies bf16 elements first. factor: the decoded weight times this is the weight.
    special: the first magnitude code that is NaN or infinity; 0: the format has none.

    exponents: if scales are five-bit exponents, the first and the last whose products with every element are exact and
    finite; None: scales are UE8M0, or E4M3. exponent_bias: their bias. in_rows: the weight is not packed at all
    (``kernels.gemm.packed.rows``). of_fp8: it has the order of ``weight_layout_fp8``, and is decoded to 16 bits.
    """

    dtype: torch.dtype
    element_bits: int
    block_steps: int
    mask: int = 0
    registers: tuple[tuple[Shift, ...], ...] = ()
    scale_shift: int = 0
    scale_bits: int = 0
    least_scale: int = 0
    boost: int = 0
    factor: float = 1.0
    exponents: tuple[int, int] | None = None
    exponent_bias: int = 0
    special: int = 0
    in_rows: bool = False
    of_fp8: bool = False

    @property
    def by_table(self) -> bool:
        """Whether elements are looked up in a table of their block (``weight_layout_fp8``)."""
        return self.dtype is torch.float8_e4m3fn

    @property
    def word_elements(self) -> int:  # of a 32-bit word
        return 32 // self.element_bits

    @property
    def step_words(self) -> int:  # words of codes that a lane has of a step
        return 8 // self.word_elements

    @property
    def slab_code_bytes(self) -> int:
        return SLAB_ROWS * TILE_K * self.element_bits // 8

    @property
    def row_scale_bytes(self) -> int:
        """Bytes of scales of rows g and g + 8 of a slab."""
        return 2 * STEPS // self.block_steps

    @property
    def slab_scale_bytes(self) -> int:
        return HALF_SLAB * self.row_scale_bytes

    @property
    def code_bytes(self) -> int:  # of a tile
        return SLABS * self.slab_code_bytes

    @property
    def scale_bytes(self) -> int:
        return SLABS * self.slab_scale_bytes

    @property
    def tile_bytes(self) -> int:
        return self.code_bytes + self.scale_bytes


_BF16, _FP16, _E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
DTYPES = {"bfloat16": _BF16, "float16": _FP16, "float8_e4m3fn": _E4M3}
_WORD = Shift("left", 0)
_E2M1_BF16 = 0x81C081C0, ((_WORD,), (Shift("left", 6),), (Shift("rotate", 4),), (Shift("left", 2), Shift("right", 6)))
_E2M1_FP16 = (
    0x8E008E00,
    ((Shift("left", 6),), (Shift("left", 9),), (_WORD, Shift("left", 2)), (_WORD, Shift("right", 3))),
)
_E4M3_BF16 = 0x87F087F0, ((_WORD,), (Shift("left", 4), Shift("right", 4)))
_E4M3_FP16 = 0xBF80BF80, ((_WORD,), (Shift("left", 1), Shift("left", 7)))
_E5M2_BF16 = 0x8FE08FE0, ((_WORD,), (Shift("left", 3), Shift("rotate", 8)))
_E5M2_FP16 = 0xFF00FF00, ((_WORD,), (Shift("left", 8),))
_FIVE_BITS = {"scale_shift": 10, "exponent_bias": 27}
_POWERS = {"scale_shift": 7, "least_scale": 0x40}
PACKINGS = {
    "nvfp4": {
        _BF16: Packing(_BF16, 4, 1, *_E2M1_BF16, 4, 0x7000, factor=2.0**7),
        _FP16: Packing(_FP16, 4, 1, *_E2M1_FP16, 7, factor=2.0**7),
        _E4M3: Packing(_E4M3, 4, 1),
    },
    "nvfp4_rows": {_FP16: Packing(_FP16, 4, 1, factor=2.0**7, in_rows=True)},
    "mxfp4_rows": {_BF16: Packing(_BF16, 4, 2, boost=126, in_rows=True)},
    "mxfp4": {_BF16: Packing(_BF16, 4, 2, *_E2M1_BF16, **_POWERS, boost=126)},
    "mxfp4_near": {
        _BF16: Packing(_BF16, 4, 2, *_E2M1_BF16, 7, 0x7000, factor=2.0**7, exponents=(0, 30), exponent_bias=22),
        _FP16: Packing(_FP16, 4, 2, *_E2M1_FP16, 10, factor=2.0**7, exponents=(6, 30), exponent_bias=22),
        _E4M3: Packing(_E4M3, 4, 2),
    },
    "mxfp8": {
        _BF16: Packing(_BF16, 8, 2, *_E4M3_BF16, **_POWERS, boost=120, special=0x7F),
        _FP16: Packing(_FP16, 8, 2, *_E4M3_FP16, **_FIVE_BITS, factor=2.0**-4, exponents=(8, 30), special=0x7F),
    },
    "mxfp8_e5m2": {
        _BF16: Packing(_BF16, 8, 2, *_E5M2_BF16, **_POWERS, boost=112, special=0x7C),
        _FP16: Packing(_FP16, 8, 2, *_E5M2_FP16, **_FIVE_BITS, factor=2.0**-12, exponents=(7, 15), special=0x7C),
    },
}
"""The packings, by format and dtype. mxfp4_near: MXFP4 with five-bit exponents. E4M3 uses ``weight_layout_fp8``."""


def shifted(word: Any, shift: Shift) -> Any:
    """``word`` (an integer below 2**32, or a tensor of such), shifted."""
    kind, bits = shift
    if kind == "left":
        return (word << bits) & 0xFFFFFFFF
    return word >> bits if kind == "right" else (word >> bits) | ((word << (32 - bits)) & 0xFFFFFFFF)


def registers_of(word: Any, packing: Packing) -> list[Any]:
    """The registers that a word of codes becomes, before scaling."""
    found = []
    for shifts in packing.registers:
        value = shifted(word, shifts[0])
        for shift in shifts[1:]:
            value = value ^ shifted(word, shift)
        found.append(value & packing.mask)
    return found


@functools.cache
def encoder(packing: Packing) -> tuple[tuple[int, ...], ...]:
    """The words of all codes of each element of a word; a packed word is the exclusive or of its elements' words.

    Element 2·r + h is in half h of register r.
    """
    # rows of (register bits that a set of word bits gives, that set), reduced until each has one register bit
    rows = []
    for bit in range(32):
        registers = registers_of(1 << bit, packing)
        rows.append((sum(register << (32 * i) for i, register in enumerate(registers)), 1 << bit))
    places = [1 << (32 * i + b) for i in range(len(packing.registers)) for b in range(32) if packing.mask >> b & 1]
    word_of: dict[int, int] = {}
    for place in places:
        pivot = next(i for i, (image, _) in enumerate(rows) if image & place)
        image, source = rows.pop(pivot)
        rows = [(x ^ image, s ^ source) if x & place else (x, s) for x, s in rows]
        word_of = {p: (x ^ image, s ^ source) if x & place else (x, s) for p, (x, s) in word_of.items()}
        word_of[place] = (image, source)
    # the bits of a half's mask, lowest first, are those of a code: mantissa, exponent, sign
    half = [b for b in range(16) if packing.mask >> b & 1]
    elements = []
    for element in range(packing.word_elements):
        base = 32 * (element // 2) + 16 * (element % 2)
        sources = [word_of[1 << (base + b)][1] for b in half]
        words = []
        for code in range(1 << packing.element_bits):
            word = 0
            for i in range(packing.element_bits):
                word ^= sources[i] if code >> i & 1 else 0
            words.append(word)
        elements.append(tuple(words))
    return tuple(elements)


ENCODED_ORDER = {4: (2, 6, 0, 4, 3, 7, 1, 5), 8: (0, 1, 2, 3)}
"""The order of a word's elements for ``encoding`` that needs the fewest shifts, by the bits of an element."""


@functools.cache
def encoding(packing: Packing) -> tuple[tuple[int, int], ...]:
    """The encoder as pairs (left shift, mask), a negative shift being to the right.

    A word is the exclusive or over the pairs of (codes shifted & mask). The codes are a 32-bit number whose nibbles or
    bytes, lowest first, are the codes of the elements in ``ENCODED_ORDER``.
    """
    masks: dict[int, int] = {}
    bits = packing.element_bits
    for i, element in enumerate(ENCODED_ORDER[bits]):
        for bit in range(bits * i, bits * (i + 1)):
            word = encoder(packing)[element][1 << (bit - bits * i)]
            for target in range(32):
                if word >> target & 1:
                    masks[target - bit] = masks.get(target - bit, 0) | 1 << target
    return tuple(sorted(masks.items()))


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows (…, N, C) of two weights in turn, eight of each: (…, 2 · padded N, C).

    N is padded with zeros to a multiple of eight. A thread, which has rows g and g + 8 of a slab's accumulators, then
    has a row of each weight.
    """
    padding = (0, 0, 0, -gate.shape[-2] % HALF_SLAB)
    both = torch.stack([torch.nn.functional.pad(x, padding) for x in (gate, up)], dim=-3)
    return both.unflatten(-2, (-1, HALF_SLAB)).transpose(-4, -3).flatten(-4, -2)


def separated(rows: torch.Tensor) -> torch.Tensor:
    """The two weights (…, 2, padded N, C) of ``interleaved`` rows."""
    return rows.unflatten(-2, (-1, 2, HALF_SLAB)).transpose(-4, -3).flatten(-3, -2)


def packed_rows(rows: int, gated: bool) -> int:
    """Rows of the packed matrix of a weight with ``rows`` rows, or of two such weights that are interleaved."""
    return 2 * HALF_SLAB * -(-rows // HALF_SLAB) if gated else rows


def tiles(rows: int, k: int) -> tuple[int, int]:
    """The numbers of tiles that cover ``rows`` rows and ``k`` columns; the latter is even, as a stage has two tiles."""
    return -(-rows // TILE_ROWS), 2 * -(-k // (2 * TILE_K))


def pack(codes: torch.Tensor, scales: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Tiles (L, row tiles, K tiles, bytes) of NVFP4 weights.

    codes: (L, N, K) E2M1 codes, one a byte. scales: (L, N, K / 16) E4M3 codes.
    """
    # −0 for blocks without a value would do no harm, but one code for zero is enough
    block = scales.repeat_interleave(STEP_K, dim=-1)
    codes = torch.where(block & 0x7F == 0, 0, codes ^ (block >> 7 << 3))
    return _tiled(codes, _scale_bytes(scales), packing)


def pack_powers(codes: torch.Tensor, scales: torch.Tensor, nan: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Tiles of weights whose blocks of 32 have powers of two as scales; all tensors are uint8, (L, N, …).

    codes: one a byte. scales: (…, K / 32): UE8M0 codes if the packing has no exponents; otherwise exponents within its
    range, and up to 30 for blocks of zeros. nan: (…, K / 32): the blocks that become NaN.
    """
    # zero times the scale infinity is NaN
    codes = torch.where(nan.repeat_interleave(2 * STEP_K, dim=-1), 0, codes)
    scales = torch.where(nan, 0xFF if packing.exponents is None else 31, scales)
    return _tiled(codes, scales, packing)


def _tiled(codes: torch.Tensor, scales: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Tiles of codes and scale bytes."""
    batch, rows, k = codes.shape
    row_tiles, k_tiles = tiles(rows, k)
    blocks = STEPS // packing.block_steps
    scales = padded(scales, row_tiles * TILE_ROWS, k_tiles * blocks)
    codes = padded(codes, row_tiles * TILE_ROWS, k_tiles * TILE_K)
    # (L, row tile, slab, row half, g; K tile, load, step, column half, c, e): matrices, to be permuted to fragments
    loads = packing.step_words
    codes = codes.view(batch, row_tiles, SLABS, 2, 8, k_tiles, loads, STEPS // loads, 2, 4, 2)
    # (L, row tile, K tile, slab, load, g, c, step, element: column half, row half, e)
    codes = codes.permute(0, 1, 5, 2, 6, 4, 9, 7, 8, 3, 10).reshape(
        batch, row_tiles, k_tiles, -1, packing.word_elements
    )
    table = torch.tensor(encoder(packing), dtype=torch.int64, device=codes.device)
    words = torch.zeros(codes.shape[:-1], dtype=torch.int64, device=codes.device)
    for element in range(packing.word_elements):
        words ^= table[element][codes[..., element].int()]
    return joined(words, scales, packing)


def joined(words: torch.Tensor, scales: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Tiles (L, row tiles, K tiles, bytes) from words of codes (L, row tiles, K tiles, …), in their order, and scale
    bytes (L, padded rows, blocks of padded K)."""
    batch, row_tiles, k_tiles = words.shape[:3]
    scales = scales.view(batch, row_tiles, SLABS, 2, 8, k_tiles, -1, 2)
    # (L, row tile, K tile, slab, g, pair of blocks, row half, block)
    scales = scales.permute(0, 1, 5, 2, 4, 6, 3, 7).reshape(batch, row_tiles, k_tiles, packing.scale_bytes)
    codes = _low_words(words).view(torch.uint8).view(batch, row_tiles, k_tiles, packing.code_bytes)
    return torch.cat([codes, scales], dim=-1)


def _low_words(words: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 words, as int32."""
    return ((words ^ 0x80000000) - 0x80000000).to(torch.int32).contiguous()


def _scale_bytes(scales: torch.Tensor) -> torch.Tensor:
    """The scale bytes of E4M3 codes: with a five-bit exponent subnormals become normal; NaN keeps its mantissa."""
    magnitude = scales & 0x7F
    # 2**7 · s in fp16 is the scale byte followed by seven zeros
    value = magnitude.view(torch.float8_e4m3fn).to(torch.float32) * 2.0**7
    found = (value.to(torch.float16).view(torch.int16) >> 7).to(torch.uint8)
    return torch.where(magnitude == 0x7F, 0xFF, found)


def padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A copy of ``x`` with zeros after its rows and columns."""
    out = torch.zeros((x.shape[0], rows, columns), dtype=torch.uint8, device=x.device)
    out[:, : x.shape[1], : x.shape[2]] = x
    return out


def unpack(packed: torch.Tensor, packing: Packing) -> torch.Tensor:
    """The values (L, padded rows, padded K) of tiles in float64, without a global scale."""
    values = _from_bits(_element_bits(packed, packing), packing.dtype) * 2.0**packing.boost
    scales = scale_matrix(packed, packing).to(torch.int64) << packing.scale_shift | packing.scale_bits
    scales = _from_bits(scales.clamp(min=packing.least_scale), packing.dtype)
    return values * scales.repeat_interleave(STEP_K * packing.block_steps, dim=-1) * packing.factor


def unpack_nvfp4(packed: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 codes (L, padded rows, padded K), one a byte, and E4M3 scale codes (…, padded K / 16), of tiles.

    They are what ``pack`` was given, except that codes under a scale of ±0 are zeros, and that the sign of a negative
    scale is in its block's codes.
    """
    scales = torch.arange(0x80, dtype=torch.uint8, device=packed.device)
    table = torch.zeros(256, dtype=torch.uint8, device=packed.device)
    table[_scale_bytes(scales).int()] = scales
    return _codes(packed, packing), table[scale_matrix(packed, packing).int()]


def unpack_powers(packed: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 codes (L, padded rows, padded K), one a byte, and exponents (…, padded K / 32), of tiles of mxfp4_near: what
    ``pack_powers`` was given, except for blocks of NaN."""
    return _codes(packed, packing), scale_matrix(packed, packing)


def _codes(packed: torch.Tensor, packing: Packing) -> torch.Tensor:
    """The codes (L, padded rows, padded K) of tiles, one a byte."""
    bits = _element_bits(packed, packing)
    places = [place for place in range(16) if packing.mask >> place & 1]
    codes = torch.zeros_like(bits, dtype=torch.uint8)
    for i, place in enumerate(places):
        codes |= ((bits >> place & 1) << i).to(torch.uint8)
    return codes


def _element_bits(packed: torch.Tensor, packing: Packing) -> torch.Tensor:
    """The elements (L, padded rows, padded K) of tiles as a decoder makes them, 16 bits each, in int64."""
    batch, row_tiles, k_tiles, _ = packed.shape
    words = packed[..., : packing.code_bytes].contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    halves = torch.stack(
        [x for register in registers_of(words, packing) for x in (register & 0xFFFF, register >> 16)], dim=-1
    )
    # (L, row tile, K tile, slab, load, g, c, step, column half, row half, e)
    halves = halves.view(batch, row_tiles, k_tiles, SLABS, packing.step_words, 8, 4, -1, 2, 2, 2)
    halves = halves.permute(0, 1, 3, 9, 5, 2, 4, 7, 8, 6, 10)
    return halves.reshape(batch, row_tiles * TILE_ROWS, k_tiles * TILE_K)


def scale_matrix(packed: torch.Tensor, packing: Packing) -> torch.Tensor:
    """The scale bytes (L, padded rows, blocks) of tiles."""
    batch, row_tiles, k_tiles, _ = packed.shape
    scales = packed[..., packing.code_bytes :].reshape(batch, row_tiles, k_tiles, SLABS, 8, -1, 2, 2)
    return scales.permute(0, 1, 3, 6, 4, 2, 5, 7).reshape(batch, row_tiles * TILE_ROWS, -1)


def _from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of ``dtype`` with these 16 bits, in float64."""
    return ((bits ^ 0x8000) - 0x8000).to(torch.int16).view(dtype).to(torch.float64)
