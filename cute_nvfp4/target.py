"""GPU architectures and targets; the one place for figures of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import TargetError

DEFAULT_ARCH = "sm_100a"


@dataclass(frozen=True)
class Architecture:
    """The facts about one GPU architecture that kernels and schedules need.

    ``sm_count`` is that of the GPU named in ``example``; on a real device the driver says it. ``shared_bytes`` is the
    opt-in limit of one CTA, ``vector_bytes`` the widest global load of a thread.
    """

    name: str
    capability: tuple[int, int]
    example: str
    sm_count: int
    shared_bytes: int
    vector_bytes: int
    has_fp4_convert: bool

    @property
    def generation(self) -> str:
        """The generation of its tensor cores, as the folders of GEMM kernels name it: sm90, sm100 or sm120."""
        return f"sm{self.capability[0]}0"


ARCHITECTURES = {
    arch.name: arch
    for arch in (
        Architecture("sm_90a", (9, 0), "H100/H200", 132, 232448, 16, False),
        Architecture("sm_100a", (10, 0), "B200", 148, 232448, 32, True),
        Architecture("sm_103a", (10, 3), "B300", 148, 232448, 32, True),
        Architecture("sm_120a", (12, 0), "RTX 5090", 170, 101376, 32, True),
        Architecture("sm_121a", (12, 1), "GB10/DGX Spark", 48, 101376, 32, True),
        # the family: kernels that are built for the first of these run on the second too
        Architecture("sm_120f", (12, 0), "RTX 5090", 170, 101376, 32, True),
        Architecture("sm_121f", (12, 1), "GB10/DGX Spark", 48, 101376, 32, True),
    )
}


@dataclass(frozen=True)
class Target:
    """An architecture to compile for, and the backend that runs the compiled kernel."""

    arch: Architecture
    backend: Literal["cuda", "sim", "reference"]


def architecture(name: str) -> Architecture:
    """The architecture called ``name`` (``sm_90a``, ``sm_100a``, ``sm_120a`` …).

    Raises:
        TargetError: the name is unknown. If it lacks its letter, the message says why and which has FP4.
    """
    if name not in ARCHITECTURES:
        hint = ""
        if f"{name}a" in ARCHITECTURES:
            hint = f"The plain target {name} lacks the FP4 and block-scaled instructions: use {name}a."
        raise TargetError.of("architecture", got=repr(name), expected=f"one of {', '.join(ARCHITECTURES)}", hint=hint)
    return ARCHITECTURES[name]
