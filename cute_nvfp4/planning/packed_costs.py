"""The costs of tiles of a packed weight on GPUs where no product was measured, and the time of a launch."""

from __future__ import annotations

from typing import NamedTuple

from ..kernels.gemm.sm90.config import WgmmaConfig


class PackedCosts(NamedTuple):
    """µs of a launch, of a round trip to memory, of a step along K of a tile, and of storing a tile."""

    start_us: float
    latency_us: float
    step_us: float
    store_us: float

    def tiles_us(self, config: WgmmaConfig, tiles: int, steps: int, workers: int) -> float:
        """µs of ``tiles`` work tiles with ``steps`` steps along K each, on ``workers`` CTAs."""
        start = self.start_us + self.latency_us
        if config.scheduler == "static":
            return start + -(-tiles // workers) * (steps * self.step_us + self.store_us)
        share = -(-tiles * steps // workers)
        # a CTA writes its sums to memory and reads those of others from there
        return start + share * self.step_us + -(-share // steps) * self.store_us + 2 * self.latency_us + self.store_us
