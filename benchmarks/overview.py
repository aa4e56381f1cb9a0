"""Times the calls of the README's table beside their peers, in one protocol: ``python benchmarks/overview.py``.

Every figure is the median of replays of a CUDA graph of one call between two events, launch included, with L2 cold and
clean; the contestants of a row take turns in alternating order. Results are checked first. The rows:

- GEMV beside ``bmm``;
- products with a prepared weight, x in bf16 and x quantized to E4M3 in the call, beside cuBLAS in bf16 and, where
  ``quack-kernels`` is installed, quack's W4A16 GEMM; one gated and one grouped product;
- quantization beside the compiled reference;
- a layer of a mixture of experts beside torch's ``_grouped_mm``;
- a whole model of Llama-3.1-8B's shape with drawn weights, beside the same model in bf16.

``python docs/tables.py --write`` puts the records of an H200 and of an H100 side by side into the README.

No row begins after ``--seconds``; the script names the rows that it leaves out. It writes the record after every row. A
row that fails costs its own line only. Exit codes: 0 done, 1 a result is wrong or a row failed, 2 no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gemm
import gemv
import generate
import moe
import quantize
from common import capture, gpu_target, machine, results_path, take_turns, write
from gemm_contestants import OURS, PEERS, Problem
from gemm_report import versions
from gemm_shapes import SETS, Shape
from generate_model import Decoder, empty_cache
from generate_model import Shape as ModelShape

from cute_nvfp4.harness.timing import ColdL2

ROUNDS, SECONDS = 40, 150.0
SIZE = 8192
ROWS = (1, 16, 64, 128, 256, 512, 2048)
PRODUCTS = [
    *(Shape("dense", (m,), SIZE, SIZE) for m in ROWS),
    next(s for s in SETS["gated"] if s.m == (512,) and s.n == 3072),
    SETS["grouped"][0],
]
TOKENS = (1, 64, 1024)
BATCHES, PROMPT, CONTEXT = (1, 16), 2048, 1024
CONTESTANTS = {x.name: x for x in (*PEERS, *OURS)}
PEER = {
    "cublas": "cuBLAS bf16",
    "bmm": "bf16 `bmm`",
    "compiled": "compiled torch",
    "grouped_mm": "torch `_grouped_mm`, bf16",
    "bf16": "the same model in bf16",
}
"""The names of the peers in tables."""


Call = Callable[[], Any]


class Row(NamedTuple):
    """A line of the table: a call, its peer's key in ``PEER``, µs by contestant, and notes why a contestant has no
    time.

    us: "ours", "peer", and "quack" where it runs.
    """

    call: str
    peer: str
    us: dict[str, float]
    notes: Mapping[str, str] = MappingProxyType({})


class Clock(NamedTuple):
    """How to time a row: replays of each contestant, and what clears L2 before each."""

    rounds: int
    clear: Callable[[], None]

    def medians(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """The median of each call in microseconds."""
        captured = {name: capture(call) for name, call in calls.items()}
        return {name: statistics.median(us) for name, us in take_turns(captured, self.rounds, self.clear).items()}


def vectors(shape: tuple[int, int, int], clock: Clock, device: str = "cuda") -> Iterator[Row]:
    """Times a GEMV (M, K, L) beside ``bmm``."""
    m, k, batch = shape
    a, b = gemv.operands(m, k, batch, 1111, device)
    if not (error := gemv.check(a, b)) < 1e-6:
        raise AssertionError(f"gemv {shape}: got a relative error of {error}, expected less than 1e-6")
    out = torch.empty(batch, m, dtype=torch.float16, device=device)
    dense = torch.randn(batch, m, k, device=device).bfloat16()
    vector = torch.randn(batch, k, 1, device=device).bfloat16()
    calls = {"ours": lambda: gemv.gemv(a, b, out=out), "peer": lambda: torch.bmm(dense, vector)}
    text = f"`gemv` {m} × {k}" + (f", {batch} matrices" if batch > 1 else "")
    yield Row(text, "bmm", clock.medians(calls))


def product_name(shape: Shape, contestant: str) -> str:
    """The name of a product of one of our contestants in tables."""
    operation = {"dense": "gemm", "gated": "gated_gemm", "grouped": "grouped_gemm"}[shape.problem]
    if shape.problem == "grouped" and contestant == "w4a8":
        operation = "grouped_gemm_contiguous"  # grouped_gemm would take rows that are already quantized
    sizes = str(shape).replace(", ", " × ")
    if len(shape.m) > 1:
        sizes = f"{len(shape.m)} groups of {min(shape.m)} to {max(shape.m)} rows, {shape.n} × {shape.k}"
    x = {"w4a16": "bf16 rows", "w4a8": "rows quantized to E4M3 in the call"}[contestant]
    return f"`{operation}` {sizes}, {x}"


def products(shape: Shape, clock: Clock) -> Iterator[Row]:
    """Times products of one weight, with x in bf16 and with x quantized to E4M3 in the call, beside cuBLAS."""
    names = [name for name in ("cublas", "quack", "w4a16", "w4a8") if CONTESTANTS[name].runs(shape)]
    problem, captured, notes = Problem.random(shape), {}, {}
    for name in names:
        found, about = gemm.entered(CONTESTANTS[name], problem, clock.clear)
        if found is None:
            notes[name] = f"{about['status']}: {about['reason']}"
        else:
            captured[name] = found
    times = take_turns(captured, clock.rounds, clock.clear)
    us = {name: statistics.median(found) for name, found in times.items()}
    for name in ("w4a16", "w4a8"):
        if name in names:
            keys = {"ours": name, "peer": "cublas", "quack": "quack"}
            found = {key: us[who] for key, who in keys.items() if who in us}
            said = {key: notes[who] for key, who in keys.items() if who in notes}
            yield Row(product_name(shape, name), "cublas", found, said)


def quantization(rule: str, size: int, clock: Clock, device: str = "cuda") -> Iterator[Row]:
    """Quantizes a square matrix in bf16 with a given global scale, beside the reference through ``torch.compile``."""
    x = torch.randn(size, size, device=device, generator=torch.Generator(device).manual_seed(1111)).bfloat16()
    scale = quantize.plain_scale(rule, device)
    quantize.check(x[:1024], {"rule": rule, "global_scale": scale})

    def reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = quantize.quantize(x, rule=rule, global_scale=scale, backend="reference")
        return found.data, found.scale

    compiled = torch.compile(reference, fullgraph=True, dynamic=False)
    calls = {
        "ours": lambda: quantize.quantize(x, rule=rule, global_scale=scale),
        "peer": lambda: compiled(x),
    }
    yield Row(f"`quantize` {size} × {size} bf16, rule `{rule}`", "compiled", clock.medians(calls))


def experts(layer: moe.Layer, tokens: tuple[int, ...], clock: Clock, device: str = "cuda") -> Iterator[Row]:
    """Times a mixture-of-experts layer, from the router's choice to the combined rows, with uniform routing."""
    weights = moe.Weights(layer, device, quantized=False)
    wide = weights.in_bf16()
    for count in tokens:
        r = moe.Routing.random(layer, count, False, device)
        calls = {
            "ours": lambda r=r: moe.moe(r.x, r.ids, r.weights, weights.experts),
            "peer": lambda r=r: moe.by_torch(layer, wide, weights.biases, r),
        }
        moe.check_near(layer, count, calls["ours"](), calls["peer"]())
        plural = "s" if count > 1 else ""
        yield Row(f"`moe` {layer.model}, {count} token{plural}, bf16 rows", "grouped_mm", clock.medians(calls))


