"""Memory barriers (PTX ISA, "mbarrier"; sm_90 or later). Addresses are 32-bit, in this CTA's shared window."""

from __future__ import annotations

from cutlass import Int32

from ._asm import asm


def initialise(barrier: Int32, arrivals: int) -> None:
    """Initialises a barrier whose phases complete after ``arrivals`` arrivals. One thread calls it, once."""
    asm(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", [], [Int32(barrier)], volatile=True)


def wait(barrier: Int32, parity: Int32, *, cluster: bool = False) -> None:
    """Waits until the phase of this parity is complete. For a new barrier, the phase of parity 1 is.

    cluster: acquire at cluster scope, which makes visible what other CTAs did before they arrived.
    """
    scope = ".acquire.cluster" if cluster else ""
    text = (
        "{ .reg .pred p;\nWAIT:\n"
        f"mbarrier.try_wait.parity{scope}.shared::cta.b64 p, [$0], $1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}}"
    )
    asm(text, [], [Int32(barrier), Int32(parity)], volatile=True)


def wait_to_overwrite(barrier: Int32, parity: Int32) -> None:
    """Waits as :func:`wait` does, before asynchronous copies of this thread overwrite what others have read."""
    wait(barrier, parity)
    asm("fence.proxy.async.shared::cta;", [], [], volatile=True)


def expect_bytes(barrier: Int32, num_bytes: Int32) -> None:
    """Announces ``num_bytes`` that asynchronous copies bring in this phase, and arrives."""
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    asm(text, [], [Int32(barrier), Int32(num_bytes)], volatile=True)


def arrive(barrier: Int32) -> None:
    """Arrives at a barrier of this CTA."""
    asm("mbarrier.arrive.shared::cta.b64 _, [$0];", [], [Int32(barrier)], volatile=True)


def arrive_after_copies(barrier: Int32) -> None:
    """Arrives at a barrier of this CTA once all ``cp.async`` that this thread has started are complete. The barrier's
    count includes this arrival (``noinc``; sm_80 or later)."""
    asm("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", [], [Int32(barrier)], volatile=True)


def arrive_at(barrier: Int32, rank: Int32) -> None:
    """Arrives at the barrier at this address in CTA ``rank`` of the cluster, with release at cluster scope."""
    text = (
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, $0, $1; "
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }"
    )
    asm(text, [], [Int32(barrier), Int32(rank)], volatile=True)


def arrive_after_reads(barrier: Int32, rank: Int32) -> None:
    """Arrives at the barrier at this address in CTA ``rank``, for a thread that has only read what asynchronous copies
    of the other CTA will overwrite.

    It releases at CTA scope, as CUTLASS's pipelines do. At cluster scope each arrival is a fence of GPU memory, which
    takes hundreds of cycles and which loads do not need once their values have arrived.
    """
    text = (
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, $0, $1; "
        "mbarrier.arrive.shared::cluster.b64 _, [remote]; }"
    )
    asm(text, [], [Int32(barrier), Int32(rank)], volatile=True)


def fence_initialised() -> None:
    """Makes barriers that this thread initialised visible to the cluster and to the asynchronous proxy."""
    asm("fence.mbarrier_init.release.cluster;", [], [], volatile=True)
