"""Values of the special registers (PTX ISA, "Special Registers"), as arrays that broadcast to (warps, 32) of a wave.

A value has the smallest shape that can hold it: (1, 1) if it is the same for all threads, (warps, 1) if it depends on
the warp only, (1, 32) if it depends on the lane only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cute_nvfp4.sim.machine.protocols import Wave

_LANES = np.arange(32, dtype=np.uint32)[None, :]
_BIT = np.uint32(1) << _LANES


def _one(value: int, bits: int = 32) -> np.ndarray:
    return np.full((1, 1), value & ((1 << bits) - 1), np.uint64 if bits == 64 else np.uint32)


def _tid(axis: int):
    def read(w: Wave) -> np.ndarray:
        x, y, _ = w.block
        linear = w.warp_in_cta[:, None].astype(np.uint32) * np.uint32(32) + _LANES
        if w.warps_per_cta == 1:
            linear = _LANES
        div, mod = ((1, x), (x, y), (x * y, 1 << 30))[axis]
        if w.block[axis] == 1:
            return _one(0)
        out = linear // np.uint32(div) if div > 1 else linear
        last = all(d == 1 for d in w.block[axis + 1 :])
        return out if last else out % np.uint32(mod)

    return read


def _by_cta(of_cta: Callable[[Wave], np.ndarray]):
    """Returns the function of a register whose value ``of_cta`` returns for each CTA."""

    def read(w: Wave) -> np.ndarray:
        values = of_cta(w)
        if (values == values[0]).all():
            return _one(int(values[0]))
        return values[w.cta_of_warp][:, None].astype(np.uint32)

    return read


VALUES: dict[str, Callable[[Wave], np.ndarray]] = {
    **{f"%tid.{a}": _tid(i) for i, a in enumerate("xyz")},
    **{f"%ntid.{a}": (lambda w, i=i: _one(w.block[i])) for i, a in enumerate("xyz")},
    **{f"%ctaid.{a}": _by_cta(lambda w, i=i: w.cta_coordinates[i]) for i, a in enumerate("xyz")},
    **{f"%nctaid.{a}": (lambda w, i=i: _one(w.grid[i])) for i, a in enumerate("xyz")},
    "%laneid": lambda w: _LANES,
    "%warpid": lambda w: w.warp_in_cta[:, None].astype(np.uint32),
    "%nwarpid": lambda w: _one(w.warps_per_cta),
    "%smid": lambda w: (w.cta_index[w.cta_of_warp][:, None] % w.sm_count).astype(np.uint32),
    "%nsmid": lambda w: _one(w.sm_count),
    "%gridid": lambda w: _one(1, 64),
    "%lanemask_eq": lambda w: _BIT,
    "%lanemask_lt": lambda w: _BIT - np.uint32(1),
    "%lanemask_le": lambda w: _BIT | (_BIT - np.uint32(1)),
    "%lanemask_gt": lambda w: ~(_BIT | (_BIT - np.uint32(1))),
    "%lanemask_ge": lambda w: ~(_BIT - np.uint32(1)),
    "%dynamic_smem_size": lambda w: _one(w.dynamic_smem),
    "%total_smem_size": lambda w: _one(w.shared_bytes),
    "%clock": lambda w: _one(w.steps),
    "%clock_hi": lambda w: _one(w.steps >> 32),
    "%clock64": lambda w: _one(w.steps, 64),
    "%globaltimer": lambda w: _one(w.steps, 64),
    "%globaltimer_lo": lambda w: _one(w.steps),
    "WARP_SZ": lambda w: _one(32),
    # A launch without clusters is a grid of one-CTA clusters (PTX ISA, "Cluster special registers").
    **{f"%cluster_ctaid.{a}": _by_cta(lambda w, i=i: w.run.clusters.place(w.rank)[i]) for i, a in enumerate("xyz")},
    **{f"%cluster_nctaid.{a}": (lambda w, i=i: _one(w.run.clusters.shape[i])) for i, a in enumerate("xyz")},
    **{
        f"%clusterid.{a}": _by_cta(lambda w, i=i: w.run.clusters.corner(w.cluster_index)[i])
        for i, a in enumerate("xyz")
    },
    **{f"%nclusterid.{a}": (lambda w, i=i: _one(w.run.clusters.grid_of_clusters[i])) for i, a in enumerate("xyz")},
    "%cluster_ctarank": _by_cta(lambda w: w.rank),
    "%cluster_nctarank": lambda w: _one(w.cluster_size),
    "%is_explicit_cluster": lambda w: np.full((1, 1), w.cluster_size > 1),
}
"""Functions from the wave to the value of each special register."""
