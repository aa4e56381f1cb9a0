"""Warp-level tensor-core products (PTX ISA, "mma"), their matrix loads, and sums by products with a diagonal matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32

from ._asm import HALVES, asm, refs

MINUS_ONE_F16 = 0xBC00


def mma_m16n8k32_s8(a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> list[Int32]:
    """D = A·B + C, A 16×32 and B 32×8 of s8, C and D 16×8 of s32; exact. PTX 7.0, sm_80 or later.

    ``mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32``. Lane t holds, with g = t // 4 and q = t % 4:
    a = A[g, 4q…4q+3], A[g+8, 4q…], A[g, 16+4q…], A[g+8, 16+4q…]; b = B[4q…4q+3, g], B[16+4q…, g];
    c, d = [g, 2q], [g, 2q+1], [g+8, 2q], [g+8, 2q+1].
    """
    text = f"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {refs(0, 4)}, {refs(4, 4)}, {refs(8, 2)}, {refs(10, 4)};"
    return asm(text, [Int32] * 4, [*a, *b, *c])


def mma_m16n8k8_f16(a: Sequence[Any], b: Any, c: Sequence[Any]) -> list[Float32]:
    """D = A·B + C, A 16×8 and B 8×8 of f16, C and D 16×8 of f32. PTX 7.0, sm_80 or later.

    ``mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32``. Lane t holds, with g = t // 4 and q = t % 4:
    a = A[g, 2q…2q+1], A[g+8, 2q…]; b = B[2q…2q+1, g]; c, d = [g, 2q], [g, 2q+1], [g+8, 2q], [g+8, 2q+1].
    ``volatile`` keeps it where all lanes of the warp are converged.
    """
    text = f"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {refs(0, 4)}, {refs(4, 2)}, {{$6}}, {refs(7, 4)};"
    operands = [*map(Uint32, a), Uint32(b), *map(Float32, c)]
    return asm(text, [Float32] * 4, operands, volatile=True)


def mma_m16n8k16(a: Sequence[Any], b: Sequence[Any], c: Sequence[Any], dtype: str) -> list[Float32]:
    """D = A·B + C, A 16×16 and B 16×8 of ``dtype`` ("float16", "bfloat16"), C and D 16×8 of f32. PTX 7.0, sm_80.

    ``mma.sync.aligned.m16n8k16.row.col``. Lane t holds, with g = t // 4 and q = t % 4: a = A[g, 2q…2q+1], A[g+8, 2q…],
    A[g, 8+2q…], A[g+8, 8+2q…]; b = B[2q…2q+1, g], B[8+2q…, g]; c, d = [g, 2q], [g, 2q+1], [g+8, 2q], [g+8, 2q+1].
    """
    half = HALVES[dtype]
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32 "
    text += f"{refs(0, 4)}, {refs(4, 4)}, {refs(8, 2)}, {refs(10, 4)};"
    return asm(text, [Float32] * 4, [*map(Uint32, a), *map(Uint32, b), *map(Float32, c)])


def diagonal(value: int, lane: Int32) -> Uint32:
    """Operand ``b`` of :func:`mma_m16n8k8_f16` with the f16 bits ``value`` on the diagonal and zero elsewhere."""
    row, column = lane >> 2, lane & 3
    word = cutlass.select_((row & 1) == 0, Uint32(value), Uint32(value << 16))
    return Uint32(cutlass.select_((row >> 1) == column, word, Uint32(0)))


def add_diagonal(halves: Sequence[Uint32], b: Uint32, c: Sequence[Float32]) -> list[Float32]:
    """c + halves · ``b``, where ``b`` is a :func:`diagonal`: one MMA adds four f16 of each lane to four fp32 sums.

    halves: an even number of f16x2. Other lanes do not affect a lane's sums, as long as their values are finite.
    """
    found: list = []
    for i in range(0, len(halves), 2):
        found += mma_m16n8k8_f16(halves[i : i + 2], b, c[2 * i : 2 * i + 4])
    return found


def sum_halves(halves: Sequence[Uint32], ones: Uint32, c: Sequence[Float32]) -> list[Float32]:
    """c + the four f16 in the first two words of ``halves`` + those in the other two, in one MMA.

    ones: :func:`diagonal` of 1. Other lanes do not affect a lane's sums, as long as their values are finite.
    ``mma.sync.aligned.m16n8k16`` (PTX 7.0, sm_80), ``volatile`` as :func:`mma_m16n8k8_f16` is.
    """
    text = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    text += f"{refs(0, 4)}, {refs(4, 4)}, {{$8, $8}}, {refs(9, 4)};"
    operands = [*map(Uint32, halves), Uint32(ones), *map(Float32, c)]
    return asm(text, [Float32] * 4, operands, volatile=True)


def load_matrices(address: Int32) -> list[Uint32]:
    """Loads four 8×8 matrices of 16-bit elements from shared memory. Lane 8j + i gives the address of row i of matrix
    j, 16 bytes; lane 4g + q gets word q of row g of each. ``ldmatrix…m8n8.x4.shared.b16``: PTX 6.5, sm_75 or later."""
    text = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {refs(0, 4)}, [$4];"
    return asm(text, [Uint32] * 4, [Int32(address)], volatile=True)


def load_unpacked(address: Int32) -> list[Uint32]:
    """Loads as :func:`load_matrices` does, but rows of sixteen E2M1 elements in the low half of 16 bytes. A lane's
    words have four elements each, shifted from bits 0 to 3 of their bytes to bits 2 to 5, where ``mma.sync`` of
    ``kind::mxf8f6f4`` reads them. ``ldmatrix…m8n16.x4.shared.b8x16.b4x16_p64``: PTX 8.6, sm_100a, sm_120a."""
    text = f"ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b4x16_p64 {refs(0, 4)}, [$4];"
    return [word << Uint32(2) for word in asm(text, [Uint32] * 4, [Int32(address)], volatile=True)]


ELEMENT_TYPES = {"nvfp4": "e2m1", "mxfp4": "e2m1", "mxfp8": "e4m3", "mxfp8_e5m2": "e5m2"}
SCALE_TYPES = ("ue4m3", "ue8m0")


class ScaleWord(NamedTuple):
    """A lane's word of four scale factors, and the selectors of the MMA. byte: the first byte that is used; thread:
    which lanes of each quad supply it: for A the two from ``2 · thread`` on (rows g, g + 8), for B one (column g)."""

    word: Uint32
    byte: int
    thread: int


def mma_block_scaled(
    kind: Any, formats: tuple[str, str], a: Sequence[Uint32], b: Sequence[Uint32], c: Sequence[Any],
    sfa: ScaleWord, sfb: ScaleWord,
) -> list[Float32]:  # fmt: skip
    """D = (A · SFA) · (B · SFB) + C: 16×8×64 of E2M1, 16×8×32 of 8-bit elements. PTX 8.7; sm_120a, sm_121a.

    ``mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3`` and the other
    kinds. kind: a ``config.Kind``. a: rows g and g + 8 of the first half of K, then of the second; b: column g of each
    half; c and d: as in :func:`mma_m16n8k8_f16`. ``volatile`` keeps it where all lanes of the warp are converged.
    """
    types = ".".join(ELEMENT_TYPES[name] for name in formats)
    head = f"mma.sync.aligned.m16n8k{kind.k}.row.col.kind::{kind.name}.block_scale.{kind.vector}.f32.{types}.f32"
    text = (
        f"{head}.{SCALE_TYPES[kind.scale_type]} {refs(0, 4)}, {refs(4, 4)}, {refs(8, 2)}, {refs(10, 4)}, "
        f"{{$14}}, {{{sfa.byte}, {sfa.thread}}}, {{$15}}, {{{sfb.byte}, {sfb.thread}}};"
    )
    return asm(text, [Float32] * 4, [*a, *b, *map(Float32, c), sfa.word, sfb.word], volatile=True)
