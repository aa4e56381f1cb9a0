"""The tables of H200 measurements: products, quantization, launches, whole models and layers of experts."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from table_cells import table, times, us

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def record(name: str) -> Any:
    """Reads a file of ``benchmarks/results``."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def machine(of: dict[str, Any], how: str) -> str:
    """Where, when and how a record was made: the line above its table."""
    named = ", ".join(f"{name} {of['versions'][name]}" for name in ("torch", "nvidia-cutlass-dsl", "quack-kernels")
                      if name in of["versions"])  # fmt: skip
    return (
        f"*One {of['gpu']}, {of['date']} (driver {of['driver']}, CUDA {of['versions']['cuda']}, {named}); {how}.*\n\n"
    )


FUSED_BOUNDS = [("rmsnorm_quantize", 1, 4096), ("rmsnorm_quantize", 128, 8192), ("rmsnorm_quantize", 2048, 8192),
                ("silu_mul_quantize", 128, 14336), ("silu_mul_quantize", 2048, 14336)]  # fmt: skip
GRAPH = "medians of replays of a CUDA graph, µs, launch included, L2 cold and clean, contestants in turn"
CALL = "medians of one eager call between two CUDA events, µs, launch included, L2 cold and clean"


def _products(sets: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the rows of sets of ``benchmarks/gemm.py``; ``us`` has the median of each contestant that was timed."""
    for name in sets:
        for row in record("gemm_nvidia_h200")["sets"][name]["rows"]:
            timed = {who: what["median_us"] for who, what in row["results"].items() if what["status"] == "timed"}
            yield row | {"us": timed}


def _product_table(name: str, peers: dict[str, str]) -> str:
    """The products of a set beside their peers; × is the speedup over cuBLAS."""
    of = record("gemm_nvidia_h200")["sets"][name]
    ours = {"w4a16": "W4A16", "w4a4": "W4A4"}
    head = ["m, n, k", *peers.values(), *ours.values(), *(f"{text} ×" for text in ours.values()), "floor, % of W4A16"]
    rows = []
    for row in _products([name]):
        found = [us(row["us"][who]) if who in row["us"] else "" for who in (*peers, *ours)]
        floor = f"{row['floor_us'] / row['us']['w4a16']:.0%}"
        rows.append([row["text"], *found, *(times(row["us"]["cublas"] / row["us"][who]) for who in ours), floor])
    launch, copy, dense = (of["ceilings"][name] for name in ("launch_us", "copy_bytes_s", "dense_flop_s"))
    how = (
        f"{GRAPH}; an empty launch takes {launch:.1f}; × is how many times faster than cuBLAS in bf16; "
        "the floor is an empty launch, and the longer of: all weights "
        f"at a copy's {copy / 1e12:.2f} TB/s, all operations at cuBLAS's {dense / 1e12:.0f} TFLOP/s (8192³, bf16)"
    )
    return machine(of, how) + table(head, rows)


PEERS = {"cublas": "cuBLAS bf16", "quack": "quack (W4A16)", "triton": "Triton (W4A16)"}


def gemm() -> str:
    """The products of 8192 × 8192, for every number of rows."""
    return _product_table("m-sweep", PEERS)


def contest() -> str:
    """The shapes of the contest's GEMM problem."""
    return _product_table("contest", PEERS)


def models() -> str:
    """The layers of two families of models."""
    return _product_table("models", PEERS)


def gated() -> str:
    """Gated products; cuBLAS computes one product of twice the columns, and a kernel silu · mul."""
    return _product_table("gated", PEERS)


def grouped() -> str:
    """Grouped products; cuBLAS computes one product after the other."""
    return _product_table("grouped", {"cublas": "cuBLAS bf16", "grouped_mm": "torch `_grouped_mm`", "quack": "quack"})


def _gemv_name(shape: dict[str, int]) -> str:
    batch = f", {shape['l']} matrices" if shape["l"] > 1 else ""
    return f"`gemv` {shape['m']} × {shape['k']}{batch}"


def gemv() -> str:
    """The contest's GEMVs beside torch's bf16 product."""
    of = record("gemv_nvidia_h200")
    rows = [
        [_gemv_name(s["shape"]), us(s["median_us"]), f"{s['percent_of_copy']:.1f} %", us(s["torch_bf16_bmm_us"]),
         times(s["times_faster_than_bf16"])]
        for s in of["shapes"]
    ]  # fmt: skip
    return machine(of, CALL) + table(["call", "µs", "of a copy's bandwidth", "bf16 `bmm`", "×"], rows)


def quantize() -> str:
    """Every request of ``benchmarks/quantize.py``."""
    of = record("quantize_nvidia_h200")
    rows = [
        [
            r["format"],
            f"`{r['rule']}`",
            r["dtype"],
            r["note"] or "—",
            us(r["median_us"]),
            f"{r['percent_of_copy']:.1f} %",
        ]
        for r in of["rows"]
    ]
    size = " × ".join(map(str, of["size"]))
    head = ["format", "rule", "x", "global scale, data, options", "µs", "of a copy's bandwidth"]
    return machine(of, f"{size}; {CALL}") + table(head, rows)


def fused() -> str:
    """Fused normalization and activation beside torch's followed by ``quantize``."""
    of = record("fused_nvidia_h200")
    rows = []
    for r in of["rows"]:
        ours, theirs = r["us"]["fused"], r["us"].get("torch, quantize")
        if theirs:
            rows.append(
                [f"`{r['operation']}`", f"{r['rows']} × {r['k']}", us(ours), us(theirs), f"{theirs / ours:.1f}"]
            )
    how = "graphs of twenty calls divided by twenty, µs, L2 warm"
    head = ["operation", "rows × K, bf16", "fused", "torch, then `quantize`", "×"]
    return machine(of, how) + table(head, rows)


def fused_bounds() -> str:
    """The time of a device copy, in the same run, of the bytes that some fused calls move."""
    of = record("fused_nvidia_h200")
    rows = [
        [f"`{r['operation']}`", f"{r['rows']} × {r['k']}", f"{r['bytes'] / 1e6:.2f}", f"{r['bound_us']:.2f}"]
        for r in of["rows"]
        if (r["operation"], r["rows"], r["k"]) in FUSED_BOUNDS
    ]
    head = ["operation", "rows × K, bf16", "MB", "µs"]
    return machine(of, f"bytes at the rate of a device copy, {of['copy_bytes_s'] / 1e12:.2f} TB/s") + table(head, rows)


def decode() -> str:
    """Decoding and packing beside the floor, which follows from their bytes."""
    of = record("decode_nvidia_h200")
    rows = [
        [f"`{r['name'].split()[0]}` {' '.join(r['name'].split()[1:])}", us(r["us"]), us(r["floor_us"])]
        for r in of["rows"]
    ]
    return machine(of, GRAPH + "; the floor is the bytes at a copy's rate, and an empty launch") + (
        table(["K = 8192", "µs", "floor"], rows)
    )


def launch() -> str:
    """Host time of calls, in µs and as a multiple of ``torch.mm(out=)``."""
    of = record("launch_nvidia_h200")
    unit = of["host_us"]["torch.mm(out=)"]
    rows = [[f"`{name}`", f"{value:.1f}", f"{value / unit:.2f}"] for name, value in of["host_us"].items()]
    how = "host time of single warm calls, medians"
    return machine(of["machine"], how) + table(["call", "µs", "of `torch.mm(out=)`"], rows)


def generate(name: str = "generate") -> str:
    """A whole model: its decoding steps and prompts beside bf16. name: the record's name, without its GPU."""
    from generate import rows_of_table

    of = record(f"{name}_nvidia_h200")
    names = list(of["weight_bytes"])
    rows = [["weights, GB", *(f"{of['weight_bytes'][name] / 1e9:.2f}" for name in names)]]
    attention = of.get("attention", "torch's choice")
    what = f"{of['shape']['name']}, drawn weights, {of['context']} tokens of context, attention: {attention}"
    how = f"medians of graphs, L2 cold; {what}"
    return machine(of, how) + table(["", *names], rows + rows_of_table(of["rows"], names))


def generate_split(name: str = "generate", what: str = "split") -> str:
    """The times of the kernels of a step at batch 1, or of the longest prompt (``prompt_split``)."""
    from generate import by_work

    of = record(f"{name}_nvidia_h200")
    found = {contestant: by_work(rows) for contestant, rows in of[what].items()}
    rows = [[work, *(f"{us[work]:.0f}" for us in found.values())] for work in next(iter(found.values()))]
    rows = [row for row in rows if any(cell != "0" for cell in row[1:])]
    longest = max(row.get("tokens", 0) for row in of["rows"])
    subject = "a step at batch 1" if what == "split" else f"a prompt of {longest} tokens"
    how = f"µs of {subject}, by torch's profiler, L2 warm; gaps are in none"
    return machine(of, how) + table(["", *found], rows)


def through_transformers() -> str:
    """Models that transformers loads and runs: memory, and the time between two tokens."""
    of = record("through_transformers_nvidia_h200")
    rows = []
    for model in of["models"]:
        found = {row["contestant"]: row for row in model["rows"]}
        for name, row in found.items():
            step, kernels, size = row["step_us"], row["gpu_us"], model["file_bytes"]
            faster = [
                f" ({times(found['bf16'][x] / row[x])} ×)" if name != "bf16" else "" for x in ("step_us", "gpu_us")
            ]
            cells = [f"{us(step)}{faster[0]}", f"{1e6 / step:.0f}", f"{us(kernels)}{faster[1]}"]
            memory = [f"{row['held_bytes'] / 1e9:.2f}", f"{row['peak_bytes'] / size:.3f}" if name != "bf16" else ""]
            rows.append([f"{model['shape']}, {name}", *cells, *memory])
    how = f"drawn weights, one sequence, {of['prompt']} tokens read, medians of {of['tokens']} tokens"
    head = ["", "a token, µs", "tokens a second", "its kernels, µs", "weights, GB", "peak while loading ÷ file"]
    return machine(of, how) + table(head, rows)


def w4a8_products() -> str:
    """Medians of products by width of activations, and speedups over the faster peer."""
    names = ("w4a16", "w4a8-rows", "w4a8", "w4a8-mxfp4", "w4a4-plain", "scaled_mm")
    lines = [
        "| m, n, k | bf16 peer, µs | W4A16 | W4A8, x in FP8 | W4A8 | W4A8, MXFP4 | W4A4, plain operands | FP8 × FP8 |",
        "|---" * 8 + "|",
    ]
    for kind, of in record("gemm_w4a8_nvidia_h200")["sets"].items():
        for row in of["rows"]:
            found = {name: x["median_us"] for name, x in row["results"].items() if "median_us" in x}
            peer = min(found[name] for name in ("cublas", "grouped_mm") if name in found)
            shown = [f"{found[x]:.1f} ({peer / found[x]:.2f})" if x in found else "" for x in names]
            lines.append(f"| {'gated ' * (kind == 'gated')}{row['text']} | {peer:.1f} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def moe_layers() -> str:
    """Whole layers of experts; × is the speedup over torch in bf16. Humming's two products alone, if they were
    measured."""
    of = record("moe_nvidia_h200")
    peers = {"humming": "Humming, W4A16", "humming-w4a8": "Humming, MXFP4 × FP8"}
    peers = {name: head for name, head in peers.items() if any(name in row["us"] for row in of["rows"])}
    rows = []
    for row in of["rows"]:
        found, torch_us = row["us"], row["us"]["torch"]
        cells = [f"{us(found[name])} ({times(torch_us / found[name])} ×)" for name in ("moe", "w4a8")]
        cells += [us(torch_us), *(us(found[name]) if name in found else "" for name in peers), us(row["floor_us"])]
        rows.append([row["model"], str(row["tokens"]), *cells])
    how = "medians of graphs, µs, L2 cold; routing maps to combined rows, uniform routing"
    heads = ["layer of", "tokens", "W4A16", "W4A8", "torch, bf16", *peers.values(), "bytes alone"]
    return machine(of, how) + table(heads, rows)


def moe_plans() -> str:
    """Layers of experts by alternative plans of their products: the planner's plan, and the three fastest
    alternatives."""
    of = record("moe_plans_nvidia_h200")
    rows = []
    for row in of["rows"]:
        found = {name: x for name, x in row["us"].items() if name not in ("moe", "plan")}
        best = [f"{us(x)} ({name})" for name, x in sorted(found.items(), key=lambda item: item[1])[:3]]
        best += [""] * (3 - len(best))
        rows.append([row["model"], str(row["tokens"]), row["dtype"], us(row["us"]["plan"]), *best, str(len(found))])
    heads = "layer of", "tokens", "rows", "plan", "fastest of the others", "second", "third", "others tried"
    return machine(of, "medians of graphs, µs, L2 cold; whole layers, uniform routing") + table(list(heads), rows)


TABLES = {
    **{f.__name__: f for f in (gemm, contest, models, gated, grouped, gemv, quantize, fused, decode, launch)},
    "fused-bounds": fused_bounds,
    "w4a8_products": w4a8_products,
    "moe_layers": moe_layers,
    "moe_plans": moe_plans,
    "generate": generate,
    "generate_split": generate_split,
    "through_transformers": through_transformers,
    "generate_prompt_split": functools.partial(generate_split, "generate_triton", "prompt_split"),
    "generate_triton_split": functools.partial(generate_split, "generate_triton"),
    "generate_qwen3_split": functools.partial(generate_split, "generate_qwen3_30b_a3b"),
}
TABLES |= {
    f"generate_{name}": functools.partial(generate, f"generate_{name}")
    for name in ("fused_norms", "flash", "triton", "qwen3_30b_a3b", "smollm2_135m")
}
