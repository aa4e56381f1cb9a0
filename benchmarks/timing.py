"""Measured and modelled times of the same launches: ``python benchmarks/timing.py --measure`` on a GPU, or ``--model``.

``SEEN`` and ``ALSO_SEEN`` are launches whose errors were looked at while the clock was built. ``HELD_OUT`` were written
down, and predicted, before they were measured. Measured: medians of a CUDA graph of one call between two events, launch
included, L2 cold and clean.
Modelled: ``sim.run(..., clock="h200")`` (docs/timing.md). Each goes to a file of its own in ``benchmarks/results``;
without an option both are read and set side by side.

Exit codes: 0 done, 2 no CUDA device to measure.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import RESULTS, gpu_target, machine, write

import cute_nvfp4
from cute_nvfp4 import BlockScaledTensor
from cute_nvfp4.harness.timing import ColdL2, StopRule, time_cuda
from cute_nvfp4.ops.gemv import gemv
from cute_nvfp4.ops.quantize import quantize
from cute_nvfp4.ops.rmsnorm_quantize import rmsnorm_quantize
from cute_nvfp4.ops.silu_mul_quantize import silu_mul_quantize
from cute_nvfp4.scale_layout import to_blocked
from cute_nvfp4.sim.clock.machine import machine as clock_machine

_RULE = StopRule(repeats=100, relative_error=0.002, seconds=3.0)
MEASURED, MODELLED = RESULTS / "timing_nvidia_h200.json", RESULTS / "timing_modelled_h200.json"
PREDICTED = RESULTS / "timing_predicted_h200.json"


class Case(NamedTuple):
    """One launch: an operation and its sizes; ``rule`` of quantization, ``n`` of a GEMM with a repacked weight."""

    operation: str
    rows: int
    k: int
    batch: int = 1
    rule: str = ""
    n: int = 0

    @property
    def name(self) -> str:
        batch = f" x {self.batch}" if self.batch > 1 else ""
        if self.n:
            return f"{self.operation} {self.rows} x {self.n} x {self.k}"
        return f"{self.operation} {self.rows} x {self.k}{batch}{' ' + self.rule if self.rule else ''}"


SEEN = (
    Case("gemv", 7168, 16384),
    Case("gemv", 7168, 2048),
    Case("gemv", 7168, 2048, 4),
    Case("gemv", 4096, 4096),
    Case("quantize", 16, 4096, rule="max"),
    Case("quantize", 1024, 4096, rule="max"),
    Case("rmsnorm_quantize", 128, 4096),
    Case("silu_mul_quantize", 128, 4096),
)
ALSO_SEEN = (
    *(Case("gemv", m, k) for m, k in ((8192, 8192), (4096, 14336), (14336, 4096), (1024, 1024), (2048, 8192))),
    *(Case("gemv", m, k) for m, k in ((128, 256), (512, 16384), (5120, 5120), (28672, 8192))),
    *(Case("gemv", m, k, b) for m, k, b in ((4096, 7168, 8), (1536, 7168, 4), (256, 2048, 16))),
    *(Case("quantize", m, k, rule="max") for m, k in ((1, 4096), (128, 7168), (512, 4096), (2048, 4096), (128, 16384))),
    *(Case("quantize", m, k, rule="four_six_mse") for m, k in ((16, 4096), (128, 7168), (1024, 4096))),
    *(Case("rmsnorm_quantize", m, k) for m, k in ((16, 4096), (128, 7168), (1024, 4096), (512, 8192))),
    *(Case("silu_mul_quantize", m, k) for m, k in ((16, 4096), (128, 7168), (1024, 4096), (512, 14336))),
)

HELD_OUT = (
    *(Case("gemv", m, k) for m, k in ((6144, 4096), (3072, 12288), (2560, 2560), (11008, 4096))),
    *(Case("gemv", m, k, b) for m, k, b in ((4096, 1024, 8), (1024, 8192, 2))),
    *(Case("quantize", m, k, rule="max") for m, k in ((64, 8192), (256, 5120), (768, 2048), (4096, 2048))),
    *(Case("quantize", m, k, rule=r) for m, k, r in ((64, 4096, "four_six_mae"), (256, 4096, "four_six_abs_max"))),
    *(Case("rmsnorm_quantize", m, k) for m, k in ((64, 2048), (256, 8192), (2048, 2048), (32, 16384))),
    *(Case("silu_mul_quantize", m, k) for m, k in ((64, 2048), (256, 8192), (2048, 2048), (32, 11008))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((1, 2048, 4096), (4, 8192, 2048), (8, 4096, 4096), (16, 2048, 8192))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((32, 4096, 4096), (128, 2048, 4096), (192, 4096, 2048))),
    *(Case("gemm", m, k, n=n) for m, n, k in ((512, 2048, 2048), (1024, 2048, 2048))),
)
"""Written on 2026-11-22, before any of them was predicted or measured by anybody. Seen from now on."""


def operands(case: Case, device: str) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """Random operands of a GEMV."""
    generator = torch.Generator(device=device).manual_seed(1)

    def draw(rows: int) -> BlockScaledTensor:
        size = (case.batch, rows, case.k // 2), (case.batch, rows, case.k // 16)
        data = torch.randint(0, 256, size[0], dtype=torch.uint8, device=device, generator=generator)
        return BlockScaledTensor(
            data, to_blocked(torch.randint(32, 96, size[1], dtype=torch.uint8, device=device, generator=generator))
        )

    return draw(case.rows), draw(1)


def call_of(case: Case, device: str) -> Callable[[], object]:
    """The launch, its operands made and its result's memory given where the operation takes it."""
    if case.operation == "gemv":
        a, b = operands(case, device)
        return functools.partial(gemv, a, b, out=gemv(a, b)) if device == "cuda" else lambda: gemv(a, b)
    generator = torch.Generator(device=device).manual_seed(1)
    if case.operation == "gemm":
        return gemm_of(case, generator)
    width = case.k * (2 if case.operation == "silu_mul_quantize" else 1)
    x = torch.randn(case.rows, width, generator=generator, device=device).bfloat16()
    scale = torch.tensor(6.1803 / 2688, device=device)
    backend = "cuda" if device == "cuda" else "sim"
    if case.operation == "quantize":
        options = {"rule": case.rule, "global_scale": scale, "backend": backend}
        out = quantize(x, **options) if device == "cuda" else None
        return lambda: quantize(x, **options, out=out)
    if case.operation == "silu_mul_quantize":
        return lambda: silu_mul_quantize(x, global_scale=scale, backend=backend)
    weight = torch.ones(case.k, dtype=torch.bfloat16, device=device)
    return lambda: rmsnorm_quantize(x, weight, global_scale=scale, backend=backend)


