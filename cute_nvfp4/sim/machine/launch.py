"""One launch of a kernel: what the machine is asked to run."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_nvfp4.sim.frontend.model import clipped


@dataclass(frozen=True)
class Launch:
    """One captured launch.

    ``grid``, ``block`` and ``cluster`` are (x, y, z); ``dynamic_smem`` is in bytes; ``params`` holds a copy of the
    bytes of each kernel parameter as they were when the launch was made. ``attributes`` are the launch's as the driver
    gets them: number and bytes; ``cubin`` is the machine code that a GPU would have run, where host code loaded it, and
    ``registers`` what a thread has in it; 0 where that is not known.
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
        """The kernel's name, as messages show it."""
        return clipped(self.kernel)
