"""Times layers of experts by alternative plans of their products on this machine's GPU: ``python
benchmarks/moe_plans.py``.

The layers are those of ``moe.py``, with uniform routing, from routing maps to combined rows. ``plan`` has the planner's
plans of both products. The other calls replace the plan of the first product, of the second, or of both: by tiles of
other widths ("32 x2": 32 columns, two CTAs a multiprocessor), or by streaming ("s8.4x2.2": eight columns, 4 × 2 warps,
two packed tiles a stage). Each call is a CUDA graph; the calls of a cell take turns, L2 is cleared before each, times
are medians between two CUDA events. Each result is first compared with the result of ``plan``.

``--cells Qwen3:64:bf16 …``: model, tokens, and dtype of rows, bf16 or fp8. ``--compile`` only runs each call once:
several such processes, with different cells, fill the cache in parallel before the timed run. ``--smoke`` needs no GPU:
it compares small layers in the simulator.

Exit codes: 0 done, 1 a result is wrong, 2 no CUDA device, or one that no kernel is written for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import capture, gpu_target, machine, results_path, take_turns, write
from moe import LAYERS, Layer, Routing, Weights

from cute_nvfp4 import moe, simulating
from cute_nvfp4.harness.timing import ColdL2
from cute_nvfp4.kernels.gemm.packed.grouped_stream_config import GroupedStreamConfig
from cute_nvfp4.kernels.gemm.packed.grouped_stream_config import can_implement_groups as can_stream
from cute_nvfp4.kernels.gemm.routed_config import RoutedConfig
from cute_nvfp4.kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig, can_implement_groups
from cute_nvfp4.ops.grouped_gemm_contiguous import CONTIGUOUS
from cute_nvfp4.ops.moe.experts import FP8, Experts
from cute_nvfp4.ops.moe.maps import Maps, routing_maps
from cute_nvfp4.ops.moe.product import expert_product
from cute_nvfp4.ops.moe.rows import combined
from cute_nvfp4.planning.packed import PackedPlan, deep
from cute_nvfp4.planning.packed_groups import STREAMED, WIDTHS

DTYPES = {"bf16": torch.bfloat16, "fp8": FP8}
CELLS = (
    *(f"Qwen3:{t}:bf16" for t in (16, 64, 256, 1024)),
    *(f"gpt-oss:{t}:bf16" for t in (64, 256)),
    *(f"Mixtral:{t}:bf16" for t in (64, 1024)),
    *(f"{model}:{t}:fp8" for model in ("Qwen3", "gpt-oss", "Mixtral") for t in (64, 256, 1024)),
)
SINGLE = 8, 16, 24, 32, 40, 48, 56, 64, 80
"""Tile widths of which two CTAs fit on a multiprocessor."""
STREAMING = {
    "4x2.2": STREAMED,
    "4x2.1": STREAMED | {"stage_tiles": 1, "stages": 16},
    "8x1.2": STREAMED | {"warps_m": 8, "warps_k": 1},
    "8x1.1": STREAMED | {"warps_m": 8, "warps_k": 1, "stage_tiles": 1, "stages": 16},
}
"""Tilings of the streaming kernel."""
STREAMED_ROWS = 18
"""Rows of an expert up to which streaming is tried."""
ROUNDS = 9
Plans = tuple[PackedPlan | None, PackedPlan | None]


@dataclass(frozen=True)
class Cell:
    """A layer, its tokens and the dtype of its rows."""

    layer: Layer
    tokens: int
    dtype: str

    @classmethod
    def of(cls, text: str) -> Cell:
        """Parses a cell of ``--cells``."""
        model, tokens, dtype = text.split(":")
        return cls(next(x for x in LAYERS if model in x.model), int(tokens), dtype)

    def plans(self, rows: float, ctas: int) -> Iterator[tuple[str, Plans]]:
        """Yields plans of both products to try, by name. rows: rows of a used expert; ctas: multiprocessors."""
        yield "plan", (None, None)
        for name, widths, each in self.widths(rows):
            for i, which in enumerate(("first", "second")):
                given = {"dtype": "float8_e4m3fn" if self.dtype == "fp8" else "bfloat16", "ctas_per_sm": each}
                config = GroupedWgmmaConfig(
                    tile_n=widths[-1], narrower=widths[:-1], routed=RoutedConfig(gathered=i == 0), **given
                )
                config = deep(config)
                if not can_implement_groups(config):
                    plan = PackedPlan(config, ctas * each)
                    yield f"{which} {name}", (plan, None) if i == 0 else (None, plan)
        if self.dtype == "fp8" or rows > STREAMED_ROWS:
            return
        for columns in self.columns(rows):
            for name, tiling in STREAMING.items():
                configs = [GroupedStreamConfig(columns=columns, programmatic=x, **tiling) for x in ("all", "x")]
                if not any(can_stream(c) for c in configs):
                    first, second = (PackedPlan(c, ctas * c.ctas_per_sm) for c in configs)
                    yield f"s{columns}.{name}", (first, second)

    def widths(self, rows: float) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Yields sets of tile widths near ``rows``, and how many CTAs a multiprocessor holds."""
        for n in SINGLE:
            if 0.9 * rows <= n <= max(2.2 * rows, 16):
                yield f"{n} x2", (n,), 2
        for widths in WIDTHS:
            if len(widths) > 1 and 0.6 * rows <= widths[-1] <= 4 * rows:
                yield "-".join(map(str, widths)), widths, 1

    def columns(self, rows: float) -> tuple[int, ...]:
        """Columns of the streaming kernel near ``rows``."""
        return (8,) if rows < 2 else (8, 16) if rows < 6 else (8, 16, 24) if rows < 12 else (16, 24, 32)