@torch.inference_mode()
def model(clock: Clock, shape: ModelShape = generate.LLAMA_8B, device: str = "cuda") -> Iterator[Row]:
    """Times a decoder of Llama-3.1-8B's shape: decoding steps, and a prompt."""
    between, how = generate.compiled_between(mixture=shape.experts > 0)
    made = generate.models(shape, ["bf16", "w4a16"], device, between)
    far = generate.distances(made, device)["w4a16"]
    if not far < generate.CLOSE:
        raise AssertionError(f"logits are {far} from those of bf16, expected less than {generate.CLOSE}")
    name = f"{shape.name}'s shape" + (", uncompiled" if how != "compiled" else "")
    steps: dict[str, Callable[[Decoder], Call]] = {
        f"a step of decoding, batch {batch}": lambda m, batch=batch: decoding(m, batch, CONTEXT, device)
        for batch in BATCHES
    }
    steps[f"a prompt of {PROMPT} tokens"] = lambda m: prompt(m, PROMPT, device)
    for text, of in steps.items():
        us = clock.medians({"ours": of(made["w4a16"]), "peer": of(made["bf16"])})
        yield Row(f"{name}, {text}", "bf16", us)


def decoding(decoder: Decoder, batch: int, context: int = CONTEXT, device: str = "cuda") -> Call:
    """A decoding step of ``batch`` sequences that attends to ``context`` tokens."""
    cache = empty_cache(decoder.shape, batch, context, device)
    position = torch.tensor([context - 1], device=device)
    tokens = torch.arange(batch, device=device)[:, None]
    return lambda: generate.step(decoder, tokens, cache, position)


