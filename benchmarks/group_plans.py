"""Times tile plans for the two products of experts on this machine's GPU: ``python benchmarks/group_plans.py``.

The layers are those of ``moe.py``, with uniform routing; rows are in bf16, or quantized to FP8 in advance. Each product
runs by itself: ``first`` with its gather and activation, ``second`` as ``moe`` runs it. The plans are all sets of
``planning.packed_groups.WIDTHS`` that are near the experts' rows. Each call is a CUDA graph; the plans of a product
take turns, L2 is cleared before each, times are medians between two CUDA events. Each result is first compared with the
result of the planner's own plan.

``fit_group_costs.py --add`` takes the record. ``--compile`` only runs each plan once: several such processes, with
different ``--models`` and ``--part``, fill the cache in parallel before the timed run.

Exit codes: 0 done, 1 a result is wrong, 2 no CUDA device, or one that no kernel is written for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import capture, gpu_target, machine, results_path, take_turns, write
from moe import LAYERS, Layer, Routing, Weights

from cute_nvfp4 import quantize
from cute_nvfp4.harness.timing import ColdL2
from cute_nvfp4.kernels.gemm.routed_config import RoutedConfig
from cute_nvfp4.kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig, can_implement_groups
from cute_nvfp4.ops.grouped_gemm_contiguous import CONTIGUOUS
from cute_nvfp4.ops.moe.experts import FP8, Experts
from cute_nvfp4.ops.moe.maps import Maps, routing_maps
from cute_nvfp4.ops.moe.product import expert_product
from cute_nvfp4.planning.packed import PackedPlan, deep
from cute_nvfp4.planning.packed_groups import GROUPED_TILING, WIDTHS

TOKENS = (64, 256, 1024)
DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": FP8}
NEAR = 2.6
"""The largest ratio of a tile's rows to an expert's rows, or the other way round."""
WIDEST_OF_TWO = 80
ROUNDS = 9


@dataclass(frozen=True)
class Product:
    """A product of a routing's slots: ``run(plan)`` gives its rows."""

    model: str
    tokens: int
    which: str
    dtype: str
    n: int
    k: int
    rows: tuple[int, ...]
    run: Callable[[PackedPlan | None], torch.Tensor]

    def plans(self, sm_count: int) -> Iterator[PackedPlan]:
        """Yields the plans to time."""
        mean = sum(self.rows) / sum(x > 0 for x in self.rows)
        for *narrower, widest in WIDTHS:
            if not mean / NEAR <= widest <= max(NEAR * mean, 16):
                continue
            ctas = 2 if not narrower and widest <= WIDEST_OF_TWO else 1
            widths = {"tile_n": widest, "narrower": tuple(narrower), "ctas_per_sm": ctas}
            config = deep(
                GroupedWgmmaConfig(dtype=self.dtype, routed=RoutedConfig(gathered=self.which == "first"), **widths)
            )
            if not can_implement_groups(config):
                yield PackedPlan(config, sm_count * ctas)


def products(layer: Layer, weights: Weights, tokens: int) -> Iterator[Product]:
    """Yields the four products of a layer."""
    r = Routing.random(layer, tokens, False, "cuda")
    maps = Maps.of(routing_maps(r.ids, layer.experts), layer.experts)
    rows = tuple(torch.bincount(r.ids.flatten(), minlength=layer.experts).tolist())
    inner = torch.randn(r.ids.numel(), layer.inner, device="cuda").bfloat16()
    for name, dtype in DTYPES.items():
        e = weights.experts if dtype is torch.bfloat16 else weights.prepared(dtype)
        x, y = (quantize(a, "fp8_e4m3") if dtype is FP8 else a for a in (r.x, inner))
        first, second = partial(_first, e, x, maps, layer.top), partial(_second, e, y, maps, r.weights, layer.top)
        yield Product(layer.model, tokens, "first", name, layer.inner, layer.hidden, rows, first)
        yield Product(layer.model, tokens, "second", name, layer.hidden, layer.inner, rows, second)


def _first(e: Experts, x: torch.Tensor, maps: Maps, top: int, plan: PackedPlan | None) -> torch.Tensor:
    given = e.gate_up_factor, e.gate_up_bias, e.activation, None
    return expert_product(x, e.gate_up, maps.offsets, maps.slots, top, True, *given, config=plan)


def _second(
    e: Experts, y: torch.Tensor, maps: Maps, weights: torch.Tensor, top: int, plan: PackedPlan | None
) -> torch.Tensor:
    if e.dtype is FP8:
        return CONTIGUOUS.run(y, e.down, maps.offsets, "", e.down_factor, None, torch.bfloat16, None, plan, "auto")
    given = e.down_factor, e.down_bias, None, weights
    return expert_product(y, e.down, maps.offsets, maps.slots, top, False, *given, config=plan)


def measure(product: Product, sm_count: int, clear: ColdL2) -> dict:
    """Times the plans of a product, prints and returns the record's row."""
    plans, want = list(product.plans(sm_count)), product.run(None).double()
    for plan in plans:
        if not (product.run(plan).double() - want).norm() < 2.0**-6 * want.norm():
            raise AssertionError(f"{product.model}, {product.tokens} tokens, {product.which}: {plan} is off")
    calls = {str(i): capture(partial(product.run, plan)) for i, plan in enumerate(plans)}
    times = [round(statistics.median(x), 2) for x in take_turns(calls, ROUNDS, clear).values()]
    words = "  ".join(f"{plan.config.widths} {us}" for plan, us in zip(plans, times))
    print(f"{product.model:>14} {product.tokens:5} {product.which:>6} {product.dtype:>13}  {words}", flush=True)
    found = [
        {name: getattr(plan.config, name) for name in GROUPED_TILING} | {"workers": plan.workers, "us": us}
        for plan, us in zip(plans, times)
    ]
    about = {name: x for name, x in asdict(product).items() if name != "run"}
    return about | {"plans": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/group_plans_<gpu>.json)")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--models", nargs="+", metavar="TEXT", default=["Qwen3", "gpt-oss", "Mixtral"])
    parser.add_argument("--compile", action="store_true", help="run each plan once: no times, no results file")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every Nth product only")
    options = parser.parse_args()
    gpu_target()
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    clear, record, index = ColdL2(), machine() | {"products": []}, 0
    for layer in LAYERS:
        if not any(text in layer.model for text in options.models):
            continue
        weights = Weights(layer, "cuda", False)
        for tokens in options.tokens:
            for product in products(layer, weights, tokens):
                index += 1
                if index % options.part[1] != options.part[0]:
                    continue
                if options.compile:
                    for plan in (None, *product.plans(sm_count)):
                        product.run(plan)
                    continue
                try:
                    record["products"].append(measure(product, sm_count, clear))
                except AssertionError as error:
                    print(error, file=sys.stderr)
                    return 1
    if not options.compile:
        write(record, options.output or results_path("group_plans"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
