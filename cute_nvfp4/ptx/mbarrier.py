"""Memory barriers (PTX ISA, "mbarrier"; sm_90 or later). Addresses are 32-bit, in the shared window of this CTA."""

from __future__ import annotations

from typing import Any

from cutlass import Int32
from cutlass.cutlass_dsl import dsl_user_op

from ._asm import asm


@dsl_user_op
def initialise(barrier: Int32, arrivals: int, *, loc: Any = None, ip: Any = None) -> None:
    """A barrier whose phases end after ``arrivals`` arrivals; one thread does this, once."""
    asm(f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", [], [Int32(barrier)], volatile=True, loc=loc, ip=ip)


@dsl_user_op
def wait(barrier: Int32, parity: Int32, *, cluster: bool = False, loc: Any = None, ip: Any = None) -> None:
    """Waits until the phase of this parity has ended; a new barrier counts as if the phase of parity 1 had.

    ``cluster``: what other CTAs did before they arrived is seen too (acquire at cluster scope).
    """
    scope = ".acquire.cluster" if cluster else ""
    text = (
        "{ .reg .pred p;\nWAIT:\n"
        f"mbarrier.try_wait.parity{scope}.shared::cta.b64 p, [$0], $1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}}"
    )
    asm(text, [], [Int32(barrier), Int32(parity)], volatile=True, loc=loc, ip=ip)


@dsl_user_op
def expect_bytes(barrier: Int32, num_bytes: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Announces bytes that asynchronous copies will bring in this phase, and arrives."""
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    asm(text, [], [Int32(barrier), Int32(num_bytes)], volatile=True, loc=loc, ip=ip)


@dsl_user_op
def arrive(barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Arrives at a barrier of this CTA."""
    asm("mbarrier.arrive.shared::cta.b64 _, [$0];", [], [Int32(barrier)], volatile=True, loc=loc, ip=ip)


@dsl_user_op
def arrive_at(barrier: Int32, rank: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Arrives at the barrier that lies at this address in CTA ``rank`` of the cluster (release at cluster scope)."""
    text = (
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, $0, $1; "
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }"
    )
    asm(text, [], [Int32(barrier), Int32(rank)], volatile=True, loc=loc, ip=ip)


@dsl_user_op
def fence_initialised(*, loc: Any = None, ip: Any = None) -> None:
    """Makes barriers that this thread initialised visible to the cluster and to the asynchronous proxy."""
    asm("fence.mbarrier_init.release.cluster;", [], [], volatile=True, loc=loc, ip=ip)
