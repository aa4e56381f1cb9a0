"""Block-scaled and 16-bit tcgen05.mma, copies to and from tensor memory, commits (PTX ISA, "tcgen05"; sm_100a).

Shared-memory addresses are 32-bit; a tensor-memory address is lane · 2¹⁶ + column. One thread issues an MMA, a copy of
scales or a commit; all lanes of a warp issue loads and stores of tensor memory.

The DSL's ``cute.gemm`` and ``cute.copy`` emit the same instructions, but elect a thread for each and build each
descriptor from two halves: a 128×128×256 stage takes 128 instructions with them, and 41 with the 64-bit sums here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int16, Int32, Uint32, Uint64

from ._asm import asm, refs

SWIZZLE_NONE, SWIZZLE_128B = 0, 2
DESCRIPTOR_UNIT = 16
"""The unit of addresses and offsets in a matrix descriptor, in bytes."""


def descriptor_upper(swizzle: int, stride_bytes: int) -> int:
    """Bits 63:32 of the descriptor of a K-major matrix in shared memory (PTX ISA, "Matrix Descriptor"), version 1.

    stride_bytes: the distance from eight rows to the next eight. The leading dimension's offset is unused where a row
    is one swizzle, or 16 bytes, long.
    """
    return swizzle << 29 | 1 << 14 | stride_bytes // DESCRIPTOR_UNIT


def descriptor_lower(address: Any) -> Int32:
    """Bits 31:0 of the descriptor of a matrix at ``address``."""
    return ((Int32(address) >> 4) & 0x3FFF) | (1 << 16)


def descriptor(lower: Int32, upper: Int32) -> Uint64:
    """A descriptor from its halves."""
    return asm("mov.b64 $0, {$1, $2};", [Uint64], [Int32(lower), Int32(upper)])[0]


def instruction_descriptor(
    a_type: int, b_type: int, scale_type: int, m: int, n: int, a_scale_id: int = 0, b_scale_id: int = 0
) -> int:
    """The 32-bit descriptor of a block-scaled MMA (PTX ISA, "Instruction Descriptor"): K-major, nothing negated."""
    return (
        b_scale_id << 4
        | a_type << 7
        | b_type << 10
        | (n // 8) << 17
        | scale_type << 23
        | (m // 16) << 24
        | a_scale_id << 29
    )


def copy_scales(column: Int32, descriptor: Uint64, offset: int, *, group: int) -> None:
    """Copies one scale atom, 512 bytes at ``offset`` descriptor units after the descriptor's start, to four columns.

    ``32x128b.warpx4``: every quarter of the lanes gets the same 32 rows of 16 bytes.
    """
    text = f"{{ .reg .b64 d; add.s64 d, $1, {offset}; tcgen05.cp.cta_group::{group}.32x128b.warpx4 [$0], d; }}"
    asm(text, [], [Int32(column), Uint64(descriptor)], volatile=True)


def mma_block_scaled(
    accumulator: Int32,
    descriptor: Uint64,
    a_offset: int,
    b_offset: int,
    idesc: int,
    scale_a: Int32,
    scale_b: Int32,
    accumulate: Any,
    *,
    kind: str,
    vector: str,
    group: int,
) -> None:
    """D = (A·SFA)·(B·SFB) [+ D if ``accumulate`` is not 0]; offsets: descriptor units from the descriptor's start."""
    text = (
        "{ .reg .pred p; .reg .b64 a, b; .reg .b32 i; "
        f"setp.ne.b32 p, $4, 0; add.s64 a, $1, {a_offset}; add.s64 b, $1, {b_offset}; mov.b32 i, 0x{idesc:x}; "
        f"tcgen05.mma.cta_group::{group}.kind::{kind}.block_scale.{vector} [$0], a, b, i, [$2], [$3], p; }}"
    )
    operands = [Int32(accumulator), Uint64(descriptor), Int32(scale_a), Int32(scale_b), Int32(accumulate)]
    asm(text, [], operands, volatile=True)


