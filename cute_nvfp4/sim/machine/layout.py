"""The addresses of a kernel's variables in each state space, and the windows of the generic address space.

Global addresses are host addresses, so the windows of the other spaces lie above any host address.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_nvfp4.sim.frontend.model import Kernel

SHARED_BASE = 1024
"""Shared address of the first byte of a CTA's shared memory: not 0, and a multiple of 1024 for the 128-byte swizzle."""

WINDOW_SHIFT, WINDOW_MASK = 56, (1 << 56) - 1
WINDOWS = {"shared": 1, "local": 2, "param": 3}
"""A generic address is window << 56 | address in the state space; window 0 is global memory."""


@dataclass(frozen=True)
class Layout:
    """The addresses of a kernel's variables and parameters."""

    address: dict[str, tuple[str, int]]  #: (state space, address in it) by name
    static_shared: int  #: bytes of static shared memory of a CTA; dynamic shared memory begins after them
    local_bytes: int  #: bytes of local memory of a thread


def lay_out(kernel: Kernel) -> Layout:
    """Lays out a kernel's variables: static shared ones first, then dynamic shared memory, as the driver does."""
    address: dict[str, tuple[str, int]] = {p.name: ("param", p.offset) for p in kernel.params}
    shared, local, dynamic = 0, 0, []
    for v in kernel.variables.values():
        if v.space == "shared" and v.size:
            shared = -(-shared // v.align) * v.align
            address[v.name] = ("shared", SHARED_BASE + shared)
            shared += v.size
        elif v.space == "shared":
            dynamic.append(v)
        elif v.space == "local":
            local = -(-local // v.align) * v.align
            address[v.name] = ("local", local)
            local += v.size
        else:
            # The address is the host's, which ``Group.variable`` gives when the kernel runs.
            address[v.name] = (v.space, 0)
    align = max((v.align for v in dynamic), default=1)
    start = -(-shared // align) * align
    for v in dynamic:
        address[v.name] = ("shared", SHARED_BASE + start)
    return Layout(address, start if dynamic else shared, -(-local // 16) * 16)
