"""The number of CTAs that are resident together, by the modelled GPU and the memory of this machine."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.errors import LaunchError, ResidencyError
from cute_nvfp4.sim.machine.launched import Run
from cute_nvfp4.sim.machine.multiprocessor import SHARED_RESERVED

SIMT_WARPS, TENSOR_WARPS = 512, 1024
"""Warps of a wave by default, without and with tensor memory: few enough for the host's caches, many enough to share
NumPy's overhead."""
HOST_MEMORY = 8 << 30
"""The most bytes of host memory that the CTAs of a wave take together."""


def ctas_per_sm(run: Run) -> int:
    """Returns how many CTAs an SM holds by threads and shared memory; PTX does not show registers."""
    shared = run.shared_stride + SHARED_RESERVED
    sm = run.multiprocessor
    return max(1, min(sm.ctas, sm.threads // threads(run), sm.shared // shared))


def threads(run: Run) -> int:
    """Returns the threads of a CTA, rounded up to whole warps."""
    return -(-int(np.prod(run.launch.block)) // 32) * 32


def bytes_per_cta(run: Run) -> int:
    """Returns the bytes of host memory that one resident CTA takes."""
    tensor = 128 * 512 * 4 if run.kernel.uses_tensor_memory else 0
    return run.shared_stride + run.local_bytes * threads(run) + tensor


def clusters_together(run: Run, warps: int | None) -> int:
    """Returns how many clusters are resident together: at least one, and by default about ``SIMT_WARPS`` or
    ``TENSOR_WARPS`` warps, or ``warps`` if given.

    A cooperative launch runs whole. Without ``warps``, a kernel whose CTAs may wait for one another through global
    memory fills the GPU. Raises ``ResidencyError`` if a cooperative launch does not fit the GPU, ``LaunchError`` if the
    clusters that must run together do not fit ``HOST_MEMORY``.
    """
    name, size, count = run.launch.title, run.clusters.size, run.clusters.count
    room = max(1, run.sm_count * ctas_per_sm(run) // size)
    if run.launch.cooperative and count > room:
        raise ResidencyError(
            f"{name}: a cooperative launch of {count * size} CTAs, but {run.sm_count} SMs hold {room * size} together"
        )
    needed = min(room, count) if run.launch.cooperative or run.kernel.synchronises_globally else 1
    each = size * bytes_per_cta(run)
    if needed * each > HOST_MEMORY:
        raise LaunchError(
            f"{name}: the CTAs that must run together take {needed * each / 2**30:.1f} GiB for their shared, local and "
            f"tensor memory, {HOST_MEMORY / 2**30:.1f} GiB are allowed: launch fewer or smaller ones"
        )
    if needed > 1 and warps is None:
        return needed
    limit = warps or (TENSOR_WARPS if run.kernel.uses_tensor_memory else SIMT_WARPS)
    wanted = max(1, limit * 32 // (size * threads(run)))
    return max(needed if run.launch.cooperative else 1, min(room, HOST_MEMORY // each, wanted))
