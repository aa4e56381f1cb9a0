"""The properties of the simulated GPUs, which host code asks for by number.

``cudaDeviceAttr`` and ``CUdevice_attribute`` have the same numbers. An attribute that is not listed has no value here.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_nvfp4.errors import TargetError, explain
from cute_nvfp4.sim.machine.cluster import MAX_CLUSTER
from cute_nvfp4.sim.machine.multiprocessor import SHARED_RESERVED, multiprocessor

MIB, GIB = 1 << 20, 1 << 30
DEFAULT_ARCH = "sm_100a"
DRIVER_VERSION = 13000
"""CUDA 13.0, the first version that supports all architectures in ``DEVICES``."""


@dataclass(frozen=True)
class Device:
    """The GPU that stands for an architecture, with the properties that host code can ask for.

    ``arch`` is a PTX target such as ``sm_90a``, ``model`` the name of a product. ``capability`` is the compute
    capability (major, minor). ``integrated`` says whether the GPU shares the memory of the host.
    """

    arch: str
    model: str
    capability: tuple[int, int]
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    integrated: bool = False

    @property
    def sm(self) -> int:
        """Ten times the compute capability."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def shared_bytes(self) -> int:
        """The most bytes of shared memory of one CTA, with opt-in."""
        return multiprocessor(self.arch).shared_of_cta

    @property
    def name(self) -> str:
        return f"simulated {self.model}"

    @staticmethod
    def of(arch: str) -> Device:
        """Returns the device for ``arch`` (``sm_90a``, ``sm_100a``, ``sm_120a`` …). Raises ``TargetError`` if there is
        none."""
        # code for a family (sm_100f) runs on its first member
        name = f"{arch[:-1]}a" if arch.endswith("f") else arch
        if name not in DEVICES:
            raise TargetError(explain("architecture", got=repr(arch), expected=f"one of {', '.join(DEVICES)}"))
        return DEVICES[name]

    def attribute(self, number: int) -> int | None:
        """Returns the value of the device attribute ``number``, None if it is not modelled."""
        sm, shared = multiprocessor(self.arch), self.shared_bytes
        known = {
            1: 1024,  # threads of a block
            **{2: 1024, 3: 1024, 4: 64},  # extents of a block
            **{5: (1 << 31) - 1, 6: 65535, 7: 65535},  # extents of a grid
            8: 48 * 1024,  # shared memory of a block without opting in
            9: 64 * 1024,  # constant memory
            10: 32,  # threads of a warp
            12: 65536,  # registers of a block
            16: self.sm_count,
            18: int(self.integrated),
            19: 1,  # host memory can be mapped
            31: 1,  # concurrent kernels
            **{33: 0, 34: 0, 50: 0},  # PCI address
            38: self.l2_bytes,
            39: sm.threads,  # threads of a multiprocessor
            41: 1,  # unified addressing
            75: self.capability[0],
            76: self.capability[1],
            78: 1,  # stream priorities
            81: sm.shared,  # shared memory of a multiprocessor
            82: 65536,  # registers of a multiprocessor
            83: 1,  # managed memory
            84: 0,  # board of several GPUs
            86: 0,  # native atomics between host and device
            90: 1,  # preemption
            95: 1,  # cooperative launch
            97: shared,  # shared memory of a block, opting in
            106: sm.ctas,  # blocks of a multiprocessor
            111: SHARED_RESERVED,  # shared memory that the driver keeps of each block
            115: 1,  # memory pools
            120: 1,  # cluster launch
        }
        return known.get(number)

    def max_active_clusters(self, size: int, blocks_per_sm: int = 1) -> int:
        """Returns how many clusters of ``size`` CTAs run together, with ``blocks_per_sm`` CTAs on a multiprocessor.

        The model divides the number of CTAs by the size. A real GPU gives a little less for large clusters, because a
        cluster must fit in one GPC and not every GPC has the same number of multiprocessors.
        """
        return self.sm_count * blocks_per_sm // size if 1 <= size <= MAX_CLUSTER else 0


DEVICES = {
    device.arch: device
    for device in (
        Device("sm_90a", "H200", (9, 0), 132, 141 * GIB, 50 * MIB),
        Device("sm_100a", "B200", (10, 0), 148, 180 * GIB, 126 * MIB),
        Device("sm_103a", "B300", (10, 3), 148, 268 * GIB, 126 * MIB),
        Device("sm_120a", "RTX 5090", (12, 0), 170, 32 * GIB, 96 * MIB),
        Device("sm_121a", "GB10", (12, 1), 48, 128 * GIB, 24 * MIB, True),
    )
}
