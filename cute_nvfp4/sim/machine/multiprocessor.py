"""Limits of one SM, by target (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""

from __future__ import annotations

from dataclasses import dataclass

SHARED_RESERVED = 1024
"""Bytes of shared memory that the system reserves for each CTA."""


@dataclass(frozen=True)
class Multiprocessor:
    """The most that one SM holds at the same time."""

    shared: int  #: bytes of shared memory, those that the system reserves included
    threads: int
    ctas: int

    @property
    def shared_of_cta(self) -> int:
        """The most bytes of shared memory that one CTA may ask for."""
        return self.shared - SHARED_RESERVED


_LARGE, _SMALL = Multiprocessor(228 * 1024, 2048, 32), Multiprocessor(100 * 1024, 1536, 24)


def multiprocessor(target: str) -> Multiprocessor:
    """Returns the limits of ``target`` (sm_90a, sm_100a, sm_120a …); only compute capability 12 has the small SM."""
    return _SMALL if target.startswith("sm_12") else _LARGE
