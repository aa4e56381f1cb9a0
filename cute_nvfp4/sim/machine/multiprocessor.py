"""What one multiprocessor of a target holds (CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability")."""

from __future__ import annotations

from dataclasses import dataclass

SHARED_RESERVED = 1024
"""Bytes of shared memory that the system takes for each CTA."""


@dataclass(frozen=True)
class Multiprocessor:
    """Bytes of shared memory, threads and CTAs that are resident together at most."""

    shared: int
    threads: int
    ctas: int

    @property
    def shared_of_cta(self) -> int:
        """Shared memory that one CTA may ask for."""
        return self.shared - SHARED_RESERVED


_LARGE, _SMALL = Multiprocessor(228 * 1024, 2048, 32), Multiprocessor(100 * 1024, 1536, 24)


def multiprocessor(target: str) -> Multiprocessor:
    """The multiprocessor of ``target`` (sm_90a, sm_100a, sm_120a …): compute capability 12 has the small one."""
    return _SMALL if target.startswith("sm_12") else _LARGE
