"""Records that the rules of a block pass to one another, in the registers of one thread."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Boolean, Float32, Int32, Int64, Uint32

from ..arguments import Seed


class GlobalFactor(NamedTuple):
    """The global scale and values that follow from it.

    value: 1 where the scale is out of range. significand: value · shift, in [1, 2). shift: a power of two. valid: 0
    where the scale is out of range; all results then are NaN. Rules that compare no errors use no significand.
    """

    value: Float32
    inverse: Float32
    significand: Float32 | None
    shift: Float32 | None
    valid: Int32


class HiddenConstants(NamedTuple):
    """1, 2**16 and 2**31 from a kernel's argument, hidden from the compiler, so that products with them stay products.

    The integer pipe has half as many lanes as the FMA pipe, and more work: products replace sums, shifts and selects.
    """

    one: Uint32
    two_to_16: Uint32
    sign: Uint32


class ScaleTable(NamedTuple):
    """The table of :mod:`.scale_table` in shared memory.

    address: of its entries, one for each E4M3 code. limit: the largest wanted scale of the fast path. ties: nonzero if
    under some scale some ties go up and others down.
    """

    address: Int32
    limit: Float32
    ties: Int32


class OptimalScales(NamedTuple):
    """What the search for the best scale needs of each significand m = 8 … 15 of a scale.

    all_inverses: 1 / (global scale · m). inverse: the one for the lane's m = 8 + lane % 8. ties: how ties are rounded
    under scales with the lane's m (:func:`.optimal.optimal_scales`).
    """

    all_inverses: tuple[Float32, ...]
    inverse: Float32
    ties: Uint32


class ErrorTable(NamedTuple):
    """The addresses of the tables of :mod:`.error_table` in shared memory, and 1 on a diagonal."""

    errors: Int32
    lower: Int32
    ones: Uint32


class BlockContext(NamedTuple):
    """What all blocks of a matrix share; a field is None where the configuration does not use it.

    minus_one: −1 on a diagonal, which is operand B of :func:`add_diagonal`. signs: bit i is set where the rotation
    multiplies its element i by −1.
    """

    factor: GlobalFactor
    constants: HiddenConstants | None = None
    table: ScaleTable | None = None
    minus_one: Uint32 | None = None
    optimal: OptimalScales | None = None
    errors: ErrorTable | None = None
    seed: Seed | None = None
    signs: Uint32 | None = None


class Draw(NamedTuple):
    """A source of random bits: the seed, the index of the first element in the result, and the stream."""

    seed: Seed
    index: Int64
    stream: int


class Candidates(NamedTuple):
    """The candidate scales of a block, one or 4/6's two (the 6's first): E4M3 codes and values."""

    codes: tuple[Uint32, ...]
    values: tuple[Float32, ...]


class BlockResult(NamedTuple):
    """A quantized block: the code of its scale, the words of its codes, and whether they are certainly right."""

    code: Uint32
    words: tuple[Uint32, ...]
    decided: Boolean