def prompt(decoder: Decoder, length: int = PROMPT, device: str = "cuda") -> Call:
    """The reading of one prompt."""
    cache = empty_cache(decoder.shape, 1, length, device)
    tokens = torch.arange(length, device=device)[None]
    return lambda: decoder(tokens, cache)


def rows() -> dict[str, Callable[[Clock], Iterator[Row]]]:
    """What measures the lines of the table, in the table's order, by the names of ``--only``."""
    found: dict[str, Callable[[Clock], Iterator[Row]]] = {}
    for shape in gemv.SHAPES:
        found[f"gemv-{shape[0]}-{shape[1]}"] = lambda clock, shape=shape: vectors(shape, clock)
    for shape in PRODUCTS:
        found[f"{shape.problem}-{max(shape.m)}"] = lambda clock, shape=shape: products(shape, clock)
    for rule in ("max", "four_six_mse"):
        found[f"quantize-{rule}"] = lambda clock, rule=rule: quantization(rule, SIZE, clock)
    found["moe"] = lambda clock: experts(moe.LAYERS[0], TOKENS, clock)
    found["model"] = model
    return found


def measure(clock: Clock, asked: list[str], seconds: float, record: dict[str, Any], path: Path) -> list[str]:
    """Fills ``record`` and writes it after every row. Returns a line for each row that failed or was left out."""
    begin, missing = time.monotonic(), []
    for name, measured in rows().items():
        if name not in asked:
            continue
        before = time.monotonic()
        if before - begin > seconds:
            missing.append(f"{name}: left out, {before - begin:.0f} s had passed")
            continue
        try:
            for row in measured(clock):
                keep(record, {**row._asdict(), "notes": dict(row.notes)})
                times = "  ".join(f"{who} {us:.1f}" for who, us in row.us.items())
                print(f"{row.call:>75}  {times} µs  {row.notes or ''}", file=sys.stderr, flush=True)
                missing += [f"{row.call}: {who}: {why}" for who, why in row.notes.items()]
                write(record, path)
        except Exception as error:  # one row's failure must not cost the others' results; the exit code tells
            missing.append(f"{name}: {gemm.reason_of(error)}")
        torch.cuda.empty_cache()
        record["seconds"][name] = round(time.monotonic() - before, 1)
    record["missing"] = missing
    write(record, path)
    return missing


def keep(record: dict[str, Any], row: dict[str, Any]) -> None:
    """Puts a row into the record; it replaces an earlier row of the same call."""
    found = next((i for i, old in enumerate(record["rows"]) if old["call"] == row["call"]), len(record["rows"]))
    record["rows"][found : found + 1] = [row]


def begun(about: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """A record without rows, or with the rows of the file ``path`` if that is of the same GPU, day and versions."""
    record = about | {"seconds": {}, "rows": [], "missing": []}
    if path is None:
        return record
    old = json.loads(path.read_text())
    for name in ("gpu", "date", "driver", "versions"):
        if old[name] != about[name]:
            raise SystemExit(f"--update {path}: got {name} {old[name]}, expected this machine's {about[name]}")
    return record | {"rows": old["rows"], "seconds": old["seconds"]}


def table(record: Mapping[str, Any]) -> str:
    """The record as a table for a terminal."""
    lines = [f"{record['gpu']}, {record['date']}, driver {record['driver']}, {versions(record)}", record["timing"]]
    for row in record["rows"]:
        us = row["us"]
        ratio = f"{us['peer'] / us['ours']:6.2f} ×" if {"ours", "peer"} <= set(us) else ""
        cells = "".join(f"{us[who]:10.1f}" if who in us else f"{'–':>10}" for who in ("ours", "peer", "quack"))
        lines.append(f"{row['call']:>75}{cells}  {ratio}  {row['peer']}")
    return "\n".join([*lines, f"seconds: {record['seconds']}", *record["missing"]])


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/overview_<gpu>.json)")
    parser.add_argument(
        "--update", type=Path, help="begin with this record of the same GPU and day: its other rows stay"
    )
    parser.add_argument("--only", nargs="+", choices=list(rows()), default=list(rows()), help="some of the rows")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed replays of each contestant")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no row after this many")
    options = parser.parse_args(arguments)
    gpu_target("tests/unit/test_overview_benchmark.py runs its rows on a CPU.")
    clear = ColdL2()
    about = machine()
    about["versions"] |= gemm.peer_versions()
    timing = "medians of replays of a CUDA graph, launch included, L2 cold and clean, contestants in turn"
    record = begun(about | {"timing": timing, "rounds": options.rounds}, options.update)
    clock = Clock(options.rounds, clear)
    missing = measure(clock, options.only, options.seconds, record, options.output or results_path("overview"))
    print(table(record))
    return int(any("not available" not in line for line in missing))


if __name__ == "__main__":
    sys.exit(main())
