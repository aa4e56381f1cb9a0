"""``Launch``: one launch of a kernel, as the host code asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_nvfp4.sim.frontend.model import clipped


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, captured from host code or made by hand.

    ``kernel`` is the name of the kernel in the PTX. ``grid`` (CTAs), ``block`` (threads of a CTA) and ``cluster``
    (CTAs) are (x, y, z). ``params`` has a copy of the bytes of each kernel parameter, made at the time of the launch.
    ``dynamic_smem`` is the dynamic shared memory of a CTA in bytes. All CTAs of a ``cooperative`` launch are resident
    together. A ``programmatic`` launch may begin before the launch before it on its stream has ended. ``stream`` is
    the handle of the stream. ``attributes`` are those that the driver gets: (number, bytes) of each. ``cubin`` is the
    machine code that host code loaded for the kernel, ``registers`` the registers of a thread in it, 0 if not known.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: tuple[bytes, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_smem: int = 0
    cooperative: bool = False
    programmatic: bool = False
    stream: int = 0
    attributes: tuple[tuple[int, bytes], ...] = ()
    cubin: bytes = field(default=b"", repr=False, compare=False)
    registers: int = field(default=0, repr=False, compare=False)

    @property
    def title(self) -> str:
        """The name of the kernel, clipped for messages."""
        return clipped(self.kernel)
