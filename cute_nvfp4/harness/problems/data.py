"""The operands that all problems share: their storage, their contents, and how they are decoded.

Nothing here comes from the library under test: decode tables and the blocked scale layout follow the problems'
definition.

An operand called ``x`` (R rows, K columns, L batches) is stored as three contiguous tensors:
    x               (L, R, K/2)                      two E2M1 elements in a byte, low nibble = even K index
    sfx             (L, R, K/16)                     E4M3, one for 16 elements along K
    sfx_permuted    (L, rest_r, rest_k, 32, 4, 4)    the same scales, element (i, j) at
                                                     [i // 128, j // 4, i % 32, (i % 128) // 32, j % 4]
The protocol's tensors are permuted views of these, with the batch last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from ..problem import Buffer, DataKind, Expected

BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAGNITUDES = 127  # finite codes of one sign, 0 to 126
PUBLIC_MASK = 0b10111011  # keeps 0, 0.5, 1 and 1.5 of either sign in both nibbles
ANY_BYTE = 0xFF
# a full-range draw bounds the product of a block's two scales, so that fp16 results stay finite up to K = 16384
SCALE_PRODUCT_BOUND = 32.0
_ELEMENTS_AT_ONCE = 1 << 24  # most elements of an operand that are decoded at a time


@dataclass(frozen=True)
class Operand:
    """One operand of a case. name: of its elements' buffer."""

    name: str
    rows: int
    k: int
    batch: int

    @property
    def elements_shape(self) -> tuple[int, int, int]:
        return self.batch, self.rows, self.k // 2

    @property
    def scales_shape(self) -> tuple[int, int, int]:
        return self.batch, self.rows, self.k // BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes of elements and scales, each counted once."""
        return prod(self.elements_shape) + prod(self.scales_shape)

    def buffers(self) -> list[Buffer]:
        """The operand's three buffers, which the module's docstring describes."""
        blocked = (self.batch, cdiv(self.rows, 128), cdiv(self.k // BLOCK, 4), 32, 4, 4)
        return [
            Buffer(self.name, self.elements_shape, "uint8"),
            Buffer(f"sf{self.name}", self.scales_shape, "uint8"),
            Buffer(f"sf{self.name}_permuted", blocked, "uint8"),
        ]


def check_k(k: int) -> None:
    """Raises ValueError unless K is a whole number of scale blocks."""
    if k % BLOCK:
        raise ValueError(f"k is {k}, must be a multiple of {BLOCK}")


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


# decoding


def e4m3_table() -> torch.Tensor:
    """The value of each of the 256 E4M3 codes (bias 7, no infinity, S.1111.111 is NaN), as float64."""
    codes = torch.arange(256)
    exponent, mantissa = ((codes >> 3) & 15).double(), (codes & 7).double()
    normal = torch.exp2(exponent - 7) * (1 + mantissa / 8)
    subnormal = mantissa * 2.0**-9
    value = torch.where(exponent > 0, normal, subnormal)
    value = torch.where((codes & 0x7F) == 0x7F, torch.nan, value)
    return torch.where(codes >= 128, -value, value)


def e2m1_pair_table() -> torch.Tensor:
    """(256, 2) float64: the elements at even (low nibble) and odd (high nibble) K index of each byte."""
    nibble = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    codes = torch.arange(256)
    return torch.stack((nibble[codes & 15], nibble[codes >> 4]), dim=-1)


def decode(elements: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Elements times scales: (R, K/2) and (R, K/16) uint8 to (R, K) float32.

    The product is exact: an element has 2 significant bits, a scale 4, and 6 * 448 and 0.5 * 2^-9 are well inside
    float32.
    """
    pairs = e2m1_pair_table().float().to(elements.device).view(torch.int64).view(-1)  # an 8-byte lookup for each byte
    values = pairs[elements.int()].view(torch.float32)
    blocks = values.view(*scales.shape, BLOCK)
    blocks *= e4m3_table().float().to(scales.device)[scales.int()].unsqueeze(-1)
    return values


def exact_product(
    tensors: Mapping[str, torch.Tensor], a: Operand, b: Operand, *, magnitude: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A Bᵀ, and the sum of its absolute products if ``magnitude``; both (M, N, L) float64, from the row-major scales.

    The operands are exact in float32. Sums are in float32 where that is exact in any order, else in float64, whose
    error is at most K 2^-53 of the sum of absolute products, far below half a step of any output. The magnitude only
    sets a tolerance, for which float32 is enough.
    """
    shape, device = (a.batch, a.rows, b.rows), tensors[a.name].device
    value = torch.empty(shape, dtype=torch.float64, device=device)
    sizes = torch.empty_like(value) if magnitude else None
    step = max(1, _ELEMENTS_AT_ONCE // a.k)
    dtype = torch.float32 if _exact_in_float32(tensors, a, b) else torch.float64

    def decoded(operand: Operand, index: int, rows: slice) -> torch.Tensor:
        return decode(tensors[operand.name][index, rows], tensors[f"sf{operand.name}"][index, rows])

    for index in range(a.batch):
        for rows in _slices(a.rows, step):
            left = decoded(a, index, rows)
            summed, left_size = left.to(dtype), left.abs() if magnitude else None
            for columns in _slices(b.rows, step):
                right = decoded(b, index, columns)
                value[index, rows, columns] = summed @ right.to(dtype).t()
                if magnitude:
                    sizes[index, rows, columns] = (left_size @ right.abs_().t()).double()
    return value.permute(1, 2, 0), sizes.permute(1, 2, 0) if magnitude else None


def _exact_in_float32(tensors: Mapping[str, torch.Tensor], a: Operand, b: Operand) -> bool:
    """Whether the scales are integers so small that every partial sum, a multiple of 1/4, has at most 24 bits."""
    table, largest = e4m3_table(), 1.0
    for operand in (a, b):
        scales = table.to(tensors[operand.name].device)[torch.unique(tensors[f"sf{operand.name}"]).long()]
        if not torch.equal(scales, scales.round()):
            return False
        largest *= max(E2M1) * scales.abs().max().item()
    return 4 * largest * a.k <= 2**24


def expected(value: torch.Tensor, magnitude: torch.Tensor | None) -> Expected:
    """The reference of an output, from tensors on any device."""
    return Expected(value.cpu().numpy(), None if magnitude is None else magnitude.cpu().numpy())


def _slices(count: int, step: int) -> Iterable[slice]:
    return (slice(first, first + step) for first in range(0, count, step))


# storage


def blocked_storage(scale: torch.Tensor) -> torch.Tensor:
    """Row-major scales (L, MN, KS) as contiguous (L, rest_m, rest_k, 32, 4, 4), padded with zeros."""
    batch, rows, columns = scale.shape
    rest_m, rest_k = cdiv(rows, 128), cdiv(columns, 4)
    padded = scale.new_zeros(batch, rest_m * 128, rest_k * 4)
    padded[:, :rows, :columns] = scale
    # row = 128 rest_m + 32 m1 + m0, column = 4 rest_k + k0
    split = padded.view(batch, rest_m, 4, 32, rest_k, 4)
    return split.permute(0, 1, 4, 3, 2, 5).contiguous()


def elements_view(storage: torch.Tensor) -> torch.Tensor:
    """A view (R, K/2, L) of E2M1 pairs."""
    return storage.view(torch.float4_e2m1fn_x2).permute(1, 2, 0)


def scales_view(storage: torch.Tensor) -> torch.Tensor:
    """A view (R, K/16, L) of E4M3 scales."""
    return storage.view(torch.float8_e4m3fn).permute(1, 2, 0)


def blocked_view(storage: torch.Tensor) -> torch.Tensor:
    """A view (32, 4, rest_r, 4, rest_k, L) of E4M3 scales in the blocked layout."""
    return storage.view(torch.float8_e4m3fn).permute(3, 4, 1, 5, 2, 0)


def stored(name: str, elements: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """The contents of the three buffers of operand ``name``."""
    return {name: elements, f"sf{name}": scales, f"sf{name}_permuted": blocked_storage(scales)}


# draws


def draw_bytes(shape: tuple[int, ...], mask: int, generator: torch.Generator) -> torch.Tensor:
    """Uniform bytes, and-ed with ``mask``. Eight are drawn at a time, which makes large cases affordable."""
    count = prod(shape)
    words = torch.empty(cdiv(count, 8), dtype=torch.int64)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:count].view(shape).bitwise_and_(mask)


def draw_integer_scales(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """E4M3 codes of uniform integers from ``low`` to ``high``, both included (exact in E4M3 up to 16)."""
    drawn = torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8)
    return drawn.to(torch.float8_e4m3fn).view(torch.uint8)


def draw_scales_up_to_one(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """E4M3 codes of uniform values in [0, 1), rounded to nearest, so that 1 may occur."""
    return torch.rand(shape, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)


def draw_codes(limit: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Non-negative E4M3 codes, uniform in [0, limit)."""
    return (torch.rand(limit.shape, generator=generator) * limit).to(torch.uint8)


def partner_limit(codes: torch.Tensor, bound: float | torch.Tensor) -> torch.Tensor:
    """The number of magnitudes (codes from 0 on) whose product with each E4M3 code is within ``bound``."""
    table = e4m3_table()
    largest = bound / table[codes.long()].abs()
    return torch.searchsorted(table[:E4M3_MAGNITUDES], largest, right=True)


def varied(contents: Mapping[str, torch.Tensor], mask: int, roll: bool, seed: int) -> dict[str, torch.Tensor]:
    """Other contents of the same kind, far cheaper than new draws: each column of bytes of an operand is exclusive-ored
    with a byte under ``mask``, and its rows are rotated if ``roll``. Answers to the old contents are of no use. The
    result is on the device of ``contents``, with the same bits on a GPU as on the CPU."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name in [name for name in contents if f"sf{name}" in contents]:
        elements, scales = contents[name], contents[f"sf{name}"]
        batch, rows, columns = elements.shape
        by = int(torch.randint(rows, (), generator=generator)) if roll else 0
        flips = draw_bytes((batch, 1, columns), mask, generator).to(elements.device)
        wide = torch.int64 if columns % 8 == 0 else torch.uint8
        changed = elements.roll(by, 1).view(wide).bitwise_xor_(flips.view(wide)).view(torch.uint8)
        found |= stored(name, changed, scales.roll(by, 1))
    return found


def draw_operands(
    a: Operand,
    bs: Iterable[Operand],
    kind: DataKind,
    public_scales: Callable[[tuple[int, ...], torch.Generator], torch.Tensor],
    bound: float,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    """The buffers of A, and of each B that multiplies it.

    public: bytes under ``PUBLIC_MASK``, scales from ``public_scales(shape, generator)``. full: any byte, and any
    finite E4M3 code that is not negative (block-scaled MMA reads unsigned scales). To keep results finite, each block
    of K draws the largest scale of A, and B's scales are limited so that every product is within ``bound`` (or within
    1/4, 1/16 or 1/64 of it, also drawn for each block of K).
    """
    operands = (a, *bs)
    if kind == "public":
        scales = [public_scales(operand.scales_shape, generator) for operand in operands]
    else:
        columns = (a.batch, 1, a.k // BLOCK)
        ceiling = torch.randint(0, E4M3_MAGNITUDES, columns, generator=generator)  # A's largest code in each block of K
        bounds = bound * torch.exp2(-2.0 * torch.randint(0, 4, columns, generator=generator).double())
        limits = [ceiling + 1, *[partner_limit(ceiling, bounds)] * (len(operands) - 1)]
        scales = [draw_codes(limit.expand(operand.scales_shape), generator) for operand, limit in zip(operands, limits)]
    mask = PUBLIC_MASK if kind == "public" else ANY_BYTE
    contents: dict[str, torch.Tensor] = {}
    for operand, scale in zip(operands, scales):
        contents |= stored(operand.name, draw_bytes(operand.elements_shape, mask, generator), scale)
    return contents