def layer_by(e: Experts, r: Routing, plans: Plans) -> torch.Tensor:
    """The layer as ``moe`` runs it where a launch makes the maps, with its products by ``plans``."""
    top, (first, second) = r.ids.shape[1], plans
    whole = routing_maps(r.ids, e.count)
    maps = Maps.of(whole, e.count)
    routed = maps.offsets, maps.slots, top
    inner = expert_product(r.x, e.gate_up, *routed, True, e.gate_up_factor, e.gate_up_bias, e.activation, config=first)
    if e.dtype is FP8:
        given = maps.offsets, "", e.down_factor, None, torch.bfloat16, None, second, "auto"
        rows = CONTIGUOUS.run(inner, e.down, *given)
        return combined(rows, r.weights, e.down_bias, whole, e.count, top, None, None, "auto")
    given = e.down_factor, e.down_bias, None, r.weights
    rows = expert_product(inner, e.down, *routed, False, *given, config=second)
    return combined(rows, None, None, whole, e.count, top, None, None, "auto")


def calls_of(cell: Cell, weights: Weights, device: str, ctas: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The calls of a cell, by name."""
    e = weights.experts if cell.dtype == "bf16" else weights.prepared(FP8)
    r = Routing.random(cell.layer, cell.tokens, False, device)
    rows = r.ids.numel() / len(r.ids.unique())
    return {name: partial(layer_by, e, r, plans) for name, plans in cell.plans(rows, ctas)} | {
        "moe": lambda: moe(r.x, r.ids, r.weights, e)
    }


def check(cell: Cell, calls: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Raises AssertionError unless all calls give the same result up to rounding."""
    want = calls["plan"]().double()
    for name, call in calls.items():
        if not (call().double() - want).norm() < 2.0**-5 * want.norm():
            raise AssertionError(f"{cell.layer.model}, {cell.tokens} tokens, {cell.dtype}: {name} is off")


def measure(cell: Cell, weights: Weights, ctas: int, clear: ColdL2) -> dict:
    """Times a cell, prints its row, the fastest calls first, and returns it."""
    calls = calls_of(cell, weights, "cuda", ctas)
    check(cell, calls)
    graphs = {name: capture(call) for name, call in calls.items()}
    times = {name: round(statistics.median(x), 2) for name, x in take_turns(graphs, ROUNDS, clear).items()}
    words = "  ".join(f"{name} {us:.1f}" for name, us in sorted(times.items(), key=lambda x: x[1]))
    print(f"{cell.layer.model:>14} {cell.tokens:5} {cell.dtype}  {words}", flush=True)
    return {"model": cell.layer.model, "tokens": cell.tokens, "dtype": cell.dtype, "us": times}


def smoke() -> None:
    """Compares small layers in the simulator."""
    for text in ("Qwen3:16:bf16", "gpt-oss:16:bf16", "Qwen3:16:fp8"):
        cell = Cell.of(text)
        small = replace(cell.layer, experts=2, top=1, hidden=160, inner=96)
        cell = replace(cell, layer=small)
        with simulating("sm_90a"):
            calls = calls_of(cell, Weights(small, "cpu", False), "cpu", 3)
            check(cell, calls)
        print(f"{text}: {len(calls)} calls agree")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/moe_plans_<gpu>.json)")
    parser.add_argument("--cells", nargs="+", metavar="MODEL:TOKENS:DTYPE", default=CELLS)
    parser.add_argument("--compile", action="store_true", help="run each call once: no times, no results file")
    parser.add_argument("--smoke", action="store_true", help="small layers in the simulator: no GPU, no times")
    options = parser.parse_args()
    try:
        if options.smoke:
            smoke()
            return 0
        gpu_target("--smoke runs small layers in the simulator.")
        ctas = torch.cuda.get_device_properties(0).multi_processor_count
        clear, record, weights = ColdL2(), machine() | {"rows": []}, {}
        for cell in map(Cell.of, options.cells):
            if cell.layer not in weights:
                weights = {cell.layer: Weights(cell.layer, "cuda", False)}
            if options.compile:
                check(cell, calls_of(cell, weights[cell.layer], "cuda", ctas))
                continue
            record["rows"].append(measure(cell, weights[cell.layer], ctas, clear))
            write(record, options.output or results_path("moe_plans"))
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
