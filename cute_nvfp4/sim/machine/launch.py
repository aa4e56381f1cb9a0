"""``Launch``: one launch of a kernel, as the host code asks for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_nvfp4.sim.frontend.model import clipped


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, captured from host code or made by hand."""

    kernel: str  #: the name of the kernel in the PTX
    grid: tuple[int, int, int]  #: CTAs of the grid, (x, y, z)
    block: tuple[int, int, int]  #: threads of a CTA, (x, y, z)
    params: tuple[bytes, ...]  #: a copy of the bytes of each kernel parameter, made at the time of the launch
    cluster: tuple[int, int, int] = (1, 1, 1)  #: CTAs of a cluster, (x, y, z)
    dynamic_smem: int = 0  #: bytes of dynamic shared memory of a CTA
    cooperative: bool = False  #: whether all CTAs must be resident together
    programmatic: bool = False  #: whether it may begin before the launch before it on its stream has ended
    stream: int = 0  #: the handle of its stream
    attributes: tuple[tuple[int, bytes], ...] = ()  #: (number, bytes) of each attribute that the driver gets
    cubin: bytes = field(default=b"", repr=False, compare=False)  #: the machine code that host code loaded for it
    registers: int = field(default=0, repr=False, compare=False)  #: registers of a thread in ``cubin``, or 0

    @property
    def title(self) -> str:
        """The name of the kernel, clipped for messages."""
        return clipped(self.kernel)
