"""What may still be under way when a CTA exits: nothing that touches its shared or tensor memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cute_nvfp4.sim.checks import epoch as ep
from cute_nvfp4.sim.errors import CopiesInFlight

if TYPE_CHECKING:
    from cute_nvfp4.sim.checks import Checks

_WHAT = {
    "tensor": ("a tensor-core operation of", "no thread of the CTA has waited for a tcgen05.commit after it"),
    "bulk_read": ("a bulk copy out of shared memory issued by", "cp.async.bulk.wait_group.read is missing after it"),
}


class Ending:
    """Checks of CTAs that exit: everything that touches them must have happened before, as far as they know."""

    def __init__(self, checks: Checks) -> None:
        self.checks = checks

    def check(self, ctas: np.ndarray) -> None:
        self._flying(ctas)
        self._signals(ctas)
        if self.checks.clocks.cluster_size > 1:
            for cta in ctas.tolist():
                self._memory(cta)

    def _flying(self, ctas: np.ndarray) -> None:
        """Operations that warps of the CTAs have issued."""
        c = self.checks.clocks
        for kind, issued in self.checks.flying.items():
            per_cta = issued.reshape(c.ctas, -1)[ctas]
            warps = ctas[:, None] * c.warps_per_cta + np.arange(c.warps_per_cta)
            over = c.exit[ctas[:, None], c.component(kind, warps)]
            bad = per_cta > over
            if bad.any():
                row, col = np.argwhere(bad)[0]
                what, how = _WHAT[kind]
                who = self.checks.reporter.thread(int(warps[row, col]), ep.MANY)
                cta = self.checks.wave.cta_name(int(ctas[row]))
                raise CopiesInFlight(
                    f"{self.checks.kernel_name}: {cta} exits while {what} {who} may still be under way: {how}"
                )

    def _signals(self, ctas: np.ndarray) -> None:
        """Arrivals and completions that will reach the CTAs' mbarriers."""
        c = self.checks.clocks
        if not c.barriers or not c.signals.any():
            return
        cluster, rank = ctas // c.cluster_size, ctas % c.cluster_size
        b = np.arange(0, c.barriers, c.cluster_size)[None, :] + rank[:, None]
        bad = c.signals[cluster[:, None], b] > c.exit[ctas][:, None, :]
        if not bad.any():
            return
        row, slot, component = (int(x) for x in np.argwhere(bad)[0])
        cta = int(ctas[row])
        name = self.checks.wave.mbarriers.name(cta, slot)
        source = self.source(component, int(cluster[row]))
        raise CopiesInFlight(
            f"{self.checks.kernel_name}: {self.checks.wave.cta_name(cta)} exits while {source} may still be on the way "
            f"to its {name}: no thread of the CTA has waited for it"
        )

    def source(self, component: int, cluster: int) -> str:
        """What arrives, in words."""
        c = self.checks.clocks
        if component >= c.first_barrier:
            return "bytes of an asynchronous copy"
        by = self.checks.reporter.thread(cluster * c.per_cluster + component % c.per_cluster, ep.MANY)
        tensor = list(c.kinds)[component // c.per_cluster] == "tensor"
        return f"the arrival of a tcgen05.commit of {by}" if tensor else f"an arrival of {by}"

    def _memory(self, cta: int) -> None:
        """Accesses of other CTAs of the cluster to this one's shared memory."""
        c, wave = self.checks.clocks, self.checks.wave
        known = c.exit[cta]
        first = cta * wave.shared_stride
        for shadow, index, _ in self.checks.shared.of_bytes(first, first + wave.shared_stride):
            found = [e for _, e in shadow.readers.present(index)] + [shadow.last.take(index)]
            found += [e for _, e in shadow.atomics.present(index)] if shadow.atomics is not None else []
            for epochs in found:
                bad = ep.clocks(epochs) > known.take(ep.components(epochs))
                if bad.any():
                    self._raise(cta, shadow, int(index[bad.argmax()]), int(epochs[bad.argmax()]))

    def _raise(self, cta: int, shadow, index: int, found: int) -> None:
        e = np.array([found], np.uint64)
        wave = self.checks.wave
        where = self.checks.labels.instruction(int(ep.labels(e)[0])).where()
        offset = self.checks.shared.byte_of(shadow, index) - cta * wave.shared_stride
        raise CopiesInFlight(
            f"{self.checks.kernel_name}: {wave.cta_name(cta)} exits while {where} may still access byte {offset} "
            "of its shared memory: nothing makes it wait for that"
        )