def instruction_descriptor_16bit(dtype: str, m: int, n: int) -> int:
    """The 32-bit descriptor of an MMA of float16 or bfloat16 with float32 accumulators (``kind::f16``), K-major."""
    kind = ("float16", "bfloat16").index(dtype)
    return 1 << 4 | kind << 7 | kind << 10 | (n // 8) << 17 | (m // 16) << 24


def mma_16bit(
    accumulator: Int32, a_column: Int32, descriptor: Uint64, b_offset: int, idesc: int, accumulate: Any
) -> None:
    """D = A·B [+ D if ``accumulate`` is not 0] over 16 elements of K. A lies in eight columns of tensor memory, one row
    in each lane; B lies ``b_offset`` units after the descriptor's start. ``tcgen05.mma.cta_group::1.kind::f16``."""
    text = (
        "{ .reg .pred p; .reg .b64 b; .reg .b32 i; "
        f"setp.ne.b32 p, $3, 0; add.s64 b, $2, {b_offset}; mov.b32 i, 0x{idesc:x}; "
        "tcgen05.mma.cta_group::1.kind::f16 [$0], [$1], b, i, p; }"
    )
    operands = [Int32(accumulator), Int32(a_column), Uint64(descriptor), Int32(accumulate)]
    asm(text, [], operands, volatile=True)


def store_16x128b(column: Int32, words: Sequence[Uint32]) -> None:
    """Stores a warp's part of sixteen lanes of tensor memory. column: the address of the first. Word 2i of lane 4g + c
    goes to column 4i + c of lane g, word 2i + 1 to that column of lane g + 8: the registers of a 16-bit operand A of
    ``mma.sync`` and ``wgmma``. ``tcgen05.st.sync.aligned.16x128b``; :func:`wait_store` waits for it."""
    text = f"tcgen05.st.sync.aligned.16x128b.x{len(words) // 2}.b32 [$0], {refs(1, len(words))};"
    asm(text, [], [Int32(column), *words], volatile=True)


def wait_store() -> None:
    """Waits for the stores of this thread to tensor memory."""
    asm("tcgen05.wait::st.sync.aligned;", [], [], volatile=True)


def load_16x256b(column: Int32, eights: int) -> list[Float32]:
    """Loads a warp's part of sixteen lanes of tensor memory, ``eights`` (a power of two up to 16) times eight columns
    of float32. Of each eight, lane 4g + c gets columns 2c and 2c + 1 of lane g, then of lane g + 8: the accumulator
    registers of ``mma.sync`` and ``wgmma``. ``tcgen05.ld.sync.aligned.16x256b``, with its wait in the same block, so
    that nothing reads a result early."""
    count = 4 * eights
    text = f"tcgen05.ld.sync.aligned.16x256b.x{eights}.b32 {refs(0, count)}, [${count}]; tcgen05.wait::ld.sync.aligned;"
    words = asm(text, [Float32] * count, [Int32(column)], volatile=True)
    return list(words)


def commit(barrier: Int32, *, group: int, mask: Any = None) -> None:
    """Arrives at ``barrier`` once all that this thread has issued to the tensor core is complete. mask: multicasts the
    arrival to the barrier at that address in every CTA of the cluster whose bit is set."""
    head = f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster"
    if mask is None:
        asm(f"{head}.b64 [$0];", [], [Int32(barrier)], volatile=True)
    else:
        operands = [Int32(barrier), Int16(mask)]
        asm(f"{head}.multicast::cluster.b64 [$0], $1;", [], operands, volatile=True)


def fence_before() -> None:
    """Orders this thread's tcgen05 instructions before a signal to other threads."""
    asm("tcgen05.fence::before_thread_sync;", [], [], volatile=True)


def fence_after() -> None:
    """Orders this thread's tcgen05 instructions after a signal from other threads."""
    asm("tcgen05.fence::after_thread_sync;", [], [], volatile=True)
