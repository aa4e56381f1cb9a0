"""All kernels whose mutants are tried, by architecture."""

from __future__ import annotations

from . import gemm, products, programs
from .judge import Subject

ARCHS = ("sm_100a", "sm_90a", "sm_120a")


def names(arch: str) -> tuple[str, ...]:
    """The kernels of an architecture."""
    return (*programs.NAMES, *gemm.CASES) if arch == "sm_100a" else products.names(arch)


def subject(name: str) -> Subject:
    """The kernel of that name."""
    if name in gemm.CASES:
        return gemm.subject(name)
    return programs.subject(name) if name in programs.NAMES else products.subject(name)
