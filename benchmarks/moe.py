"""Times a layer of a mixture of experts on this machine's GPU, maps to combined rows: ``python benchmarks/moe.py``.

The layers are those of Qwen3-30B-A3B, gpt-oss-20b, Mixtral-8x7B, DeepSeek-V3 and Nemotron-3-Nano, with 1 to 8192
tokens, uniform routing and skewed routing (expert e is chosen in proportion to 1 / (e + 1)), and bf16 rows, or on
sm_100a rows that are quantized in the call. The contestants:

- ``moe``: everything from the router's choice to the combined rows, weights in NVFP4, MXFP4 for gpt-oss;
- ``added``: ``moe`` with ``deterministic=False``, one launch fewer;
- ``w4a8`` on sm_90a: ``moe`` with rows that the call quantizes to FP8 before each product;
- ``torch``: the layer in bf16: a sort, ``x[token]``, ``_grouped_mm`` twice with the activation between them in torch's
  operations, the sum over choices. Its weights have four times the bytes;
- ``humming`` and ``humming-w4a8``, where humming-kernels is installed: its two products alone (``moe_contestants``);
  the latter takes weights in MXFP4 and rows in FP8.

``floor``: the bytes of the experts that are used, once, at the bandwidth of a device copy of the same run. Each call is
a CUDA graph; the calls take turns, L2 is cleared before each, times are medians between two CUDA events. Results of
``moe`` are checked first, against exact torch at 16 tokens, and at each number of tokens against the bf16 layer.

``--quick``: 1, 16, 64, 256 and 1024 tokens, uniform routing, checked against the bf16 layer alone. ``--compile`` only
runs each call once: several such processes, with different ``--models`` and ``--tokens``, fill the cache in parallel
before the timed run. ``--only moe w4a8`` leaves the others out, and without ``torch`` also the check against it.
``--parts`` also prints the time of each launch of a call, by torch's profiler. ``--few-rows`` and ``--few-rows-fp8``
move the bounds between the planner's two kernels. ``--smoke`` needs no GPU: it checks small layers in the simulator.

Exit codes: 0 done, 1 a result is wrong, 2 no CUDA device, or one that no kernel is written for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import moe_contestants
from common import capture, gpu_target, machine, results_path, take_turns, write
from gemm_contestants import NotAvailableError
from moe_report import CONTESTANTS, parts, show, show_parts, show_times

from cute_nvfp4 import BlockScaledTensor, moe, prepare_experts, simulating
from cute_nvfp4.formats import FORMATS
from cute_nvfp4.harness.timing import ColdL2, copy_bandwidth
from cute_nvfp4.ops.moe.experts import ActivationFunction, Experts
from cute_nvfp4.planning import packed_groups

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
QUICK_TOKENS = (1, 16, 64, 256, 1024)
CHECKED = 16
OFF_BY_FP8 = 0.12
"""Tolerance of rows in FP8 against bf16, over the norm: 3 % of rows and 3 % of weights in each of two products."""
SILU = ActivationFunction()
_SCALES = {"nvfp4": (0x28, 0x38), "mxfp4": (118, 124)}
"""The range of scale codes that random weights have."""


@dataclass(frozen=True)
class Layer:
    """A layer of a model: experts, choices of a token, H and I, format of the weights, and activation with biases."""

    model: str
    experts: int
    top: int
    hidden: int
    inner: int
    format: str = "nvfp4"
    activation: str = "silu"

    @property
    def biased(self) -> bool:
        """Whether the products have biases."""
        return self.activation == "clamped_swiglu"

    @property
    def halves(self) -> int:
        """How many matrices the first product has."""
        return ActivationFunction(self.activation).halves

    @property
    def expert_bytes(self) -> int:
        """Bytes of the weights of one expert: codes and scales."""
        elements = (1 + self.halves) * self.hidden * self.inner
        return elements // 2 + elements // FORMATS[self.format].block


LAYERS = (
    Layer("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Layer("gpt-oss-20b", 32, 4, 2880, 2880, "mxfp4", "clamped_swiglu"),
    Layer("Mixtral-8x7B", 8, 2, 4096, 14336),
    Layer("DeepSeek-V3", 256, 8, 7168, 2048),
    Layer("Nemotron-3-Nano", 128, 6, 2688, 1856, activation="relu2"),
)


class Weights:
    """Random weights of a layer, in 4 bits and, if asked for, in bf16."""

    def __init__(self, layer: Layer, device: str, quantized: bool) -> None:
        generator = torch.Generator(device).manual_seed(35)
        self.layer, e, h, i = layer, layer.experts, layer.hidden, layer.inner
        self.stacks = self.stacks_in(layer.format, generator, device)
        self.biases = [torch.randn(e, n, generator=generator, device=device) for n in (layer.halves * i, h)]
        self.experts = self.prepared(None if quantized else torch.bfloat16)

    def prepared(self, dtype: torch.dtype | None) -> Experts:
        """The experts for rows in ``dtype``."""
        biases = self.biases if self.layer.biased else [None, None]
        options = {"gate_up_bias": biases[0], "down_bias": biases[1], "dtype": dtype}
        return prepare_experts(*self.stacks, activation=self.layer.activation, **options)

    def run(self, r: Routing, experts: Experts | None = None, **options: bool) -> torch.Tensor:
        """Computes the layer's rows. experts: None for the experts that were prepared first."""
        return moe(r.x, r.ids, r.weights, self.experts if experts is None else experts, **options)

    def stacks_in(self, name: str, generator: torch.Generator, device: str | torch.device) -> list[BlockScaledTensor]:
        """Random weights in the format ``name``: (E, 2 I, H) or (E, I, H), and (E, H, I)."""
        layer, format = self.layer, FORMATS[name]
        options, found = {"generator": generator, "device": device, "dtype": torch.uint8}, []
        for n, k in ((layer.halves * layer.inner, layer.hidden), (layer.hidden, layer.inner)):
            data = torch.randint(256, (layer.experts, n, k // 2), **options)
            scale = torch.randint(*_SCALES[name], (layer.experts, n, k // format.block), **options)
            found.append(BlockScaledTensor(data, scale, None, format))
        return found

    def in_bf16(self) -> list[torch.Tensor]:
        """The weights in bf16, (E, K, N), as ``_grouped_mm`` takes them: views of rows along K."""
        return [torch.stack([_one(x, e) for e in range(x.batch)]).mT for x in self.stacks]


def _one(stack: BlockScaledTensor, e: int) -> torch.Tensor:
    return BlockScaledTensor(stack.data[e], stack.scale[e], None, stack.format).dequantize(torch.bfloat16)


@dataclass(frozen=True)
class Routing:
    """Rows x (T, H), and the router's choice for them: experts (T, k) and weights (T, k)."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def random(cls, layer: Layer, tokens: int, skewed: bool, device: str | torch.device) -> Routing:
        """Random rows and choices without repetition, uniform or skewed."""
        generator = torch.Generator(device).manual_seed(tokens)
        x = torch.randn(tokens, layer.hidden, generator=generator, device=device).bfloat16()
        chances = torch.ones(layer.experts, device=device)
        if skewed:
            chances = 1.0 / torch.arange(1, layer.experts + 1, device=device)
        ids = torch.multinomial(chances.expand(tokens, -1), layer.top, generator=generator)
        weights = torch.rand(tokens, layer.top, generator=generator, device=device)
        return cls(x, ids, weights / weights.sum(1, keepdim=True))


def by_torch(layer: Layer, weights: list[torch.Tensor], biases: list[torch.Tensor], r: Routing) -> torch.Tensor:
    """The layer in bf16 by torch's operations; the host reads no value."""
    options = {"biases": biases} if layer.biased else {}
    return routed_by_torch(r.x, r.ids, r.weights, *weights, activation=ActivationFunction(layer.activation), **options)


def routed_by_torch(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    activation: Callable[[torch.Tensor], torch.Tensor] = SILU,
    biases: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """A layer with experts in bf16 (E, H, 2 I) and (E, I, H), routed as ``moe`` routes: rows sorted, two grouped
    products."""
    order, rows = rows_by_torch(x, ids, gate_up, down, activation, biases)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return (rows[back].view(*ids.shape, -1) * weights[..., None]).sum(1).bfloat16()


def rows_by_torch(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor] = SILU,
    biases: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots (T · top,) in the order of their experts, and the experts' results for them (T · top, H)."""
    order = ids.flatten().argsort(stable=True)
    expert = ids.flatten()[order]
    ends = torch.searchsorted(expert, torch.arange(len(down), device=ids.device), right=True).to(torch.int32)
    both = torch._grouped_mm(x[order // ids.shape[1]], gate_up, offs=ends)
    if biases is not None:
        both = both + biases[0][expert].bfloat16()
    rows = torch._grouped_mm(activation(both), down, offs=ends)
    if biases is not None:
        rows = rows + biases[1][expert].bfloat16()
    return order, rows


def check(layer: Layer, weights: Weights, device: str) -> None:
    """Raises AssertionError unless ``moe`` gives what exact torch gives."""
    r = Routing.random(layer, CHECKED, True, device)
    got = moe(r.x, r.ids, r.weights, weights.experts)
    check_near(layer, CHECKED, got, moe(r.x, r.ids, r.weights, weights.experts, backend="reference"))


def check_near(layer: Layer, tokens: int, got: torch.Tensor, want: torch.Tensor, most: float = 0.02) -> None:
    """Raises AssertionError if two results differ by more than ``most`` of the norm."""
    got, want = got.double(), want.double()
    off = float((got - want).norm() / want.norm())
    if not off < most:
        raise AssertionError(f"{layer.model}, {tokens} tokens: moe is off by {off:.3f} of the norm")


def measure(layer: Layer, options: argparse.Namespace, copy: float, quantized: bool, fp8: bool) -> list[dict]:
    """The rows of a layer's table and, if asked for, the time of each launch."""
    begin = time.perf_counter()
    weights, found = Weights(layer, "cuda", quantized), []
    if not options.quick:
        check(layer, weights, "cuda")
    contestants = contestants_of(layer, weights, options, quantized, fp8)
    clear = ColdL2()
    for skewed in (False,) if options.quick else (False, True):
        for count in options.tokens:
            r = Routing.random(layer, count, skewed, "cuda")
            calls = {name: capture(lambda r=r, run=run: run(r)) for name, run in contestants.items()}
            times = {name: statistics.median(x) for name, x in take_turns(calls, options.rounds, clear).items()}
            for name, most in () if quantized else (("moe", 0.02), ("added", 0.02), ("w4a8", OFF_BY_FP8)):
                if name in calls and "torch" in calls:
                    check_near(layer, count, calls[name].result, calls["torch"].result, most)
            used = len(r.ids.unique())
            floor = used * layer.expert_bytes / copy * 1e6
            row = {"model": layer.model, "tokens": count, "skewed": skewed, "experts_used": used, "us": times}
            traced = {name: parts(calls[name], clear) for name in contestants if name != "torch"}
            found.append(row | {"parts": traced if options.parts else {}, "floor_us": floor})
            if options.parts:
                show_parts(found[-1])
            show_times(found[-1])
    print(f"{layer.model}: {time.perf_counter() - begin:.0f} s with compiling", flush=True)
    return found


def contestants_of(
    layer: Layer, weights: Weights, options: argparse.Namespace, quantized: bool, fp8: bool
) -> dict[str, Callable[[Routing], torch.Tensor]]:
    """The contestants, which take turns, by name."""
    found: dict[str, Callable[[Routing], torch.Tensor]] = {"moe": weights.run}
    if not quantized:
        found["added"] = partial(weights.run, deterministic=False)
    if fp8 and "w4a8" in (options.only or ("w4a8",)):
        found["w4a8"] = partial(weights.run, experts=weights.prepared(torch.float8_e4m3fn))
    if "torch" in (options.only or ("torch",)):
        wide = weights.in_bf16()
        found["torch"] = lambda r: by_torch(layer, wide, weights.biases, r)
    found |= by_others(layer, weights, options.only or moe_contestants.NAMES)
    return {name: run for name, run in found.items() if name in (options.only or found)}


def by_others(layer: Layer, weights: Weights, names: Container[str]) -> dict[str, Callable[[Routing], torch.Tensor]]:
    """The contestants of ``moe_contestants`` that are asked for and can run, checked. Prints why others cannot run."""
    found, device = {}, weights.stacks[0].data.device
    for name in (name for name in moe_contestants.NAMES if name in names):
        form = moe_contestants.NAMES[name] or layer.format
        try:
            stacks = weights.stacks
            if form != layer.format:
                stacks = weights.stacks_in(form, torch.Generator(device).manual_seed(35), device)
            found[name] = moe_contestants.HummingProducts(name, stacks, layer.top)
            found[name].check(Routing.random(layer, CHECKED, False, device))
        except NotAvailableError as error:
            found.pop(name, None)
            print(f"{layer.model}: no {name}: {error}", flush=True)
    return found


def compile_only(layer: Layer, options: argparse.Namespace, quantized: bool, fp8: bool) -> None:
    """Runs each of our calls once, which compiles its kernels."""
    options.only = [name for name in options.only or CONTESTANTS if name != "torch"]
    weights = Weights(layer, "cuda", quantized)
    contestants = contestants_of(layer, weights, options, quantized, fp8)
    for count in options.tokens:
        for run in contestants.values():
            run(Routing.random(layer, count, False, "cuda"))
    torch.cuda.synchronize()


def smoke() -> None:
    """Checks small layers in the simulator, for each generation of kernels."""
    for layer in LAYERS:
        small = replace(layer, experts=4, top=2, hidden=96, inner=64)
        for arch in ("sm_90a", "sm_100a", "sm_120a"):
            weights = Weights(small, "cpu", arch == "sm_100a")
            with simulating(arch) as runs:
                check(small, weights, "cpu")
            if arch == "sm_90a":
                r, fp8 = Routing.random(small, CHECKED, True, "cpu"), weights.prepared(torch.float8_e4m3fn)
                with simulating(arch):
                    got = moe(r.x, r.ids, r.weights, fp8)
                want = moe(r.x, r.ids, r.weights, weights.experts, backend="reference")
                check_near(small, CHECKED, got, want, OFF_BY_FP8)
            r = Routing.random(small, 3, False, "cpu")
            wide = [x.double() for x in weights.in_bf16()]
            print(f"{layer.model:>14} on {arch}: right, {len(runs)} launches; {by_loop(small, wide, weights, r):.3f}")


def by_loop(layer: Layer, wide: list[torch.Tensor], weights: Weights, r: Routing) -> float:
    """The distance between ``by_torch`` and ``moe`` in exact torch, over the norm; a loop replaces ``_grouped_mm``."""

    def grouped(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        sides = [0, *offs.tolist()]
        return torch.cat([x[a:b].double() @ w[e] for e, (a, b) in enumerate(pairwise(sides))]).bfloat16()

    kept, torch._grouped_mm = torch._grouped_mm, grouped
    try:
        got = by_torch(layer, wide, weights.biases, r).double()
    finally:
        torch._grouped_mm = kept
    want = moe(r.x, r.ids, r.weights, weights.experts, backend="reference").double()
    return float((got - want).norm() / want.norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/moe_<gpu>.json)")
    parser.add_argument("--json", action="store_true", help="print the record as JSON at the end")
    parser.add_argument("--tokens", type=int, nargs="+", help=f"default: {TOKENS}")
    parser.add_argument("--models", nargs="+", metavar="TEXT", default=[""], help="layers whose names contain TEXT")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--quick", action="store_true", help="few tokens, uniform routing, 15 rounds")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, help="what to time (default: all)")
    parser.add_argument("--few-rows", type=float, help="rows of an expert up to which products stream (sm_90a)")
    parser.add_argument("--few-rows-fp8", type=float, help="this bound for rows in FP8")
    parser.add_argument("--compile", action="store_true", help="run each call once: no times, no results file")
    parser.add_argument("--parts", action="store_true", help="also print the time of each launch")
    parser.add_argument("--smoke", action="store_true", help="small layers in the simulator: no GPU, no times")
    options = parser.parse_args()
    options.tokens = options.tokens or (QUICK_TOKENS if options.quick else TOKENS)
    if options.quick:
        options.rounds = 15
    for name in ("few_rows", "few_rows_fp8"):
        given = getattr(options, name)
        if given is not None:
            setattr(packed_groups, name.upper(), given)
    try:
        if options.smoke:
            smoke()
            return 0
        target = gpu_target("--smoke runs small layers in the simulator.")
        copy = 1.0 if options.compile else copy_bandwidth()
        timing = "median of CUDA graphs between two events, L2 cleared, calls taking turns"
        record = machine() | {"copy_bytes_s": copy, "timing": timing, "rows": []}
        print(f"{record['gpu']}, driver {record['driver']}, {record['date']}: copy {copy / 1e12:.2f} TB/s")
        quantized = target.arch.generation == "sm100"
        fp8 = target.arch.generation == "sm90"
        for layer in LAYERS:
            if any(x in layer.model for x in options.models):
                if options.compile:
                    compile_only(layer, options, quantized, fp8)
                else:
                    record["rows"] += measure(layer, options, copy, quantized, fp8)
                    write(record, options.output or results_path("moe"))
    except AssertionError as error:
        traceback.print_exception(error)
        return 1
    if options.compile:
        return 0
    show(record["rows"])
    if options.json:
        print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
