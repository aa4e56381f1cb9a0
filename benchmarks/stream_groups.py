"""Times the two products of a mixture of experts on this machine's GPU by tile and by streaming: ``python
benchmarks/stream_groups.py``.

The layers of ``moe.py``, rows sorted by expert beforehand, uniform routing: ``first`` is gate and up joined by silu,
``second`` is down. ``tile`` is the plan that the planner has for tiles; the others are tilings of the streaming kernel,
by slabs of a work tile, warps along them and along K, packed tiles of a stage, CTAs of an SM, and rows of x. ``layer``
is all from the router's choice to the combined rows, as ``moe`` runs it, with tiles or streaming products; "early":
these by programmatic launches. Each call is a CUDA graph; all take turns, L2 is cleared before each, times are medians
between two CUDA events. What each gives is first compared with what tiles give. ``floor``: bytes of the experts used at
the bandwidth of a copy of the same run.

``--smoke`` needs no GPU: a small layer in the simulator, compared, and no times.

Exit codes: 0 done, 1 a result is wrong, 2 no CUDA device, or one that no kernel is written for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import capture, gpu_target, machine, results_path, take_turns, write
from moe import LAYERS, Layer, Routing

from cute_nvfp4 import grouped_gemm_contiguous, simulating
from cute_nvfp4.harness.timing import ColdL2, copy_bandwidth
from cute_nvfp4.kernels.gemm.packed.grouped_stream_config import GroupedStreamConfig, can_implement_groups
from cute_nvfp4.ops.moe.maps import Maps, routing_maps
from cute_nvfp4.ops.moe.product import expert_product
from cute_nvfp4.ops.moe.rows import combined
from cute_nvfp4.planning.packed import PackedPlan
from cute_nvfp4.planning.packed_groups import PackedGroups, choose_tiles
from cute_nvfp4.prepared_weight import PreparedWeight
from cute_nvfp4.runtime.backend import sm_count
from cute_nvfp4.target import ARCHITECTURES
from cute_nvfp4.weight_layout import PACKINGS, packed_rows, tiles

TOKENS = (1, 4, 16, 64, 128)
TILINGS = {
    "8x4x2x2 twice": {"slabs": 8, "warps_m": 4, "warps_k": 2, "stage_tiles": 2, "stages": 8, "ctas_per_sm": 2},
    "8x8x2x2": {"slabs": 8, "warps_m": 8, "warps_k": 2, "stage_tiles": 2, "stages": 16},
    "8x4x4x2": {"slabs": 8, "warps_m": 4, "warps_k": 4, "stage_tiles": 2, "stages": 16},
    "4x2x4x2": {"slabs": 4, "warps_m": 2, "warps_k": 4, "stage_tiles": 2, "stages": 16},
}

IN_LAYERS = {name: TILINGS[name] for name in ("8x4x2x2 twice", "8x8x2x2")}


def columns_for(rows: float) -> tuple[int, ...]:
    """Columns worth a try for so many rows of an expert that is used."""
    return (8,) if rows <= 2 else (8, 16) if rows <= 6 else (16, 32)


class Operands:
    """Rows by expert, their offsets, and the stack of one product, of random codes and scales."""

    def __init__(self, layer: Layer, tokens: int, first: bool, device: str) -> None:
        generator = torch.Generator(device).manual_seed(tokens)
        self.gate = "silu" if first else ""
        self.n, self.k = (layer.inner, layer.hidden) if first else (layer.hidden, layer.inner)
        self.routing = Routing.random(layer, tokens, False, device)
        ids = self.routing.ids
        counts = torch.bincount(ids.flatten(), minlength=layer.experts)
        self.offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        self.used, self.rows = int((counts > 0).sum()), ids.numel()
        packing = PACKINGS["nvfp4"][torch.bfloat16]
        shape = (layer.experts, *tiles(packed_rows(self.n, first), self.k), packing.tile_bytes)
        packed = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device=device)
        packed[..., packing.code_bytes :] = packed[..., packing.code_bytes :] % 8 + 100
        self.weight = PreparedWeight(packed, self.n, self.k, torch.bfloat16, gated=first)
        self.x = torch.randn(self.rows, self.k, generator=generator, device=device).bfloat16()
        self.tile_plan = choose_tiles(
            PackedGroups(sizes=((self.rows, self.n, self.k),), stack=layer.experts, gate=self.gate),
            ARCHITECTURES["sm_90a"],
            132,
        )

    @property
    def bytes_used(self) -> int:
        """Bytes of the experts that have rows."""
        return self.used * self.weight.packed[0].numel()

    def product(self, plan: PackedPlan) -> torch.Tensor:
        """The product by ``plan``."""
        return grouped_gemm_contiguous(self.x, self.weight, offsets=self.offsets, gate=self.gate, config=plan)

    def plans(self, ctas: int, tilings: dict[str, Any]) -> dict[str, PackedPlan]:
        """The plans to compare, by name."""
        found = {"tile": self.tile_plan}
        for (name, tiling), columns in product(tilings.items(), columns_for(self.rows / self.used)):
            config = GroupedStreamConfig(columns=columns, **tiling)
            if not can_implement_groups(config):
                found[f"{name}.{columns}"] = PackedPlan(config, ctas * config.ctas_per_sm)
        return found


def check(operands: Operands, plans: dict[str, PackedPlan]) -> None:
    """Raises unless all plans give the same, but for rounding."""
    want = operands.product(plans["tile"]).double()
    for name, plan in plans.items():
        error = (operands.product(plan).double() - want).norm() / want.norm()
        if not error < 2.0**-8:
            raise AssertionError(f"{name}: off by {float(error):.4f}")


def timed(calls: dict[str, Any], rounds: int, clear: ColdL2) -> dict[str, float]:
    """Medians of graphs of the calls, in µs."""
    graphs = {name: capture(call) for name, call in calls.items()}
    return {name: statistics.median(x) for name, x in take_turns(graphs, rounds, clear).items()}


def measure(layer: Layer, tokens: int, rounds: int, copy: float, clear: ColdL2, ctas: int) -> list[dict]:
    """Both products of a layer, each alone, and the whole layer."""
    both, found = [Operands(layer, tokens, first, "cuda") for first in (True, False)], []
    for operands, name in zip(both, ("first", "second")):
        plans = operands.plans(ctas, TILINGS)
        check(operands, plans)
        calls = {name: partial(operands.product, plan) for name, plan in plans.items()}
        found.append(row(layer, tokens, name, timed(calls, rounds, clear), operands.bytes_used / copy * 1e6))
    calls = layers(both, ctas, IN_LAYERS)
    floor = sum(x.bytes_used for x in both) / copy * 1e6
    return [*found, row(layer, tokens, "layer", timed(calls, rounds, clear), floor)]


def row(layer: Layer, tokens: int, what: str, us: dict[str, float], floor: float) -> dict[str, Any]:
    """A row of the record, printed."""
    words = "  ".join(f"{name} {time:.1f}" for name, time in us.items())
    print(f"{layer.model:>14} {tokens:4} {what:>6} floor {floor:6.1f}  {words}", flush=True)
    return {"model": layer.model, "tokens": tokens, "product": what, "floor_us": floor, "us": us}


def layers(both: list[Operands], ctas: int, tilings: dict[str, Any]) -> dict[str, Any]:
    """Calls of the whole layer, which all give the same.

    Raises:
        AssertionError: one does not.
    """
    calls = {"tile": partial(whole_layer, both, [x.tile_plan for x in both])}
    for tiling, columns in product(tilings, columns_for(both[0].rows / both[0].used)[:1]):
        for kind, waits in (("", ("", "")), (" early", ("all", "x"))):
            configs = [GroupedStreamConfig(columns=columns, programmatic=x, **tilings[tiling]) for x in waits]
            calls[f"{tiling}.{columns}{kind}"] = partial(
                whole_layer, both, [PackedPlan(x, ctas * x.ctas_per_sm) for x in configs]
            )
    want = calls["tile"]().double()
    for name, call in calls.items():
        if not (call().double() - want).norm() < 2.0**-6 * want.norm():
            raise AssertionError(f"{name}: the layer is off")
    return calls


def whole_layer(both: list[Operands], plans: list[PackedPlan]) -> torch.Tensor:
    """What ``moe`` does, its products by ``plans``."""
    (first, second), r = both, both[0].routing
    experts, top = first.weight.batch, r.ids.shape[1]
    whole = routing_maps(r.ids, experts)
    maps = Maps.of(whole, experts)
    inner = expert_product(r.x, first.weight, maps.offsets, maps.slots, top, True, config=plans[0])
    weighted = {"row_weights": r.weights, "config": plans[1]}
    rows = expert_product(inner, second.weight, maps.offsets, maps.slots, top, False, **weighted)
    return combined(rows, None, None, whole, experts, top, None, None, "auto")


def smoke() -> None:
    """A small layer in the simulator."""
    both = [Operands(Layer("small", 6, 2, 256, 128), 5, first, "cpu") for first in (True, False)]
    with simulating("sm_90a"):
        plans = both[0].plans(3, IN_LAYERS)
        check(both[0], plans)
        layers(both, 3, IN_LAYERS)
    print(f"{len(plans)} plans agree")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, help="results file (default: benchmarks/results/stream_groups_<gpu>.json)"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--models", nargs="+", metavar="TEXT", default=[""], help="layers with this in their names")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--smoke", action="store_true", help="a small layer in the simulator: no GPU, no times")
    options = parser.parse_args()
    try:
        if options.smoke:
            smoke()
            return 0
        target = gpu_target("--smoke runs a small layer in the simulator.")
        copy, clear = copy_bandwidth(), ColdL2()
        timing = "median of CUDA graphs between two events, L2 cleared, calls taking turns"
        record = machine() | {"copy_bytes_s": copy, "timing": timing, "rows": []}
        print(f"{record['gpu']}, driver {record['driver']}, {record['date']}: copy {copy / 1e12:.2f} TB/s", flush=True)
        chosen = [layer for layer in LAYERS if any(x in layer.model for x in options.models)]
        for layer, tokens in product(chosen, options.tokens):
            ctas = sm_count(target, torch.device("cuda"))
            record["rows"] += measure(layer, tokens, options.rounds, copy, clear, ctas)
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    write(record, options.output or results_path("stream_groups"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
