"""Weights as tensor-core kernels of sm_90a read them: repacked once, decoded with few instructions.

The decoded weight is operand A of a 16-bit MMA, from registers. Memory is a grid of tiles of 128 rows and 64 columns
along K, (L, row tiles, K tiles, ``TILE_BYTES``), K innermost, so that a range of K of some rows is one run of bytes;
the K tiles are even in number, padded with zeros.
A tile has the codes of its 8 slabs of 16 rows and then their scales:

* codes (SLAB, LANE, STEP) of 32-bit words: a word has the 8 elements that lane 4·g + c holds of A for step s, 16
  columns, in a slab (PTX ISA, "wgmma, register fragments for m64k16"): registers 0 to 3 are rows g, g + 8, g, g + 8 at
  columns 2c, 2c + 1 and (registers 2 and 3) 8 + 2c, 9 + 2c. A lane's four steps are one 16-byte load.
* scales (SLAB, ROW g, PAIR of steps, ROW g or g + 8, STEP of the pair) of bytes. A byte has five bits of exponent and
  three of mantissa and stands for 2**7 times the scale: in fp16 it needs a shift, in bf16 a shift and an OR.

E2M1 in bf16 is s0000000 0ee m0…, 2**-126 times its value, and in fp16 s000eem0…, 2**-14 times: no instruction but
moving its four bits there. ``DECODERS`` says how a word becomes the four registers: each is the exclusive or of some
shifts of the word, under a mask. Shifts that fetch each element from one place cannot tile a word, but the map from
word to registers is linear over GF(2), and these have an inverse, which packing applies. That is eight instructions
for eight elements, where a table or masks with one place an element need fifteen.

Products with the scales are exact, and 2**-7 times the weight: the scale has at most four significant bits, E2M1 two.
A block whose scale is zero has zero codes; a negative scale's sign goes to the codes. NaN stays NaN. MXFP4 has the same
bytes: a power of two is an exponent without mantissa, and a block of 32 two equal scales.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from cute_nvfp4.formats import NVFP4

TILE_ROWS, TILE_K = 128, 64
SLAB_ROWS = 16
"""Rows of a warp's fragment of A."""
HALF_SLAB = SLAB_ROWS // 2
"""Rows of which a thread has one."""
STEP_K = 16
"""Columns of one MMA."""
STEPS = TILE_K // STEP_K
SLABS = TILE_ROWS // SLAB_ROWS
CODE_BYTES = TILE_ROWS * TILE_K // 2
SCALE_BYTES = TILE_ROWS * TILE_K // NVFP4.block
TILE_BYTES = CODE_BYTES + SCALE_BYTES
LANE_BYTES = 4 * STEPS
"""Bytes of codes of a lane in a slab."""
ROW_SCALE_BYTES = 2 * STEPS
"""Bytes of scales of rows g and g + 8 of a slab."""
WEIGHT_FACTOR = 2.0**7
"""What the decoded weight is multiplied with to be the weight."""


class Shift(NamedTuple):
    """A word shifted ("left", "right", zeros come in) or rotated ("rotate", to the right) by ``bits``."""

    kind: str
    bits: int


class Decoder(NamedTuple):
    """How a word of codes becomes registers of 16-bit pairs: each the exclusive or of shifts of the word, masked.

    scale_shift: of a scale byte to its place in a 16-bit number; scale_bits: what is ORed to it.
    """

    mask: int
    registers: tuple[tuple[Shift, ...], ...]
    scale_shift: int
    scale_bits: int


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_WORD = Shift("left", 0)
DECODERS = {
    torch.bfloat16: Decoder(
        0x81C081C0,
        ((_WORD,), (Shift("left", 6),), (Shift("rotate", 4),), (Shift("left", 2), Shift("right", 6))),
        4,
        0x7000,
    ),
    torch.float16: Decoder(
        0x8E008E00,
        (
            (Shift("left", 6),),
            (Shift("left", 9),),
            (_WORD, Shift("left", 2)),
            (_WORD, Shift("right", 3)),
        ),
        7,
        0,
    ),
}


EXPONENTS = {torch.bfloat16: (0, 30), torch.float16: (6, 30)}
"""Exponents of scale bytes, from first to last, whose products with every E2M1 are exact and finite in the dtype."""


def shifted(word: Any, shift: Shift) -> Any:
    """``word`` (an integer below 2**32, or a tensor of such) shifted."""
    kind, bits = shift
    if kind == "left":
        return (word << bits) & 0xFFFFFFFF
    return word >> bits if kind == "right" else (word >> bits) | ((word << (32 - bits)) & 0xFFFFFFFF)


