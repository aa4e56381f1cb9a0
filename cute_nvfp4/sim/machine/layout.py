"""Where variables live: shared, local and parameter addresses, and the windows that make them generic addresses.

Global addresses are host addresses, so generic addressing of the other spaces uses windows above any host address.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_nvfp4.sim.frontend.model import Kernel

SHARED_BASE = 1024
"""Shared address of the first byte of a CTA: not 0, and a multiple of what a 128-byte swizzle needs."""

WINDOW_SHIFT, WINDOW_MASK = 56, (1 << 56) - 1
WINDOWS = {"shared": 1, "local": 2, "param": 3}
"""Generic address = window << 56 | address inside the space; window 0 is global memory."""


@dataclass(frozen=True)
class Layout:
    """Addresses of a kernel's variables. ``static_shared`` and ``local_bytes`` are sizes in bytes."""

    address: dict[str, tuple[str, int]]
    static_shared: int
    local_bytes: int


def lay_out(kernel: Kernel) -> Layout:
    """Static shared variables first, then dynamic shared memory, as the driver does; parameters at their offsets."""
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
            # The executor replaces it by the host address of the variable's storage.
            address[v.name] = (v.space, 0)
    align = max((v.align for v in dynamic), default=1)
    start = -(-shared // align) * align
    for v in dynamic:
        address[v.name] = ("shared", SHARED_BASE + start)
    return Layout(address, start if dynamic else shared, -(-local // 16) * 16)
