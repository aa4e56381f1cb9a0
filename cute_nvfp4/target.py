"""Architectures, and what runs a kernel on them; the one home of GPU figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import TargetError

DEFAULT_ARCH = "sm_100a"


@dataclass(frozen=True)
class Architecture:
    """What kernels and schedules need to know of one GPU architecture.

    ``sm_count`` is that of the part named in ``example``; on a real device the driver is asked instead.
    ``shared_bytes`` is the opt-in limit for one block, ``vector_bytes`` the widest global load of a thread.
    """

    name: str
    capability: tuple[int, int]
    example: str
    sm_count: int
    shared_bytes: int
    vector_bytes: int
    has_fp4_convert: bool


ARCHITECTURES = {
    arch.name: arch
    for arch in (
        Architecture("sm_90a", (9, 0), "H100/H200", 132, 232448, 16, False),
        Architecture("sm_100a", (10, 0), "B200", 148, 232448, 32, True),
        Architecture("sm_103a", (10, 3), "B300", 148, 232448, 32, True),
    )
}


@dataclass(frozen=True)
class Target:
    """An architecture to compile for and the backend that runs what was compiled."""

    arch: Architecture
    backend: Literal["cuda", "sim", "reference"]


def architecture(name: str) -> Architecture:
    """The architecture called ``name`` (``sm_90a``, ``sm_100a``, ``sm_103a``)."""
    if name not in ARCHITECTURES:
        raise TargetError.of("architecture", got=repr(name), expected=f"one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