def gemm_of(case: Case, generator: torch.Generator) -> Callable[[], object]:
    """W4A16: bf16 times a repacked weight."""
    given = {"device": generator.device, "generator": generator, "dtype": torch.uint8}
    data = torch.randint(0, 256, (case.n, case.k // 2), **given)
    weight = cute_nvfp4.prepare_weight(BlockScaledTensor(data, torch.randint(32, 96, (case.n, case.k // 16), **given)))
    x = torch.randn(case.rows, case.k, device=generator.device, generator=generator).bfloat16()
    out = torch.empty(case.rows, case.n, device=generator.device, dtype=torch.bfloat16)
    backend = "cuda" if generator.device.type == "cuda" else "sim"
    return lambda: cute_nvfp4.gemm(x, weight, out=out, backend=backend)


def graph_of(call: Callable[[], object]) -> Callable[[], object]:
    """``call`` as a CUDA graph: no host time is in what it takes."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(cases: tuple[Case, ...]) -> dict[str, object]:
    """Medians in microseconds, by name."""
    clear, out = ColdL2(), {}
    tiny = torch.zeros(1, device="cuda")
    out["tiny"] = round(
        statistics.median(time_cuda(graph_of(lambda: tiny.fill_(1.0)), rule=_RULE, clear=clear)) / 1e3, 3
    )
    for case in cases:
        try:
            call = call_of(case, "cuda")  # keeps the operands: a graph does not
            samples = time_cuda(graph_of(call), rule=_RULE, clear=clear)
            out[case.name] = round(statistics.median(samples) / 1e3, 3)
        except Exception as error:
            print(case.name, repr(error)[:300], file=sys.stderr, flush=True)
            continue
        print(f"{case.name:45} {out[case.name]:9.2f} us measured", flush=True)
    return {"machine": machine(), "microseconds": out}


def model(cases: tuple[Case, ...]) -> dict[str, object]:
    """Modelled microseconds and what they are made of, by name."""
    out = {}
    for case in cases:
        begin = time.perf_counter()
        call = call_of(case, "cpu")
        with cute_nvfp4.simulating("sm_90a", checks=False, clock="h200", sm_count=132) as runs:
            call()
        timing = [runs[-1].result.timing]  # scratch memory of a first call may be cleared by another launch
        out[case.name] = {
            "microseconds": round(sum(t.microseconds for t in timing), 3),
            "launches": len(timing),
            "roofline": round(sum(t.roofline_us for t in timing), 3),
            "bound_by": timing[-1].bound_by,
        }
        seconds = time.perf_counter() - begin
        print(f"{case.name:45} {out[case.name]['microseconds']:9.2f} us modelled ({seconds:.1f} s)", flush=True)
    return {"clock": "h200", "cases": out}


def compare(same_launch: bool, predicted: bool) -> None:
    """Both, and how far the model is off; with the launch that was measured in the same run instead of the clock's, and
    what was ``predicted`` of held-out launches instead of what the clock says now."""
    measured, modelled = json.loads(MEASURED.read_text())["microseconds"], json.loads(MODELLED.read_text())["cases"]
    for entry in json.loads(PREDICTED.read_text())["cases"].items() if predicted else ():
        modelled[entry[0]] = {"roofline": 0.0, "bound_by": "", **entry[1]}
    launch = measured["tiny"] - clock_machine("h200")["launch.empty_us"] if same_launch else 0.0
    for title, cases in (("seen", SEEN + ALSO_SEEN), ("held out", HELD_OUT)):
        errors = {}
        print(f"{title}\n{'':45} {'measured':>9} {'modelled':>9} {'roofline':>9}  error")
        for case in cases:
            if case.name not in measured or case.name not in modelled:
                continue
            was, entry = measured[case.name], modelled[case.name]
            time_now = entry["microseconds"] + launch
            errors[case.name] = error = time_now / was - 1
            print(
                f"{case.name:45} {was:9.2f} {time_now:9.2f} {entry['roofline']:9.2f}  {error:+6.1%}"
                f"  {entry['bound_by']}"
            )
        if errors:
            worst = max(errors, key=lambda name: abs(errors[name]))
            sizes = [abs(e) for e in errors.values()]
            mean, median = statistics.mean(sizes), statistics.median(sizes)
            print(
                f"{len(errors)} launches: mean {mean:.1%}, median {median:.1%}, worst {errors[worst]:+.1%} ({worst})\n"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure on this machine's GPU")
    parser.add_argument("--model", action="store_true", help="ask the clock")
    parser.add_argument("--only", default="", help="only launches whose name contains this")
    parser.add_argument("--cases", default="all", choices=("seen", "held-out", "all"))
    parser.add_argument("--output", type=Path, help="where the record goes")
    parser.add_argument("--same-launch", action="store_true", help="compare with the tiny launch of the measurement")
    parser.add_argument("--predicted", action="store_true", help="compare what was predicted of held-out launches")
    options = parser.parse_args()
    cases = {"seen": SEEN + ALSO_SEEN, "held-out": HELD_OUT, "all": SEEN + ALSO_SEEN + HELD_OUT}[options.cases]
    cases = tuple(c for c in cases if options.only in c.name)
    if options.measure:
        gpu_target("--model works without one")
        write(measure(cases), options.output or MEASURED)
    elif options.model:
        write(model(cases), options.output or MODELLED)
    else:
        compare(options.same_launch, options.predicted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