def registers_of(word: Any, decoder: Decoder) -> list[Any]:
    """The registers that a word of codes is decoded to, before they are scaled."""
    found = []
    for shifts in decoder.registers:
        value = shifted(word, shifts[0])
        for shift in shifts[1:]:
            value = value ^ shifted(word, shift)
        found.append(value & decoder.mask)
    return found


@functools.cache
def encoder(dtype: torch.dtype) -> tuple[tuple[int, ...], ...]:
    """For each of the eight elements of a word, the words of its sixteen codes; a word is their exclusive or.

    Element 2·r + h is in half h of register r.
    """
    decoder = DECODERS[dtype]
    # rows of (bits of the registers that a set of word bits gives, that set), reduced until each has one register bit
    rows = []
    for bit in range(32):
        registers = registers_of(1 << bit, decoder)
        rows.append((sum(register << (32 * i) for i, register in enumerate(registers)), 1 << bit))
    places = [1 << (32 * i + b) for i in range(4) for b in range(32) if decoder.mask >> b & 1]
    word_of: dict[int, int] = {}
    for place in places:
        pivot = next(i for i, (image, _) in enumerate(rows) if image & place)
        image, source = rows.pop(pivot)
        rows = [(x ^ image, s ^ source) if x & place else (x, s) for x, s in rows]
        word_of = {p: (x ^ image, s ^ source) if x & place else (x, s) for p, (x, s) in word_of.items()}
        word_of[place] = (image, source)
    # a half's bits of the mask, lowest first, are mantissa, exponent, exponent, sign: the bits of a code
    half = [b for b in range(16) if decoder.mask >> b & 1]
    elements = []
    for element in range(8):
        base = 32 * (element // 2) + 16 * (element % 2)
        sources = [word_of[1 << (base + b)][1] for b in half]
        words = []
        for code in range(16):
            word = 0
            for i in range(4):
                word ^= sources[i] if code >> i & 1 else 0
            words.append(word)
        elements.append(tuple(words))
    return tuple(elements)


ENCODED_ORDER = (2, 6, 0, 4, 3, 7, 1, 5)
"""The elements of a word in the nibbles that ``encoding`` takes: the order of the fewest shifts."""


@functools.cache
def encoding(dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    """The encoder as shifts to the left (negative: to the right) and masks: a word is the exclusive or of the nibbles
    shifted, & mask.

    The nibbles of a 32-bit number, lowest first, are the codes of the elements in ``ENCODED_ORDER``.
    """
    masks: dict[int, int] = {}
    for nibble, element in enumerate(ENCODED_ORDER):
        for bit in range(4 * nibble, 4 * nibble + 4):
            word = encoder(dtype)[element][1 << (bit - 4 * nibble)]
            for target in range(32):
                if word >> target & 1:
                    masks[target - bit] = masks.get(target - bit, 0) | 1 << target
    return tuple(sorted(masks.items()))


def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows (…, N, C) of two weights in turn, eight of each, N padded with zeros to a multiple of eight: (…, 2 · padded
    N, C).

    A thread has rows g and g + 8 of a slab's accumulators: a row of either.
    """
    padding = (0, 0, 0, -gate.shape[-2] % HALF_SLAB)
    both = torch.stack([torch.nn.functional.pad(x, padding) for x in (gate, up)], dim=-3)
    return both.unflatten(-2, (-1, HALF_SLAB)).transpose(-4, -3).flatten(-4, -2)


def separated(rows: torch.Tensor) -> torch.Tensor:
    """(…, 2, padded N, C) of such rows."""
    return rows.unflatten(-2, (-1, 2, HALF_SLAB)).transpose(-4, -3).flatten(-3, -2)


def packed_rows(rows: int, gated: bool) -> int:
    """Rows of the packed matrix of a weight with ``rows``, or of two such that are interleaved."""
    return 2 * HALF_SLAB * -(-rows // HALF_SLAB) if gated else rows


def tiles(rows: int, k: int) -> tuple[int, int]:
    """Tiles that cover ``rows`` rows, and ``k`` columns: an even number of those, which a stage has two of."""
    return -(-rows // TILE_ROWS), 2 * -(-k // (2 * TILE_K))


def pack(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Tiles (L, row tiles, K tiles, TILE_BYTES) of NVFP4 weights.

    codes: (L, N, K) E2M1 codes, one a byte. scales: (L, N, K / 16) E4M3 codes. dtype: bfloat16 or float16, of the MMA.
    """
    # −0 for blocks without a value would do no harm, but one code is as good
    block = scales.repeat_interleave(STEP_K, dim=-1)
    codes = torch.where(block & 0x7F == 0, 0, codes ^ (block >> 7 << 3))
    return _tiled(codes, _scale_bytes(scales), dtype)


def pack_powers(codes: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Tiles of weights whose blocks of 32 have powers of two for scales.

    codes: as ``pack`` takes them. exponents: (L, N, K / 32) of uint8, of 2**7 times the scale, with bias 15: within
    ``EXPONENTS``, or anything up to 30 under codes of zero; 31 is NaN.
    """
    nan = exponents == 31
    codes = torch.where(nan.repeat_interleave(2 * STEP_K, dim=-1), 0, codes)
    return _tiled(codes, torch.where(nan, 0xFF, exponents << 3).repeat_interleave(2, dim=-1), dtype)


def _tiled(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Tiles of codes, and of scale bytes for each step."""
    batch, rows, k = codes.shape
    row_tiles, k_tiles = tiles(rows, k)
    scales = _padded(scales, row_tiles * TILE_ROWS, k_tiles * STEPS)
    codes = _padded(codes, row_tiles * TILE_ROWS, k_tiles * TILE_K)
    # (L, row tile, slab, row half, g; K tile, step, column half, c, e): from matrices to fragments
    codes = codes.view(batch, row_tiles, SLABS, 2, 8, k_tiles, STEPS, 2, 4, 2)
    # (L, row tile, K tile, slab, g, c, step, element: column half, row half, e)
    codes = codes.permute(0, 1, 5, 2, 4, 8, 6, 7, 3, 9).reshape(batch, row_tiles, k_tiles, -1, 8)
    table = torch.tensor(encoder(dtype), dtype=torch.int64, device=codes.device)
    words = torch.zeros(codes.shape[:-1], dtype=torch.int64, device=codes.device)
    for element in range(8):
        words ^= table[element][codes[..., element].int()]
    packed = _low_words(words)
    scales = scales.view(batch, row_tiles, SLABS, 2, 8, k_tiles, STEPS // 2, 2)
    # (L, row tile, K tile, slab, g, pair of steps, row half, step)
    scales = scales.permute(0, 1, 5, 2, 4, 6, 3, 7).reshape(batch, row_tiles, k_tiles, SCALE_BYTES)
    return torch.cat([packed.view(torch.uint8).view(batch, row_tiles, k_tiles, CODE_BYTES), scales], dim=-1)


def _low_words(words: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 words, as int32."""
    return ((words ^ 0x80000000) - 0x80000000).to(torch.int32).contiguous()


def _scale_bytes(scales: torch.Tensor) -> torch.Tensor:
    """Bytes of E4M3 codes: a five-bit exponent, so that subnormals are normal; NaN keeps its mantissa."""
    magnitude = scales & 0x7F
    # 2**7 · s in fp16 is the byte and seven zeros
    value = magnitude.view(torch.float8_e4m3fn).to(torch.float32) * 2.0**7
    found = (value.to(torch.float16).view(torch.int16) >> 7).to(torch.uint8)
    return torch.where(magnitude == 0x7F, 0xFF, found)


def _padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """``x`` with zeros after its rows and columns; always memory of its own."""
    out = torch.zeros((x.shape[0], rows, columns), dtype=torch.uint8, device=x.device)
    out[:, : x.shape[1], : x.shape[2]] = x
    return out


def unpack(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values (L, padded rows, padded K) in float32 of tiles, without a global scale: what ``pack`` took."""
    batch, row_tiles, k_tiles, _ = packed.shape
    words = packed[..., :CODE_BYTES].contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    halves = torch.stack(
        [x for register in registers_of(words, DECODERS[dtype]) for x in (register & 0xFFFF, register >> 16)], dim=-1
    )
    values = _from_bits(halves, dtype).view(batch, row_tiles, k_tiles, SLABS, 8, 4, STEPS, 2, 2, 2)
    values = values.permute(0, 1, 3, 8, 4, 2, 6, 7, 5, 9).reshape(batch, row_tiles * TILE_ROWS, k_tiles * TILE_K)
    decoder = DECODERS[dtype]
    scales = packed[..., CODE_BYTES:].to(torch.int64) << decoder.scale_shift | decoder.scale_bits
    scales = _from_bits(scales, dtype).view(batch, row_tiles, k_tiles, SLABS, 8, STEPS // 2, 2, 2)
    scales = scales.permute(0, 1, 3, 6, 4, 2, 5, 7).reshape(batch, row_tiles * TILE_ROWS, k_tiles * STEPS)
    return (values * scales.repeat_interleave(NVFP4.block, dim=-1) * WEIGHT_FACTOR).to(torch.float32)


def _from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of ``dtype`` with these 16 bits, in float64."""
    return ((bits ^ 0x8000) - 0x8000).to(torch.int16).view(dtype).to(torch.float64)
