"""Modelled times of the GEMMs of packed weights: on an H200 from what was measured there, on sm_120a from published
figures."""

from __future__ import annotations

from . import sm120_model
from .packed_problem import PackedPlan, PackedProblem, tile_count

START_US = 5.0
"""Launch, first bytes and last store."""
STAGE_US = {32: 0.40, 64: 0.49, 128: 0.65, 256: 1.22}
"""µs of a multiprocessor for 128 rows of the weight and 128 of K, by rows of x in a tile; with these, measured on an
NVIDIA H200 on 2026-11-22 at 8192 x 8192."""
FIX_UP_US = {32: 3.5, 64: 4.5, 128: 8.3, 256: 12.0}
"""µs to add the partial sums of stream-K."""
EXCHANGE_US = {32: 0.5, 64: 1.3, 128: 1.7}
"""µs to add those of two CTAs of a cluster."""


def predict(plan: PackedPlan, p: PackedProblem, sm_count: int) -> float:
    """Modelled µs of a plan, launch included: of WGMMA on an H200, within about 15 % of what was measured there."""
    c = plan.config
    tiles, steps = tile_count(p, c), -(-p.k // c.tile_k)
    if c.arch.generation == "sm120":
        return sm120_model.packed_us(c, tiles, steps, plan.workers, sm_count)
    if c.scheduler == "stream_k":
        work = tiles * steps
        return START_US + work / min(sm_count, work) * STAGE_US[c.tile_n] + FIX_UP_US[c.tile_n]
    rounds = -(-tiles * c.split_k // sm_count)
    exchange = EXCHANGE_US[c.tile_n] if c.split_k > 1 else 0.0
    return START_US + rounds * -(-steps // c.split_k) * STAGE_US[c.tile_n] + exchange
