"""Asynchronous copies from global to shared memory by each thread (``cp.async``, PTX 7.0, sm_80 or later).

A thread that reads only what it has copied itself needs :func:`wait_group` and no barrier.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64

from ._asm import asm
from .memory import EVICT_FIRST_POLICY


def copy_async(
    shared: Int32, address: Int64, num_bytes: int, valid_bytes: Any = None, *, evict_first: bool = False
) -> None:
    """Starts a copy of 4, 8 or 16 bytes. Both addresses are multiples of ``num_bytes``.

    valid_bytes: Int32, 0 to ``num_bytes``; only so many bytes are read, and zeros fill the rest; 0 reads nothing.
    evict_first: whether L2 gets that policy (PTX 7.4). A copy of 16 bytes bypasses L1 (``.cg``).
    """
    cache = "cg" if num_bytes == 16 else "ca"
    hint = ".L2::cache_hint" if evict_first else ""
    operands = [Int32(shared), Int64(address)]
    text = f"cp.async.{cache}.shared.global{hint} [$0], [$1], {num_bytes}"
    if valid_bytes is not None:
        text += ", $2"
        operands.append(Int32(valid_bytes))
    if evict_first:
        text = f"{{ .reg .b64 policy; mov.b64 policy, 0x{EVICT_FIRST_POLICY:X}; {text}, policy; }}"
    else:
        text += ";"
    asm(text, [], operands, volatile=True)


def commit_group() -> None:
    """Closes a group of the copies that this thread has started since it closed the last one; a group may be empty."""
    asm("cp.async.commit_group;", [], [], volatile=True)


def wait_group(pending: int) -> None:
    """Waits until at most the ``pending`` youngest groups of this thread are incomplete."""
    asm(f"cp.async.wait_group {pending};", [], [], volatile=True)


def fence_async_shared() -> None:
    """Makes shared memory that this thread sees visible to its later accesses in the asynchronous proxy (sm_90)."""
    asm("fence.proxy.async.shared::cta;", [], [], volatile=True)


def copy_bulk(shared: Int32, address: Int64, num_bytes: Int32, barrier: Int32) -> None:
    """Starts a copy of contiguous bytes to shared memory, which signals ``barrier`` (PTX 8.6, sm_90 or later).

    ``cp.async.bulk``: addresses and ``num_bytes`` are multiples of 16. One thread issues it for all that wait.
    """
    text = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    operands = [Int32(shared), Int64(address), Int32(num_bytes), Int32(barrier)]
    asm(text, [], operands, volatile=True)


def prefetch_bulk(address: Int64, num_bytes: Int32) -> None:
    """Prefetches contiguous bytes into L2; the address and ``num_bytes`` are multiples of 16. Later writes stay visible
    to later reads. ``cp.async.bulk.prefetch.L2``: PTX 8.0, sm_90 or later."""
    asm("cp.async.bulk.prefetch.L2.global [$0], $1;", [], [Int64(address), Int32(num_bytes)], volatile=True)
