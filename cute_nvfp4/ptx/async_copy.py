"""Asynchronous copies from global to shared memory by each thread (``cp.async``, PTX 7.0, sm_80 or later).

A thread that reads only what it copied itself needs :func:`wait_group` and no barrier.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64

from ._asm import asm
from .memory import EVICT_FIRST_POLICY


def copy_async(
    shared: Int32, address: Int64, num_bytes: int, valid_bytes: Any = None, *, evict_first: bool = False
) -> None:
    """Starts a copy of 4, 8 or 16 bytes, both ends aligned to their number.

    ``valid_bytes`` (Int32, 0 … num_bytes): so many are read, zeros fill the rest; nothing is read for 0. 16 bytes
    bypass L1 (``.cg``). ``evict_first``: the L2 policy (PTX 7.4).
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
    """Closes the group of this thread's copies started since the last one (it may be empty)."""
    asm("cp.async.commit_group;", [], [], volatile=True)


def wait_group(pending: int) -> None:
    """Waits until at most ``pending`` of this thread's youngest groups are still under way."""
    asm(f"cp.async.wait_group {pending};", [], [], volatile=True)


def fence_async_shared() -> None:
    """What this thread knows to be in shared memory is seen by its later accesses in the asynchronous proxy (sm_90)."""
    asm("fence.proxy.async.shared::cta;", [], [], volatile=True)


def copy_bulk(shared: Int32, address: Int64, num_bytes: Int32, barrier: Int32) -> None:
    """Starts a copy of contiguous bytes to shared memory, which completes at ``barrier`` (PTX 8.6, sm_90 or later).

    ``cp.async.bulk``: addresses and ``num_bytes`` are multiples of 16. One thread does this for all that wait.
    """
    text = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    operands = [Int32(shared), Int64(address), Int32(num_bytes), Int32(barrier)]
    asm(text, [], operands, volatile=True)


def prefetch_bulk(address: Int64, num_bytes: Int32) -> None:
    """Asks L2 to read contiguous bytes (``cp.async.bulk.prefetch.L2``, PTX 8.0, sm_90 or later), multiples of 16. What
    is written to them later is what later reads find."""
    asm("cp.async.bulk.prefetch.L2.global [$0], $1;", [], [Int64(address), Int32(num_bytes)], volatile=True)
