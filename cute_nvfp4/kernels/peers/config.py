"""The configuration and the arguments of the kernel that sums rows over the GPUs of a host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...errors import explain
from ...runtime.signature import INT32, INT64, PerConfig, Pointer, Scalar
from ...target import ARCHITECTURES, Architecture

VECTOR_BYTES = 16
"""Bytes that a thread sends at once."""
EMPTY = 0xFFFFFFFF
"""A word of received memory that nobody has written yet: two NaNs. A GPU sends other NaNs in their place."""
SLOTS = 3
"""Buffers for received rows, used in turn: a GPU reads one, empties the one of the call before, and a faster GPU
may already write the next."""
STATE_BYTES = 8
"""Bytes of a CTA's state: the slot of its next call, and the number of vectors of the call before."""
MOST_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class PeerSumConfig:
    """One variant: the sum over ``ranks`` GPUs, on GPU ``rank``. dtype: of the rows, which are summed in fp32. early:
    whether the kernel starts while the launch before it still runs; it waits for that one, and lets the next start."""

    ranks: int = 2
    rank: int = 0
    dtype: str = "bfloat16"
    threads: int = 1024
    early: bool = False
    arch: Architecture = ARCHITECTURES["sm_90a"]

    @property
    def others(self) -> tuple[int, ...]:
        """The ranks of the other GPUs."""
        return tuple(x for x in range(self.ranks) if x != self.rank)


def can_implement(c: PeerSumConfig) -> str:
    """Why no kernel can be made of ``c``; an empty string if one can."""
    if not 2 <= c.ranks <= MOST_RANKS or not 0 <= c.rank < c.ranks:
        expected = f"2 to {MOST_RANKS}, and one of them"
        return explain("ranks and rank of a sum over GPUs", got=f"{c.ranks} and {c.rank}", expected=expected)
    if c.dtype not in ("bfloat16", "float16"):
        return explain("dtype of a sum over GPUs", got=c.dtype, expected="bfloat16 or float16")
    if c.threads % 32 or not 32 <= c.threads <= 1024:
        return explain("threads", got=c.threads, expected="a multiple of 32 up to 1024")
    return ""


class PeerSumArguments(NamedTuple):
    """out = the sum of all ranks' y; each has ``vectors`` vectors of 16 bytes.

    received: for each rank, this one included, the memory that the others send to: (SLOTS, ranks, vectors of a slot).
    part_bytes: bytes of one rank's part of a slot. state: (ctas, 2) of this rank. ctas: the same in every call.
    """

    y: Pointer = Pointer("Uint8", VECTOR_BYTES)
    out: Pointer = Pointer("Uint8", VECTOR_BYTES)
    received: tuple[Pointer, ...] = PerConfig(lambda c: (Pointer("Uint8", VECTOR_BYTES),) * c.ranks)
    state: Pointer = Pointer("Int32", STATE_BYTES)
    part_bytes: Scalar = INT64
    vectors: Scalar = INT32
    ctas: Scalar = INT32
