"""Times a model's decoding and its reading of prompts, end to end: NVFP4 weights beside bf16.

``generate_model.py`` has the model, with drawn weights: embedding, RMSNorm, rotary positions, torch's SDPA with a
static cache, an MLP or a mixture of experts, head, the most likely token. All contestants have the same weights,
attention and operations between products, which torch compiles where it can; ``torch._grouped_mm`` multiplies experts
in bf16. ``--model Qwen3-30B-A3B`` takes 80 GB with bf16 and one other contestant. For it ``cute_nvfp4.route`` chooses
the experts in all contestants but bf16; "bf16, our router" and "w4a16, torch's router" have the other router.

``decode`` times a step of one token for each sequence, in a CUDA graph, attending to all ``--context`` tokens;
``products`` times its linear layers alone, in their own graph; ``prefill`` times one prompt, in a graph. Contestants
take turns, L2 cold; times are medians. Tokens a second are sequences divided by a step's time. ``--split`` adds the
times of the kernels of a step and of the longest prompt. ``--compile`` runs each call once, with one layer: several
such processes fill the cache in parallel before the timed run. It needs torch and this package. docs/tables.py writes
the table of benchmarks/records/models.md from the results file.

    python benchmarks/generate.py --quick
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from between_torch import EPSILON, Between
from common import Captured, capture, gpu_target, machine, results_path, take_turns, write
from generate_model import LLAMA_8B, SHAPES, Decoder, Shape, empty_cache, models
from torch.nn.attention import SDPBackend, sdpa_kernel

from cute_nvfp4.harness.timing import ColdL2

NAMES = ["bf16", "w4a16", "w4a16, head too", "w4a8", "w4a4"]
PARTS = ["w4a8, MLP in parts"]
ROUTERS = ["bf16, our router", "w4a16, torch's router"]
"""Further contestants for a mixture, with the other router: elsewhere bf16 has torch's, the others
``cute_nvfp4.route``."""
BATCHES, PROMPTS = (1, 16, 64), (2048, 8192)
ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
TRITON = "triton"
"""The option for the kernels of ``between_triton.py``, with torch's attention for prompts."""
CLOSE = 0.1
"""The largest relative distance of outputs between W4A16 and bf16: equal weights, but sums rounded differently."""


def step(model: Decoder, tokens: torch.Tensor, cache: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """One step of generation: replaces ``tokens`` (B, 1) by the most likely next tokens, and returns the logits."""
    logits = model(tokens, cache, position)
    tokens.copy_(model.between.token(logits))
    return logits


def products(model: Decoder, rows: int, device: torch.device | str) -> Callable[[], None]:
    """A call that computes only the products of a step with ``rows`` sequences, including the head and routed
    experts."""
    shape = model.shape
    widths = shape.hidden, shape.heads * shape.head_dim
    inputs = [torch.randn(rows, 1, width, device=device).bfloat16() for width in widths]

    def run() -> None:
        for layer in model.layers:
            layer.products(*inputs)
        model.head(inputs[0][:, 0])

    return run


def distances(made: Mapping[str, Decoder], device: torch.device | str, length: int = 16) -> dict[str, float]:
    """The relative distance |difference| / |outputs| between each model's outputs and bf16's. The outputs are the
    logits after one prompt. For a mixture, where the last bit of x may choose another expert, they are what each
    layer's products give for equal x."""
    shape = next(iter(made.values())).shape
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocabulary, (1, length), generator=generator).to(device)
    cache, found = empty_cache(shape, 1, length, device), {}
    for name, model in made.items():
        x = torch.nn.functional.embedding(tokens, model.embedding)
        layers = [product(x) for layer in model.layers for product in (layer.qkv, layer.feed)] if shape.experts else []
        found[name] = torch.cat([y.flatten() for y in layers or [model(tokens, cache)]]).double()
    exact = found.get("bf16")
    return {} if exact is None else {n: float((x - exact).norm() / exact.norm()) for n, x in found.items()}


def compiled_between(mixture: bool) -> tuple[Between, str]:
    """The operations between products, compiled if a trial of them compiles, and a description. mixture: whether to try
    experts in bf16, too, which stay uncompiled if torch cannot compile them."""
    x = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
    torch._dynamo.config.cache_size_limit = 64
    compiled = Between().compiled()
    try:
        compiled.add_norm(x, x, x[0])
    except Exception as error:
        print(f"torch.compile does not work here, all run uncompiled: {error}"[:300], file=sys.stderr)
        return Between(), "eager"
    if mixture:
        ids, both = torch.zeros(64, 2, dtype=torch.int64, device="cuda"), x.expand(4, -1, -1).contiguous()
        try:
            compiled.experts(x, ids, ids.float(), both.mT, both[:, :, :32].contiguous().mT)
        except Exception as error:
            print(f"experts in bf16 run uncompiled: {error}"[:300], file=sys.stderr)
            return compiled._replace(
                experts=Between().experts, slots=Between().slots
            ), "compiled, experts in bf16 eager"
    return compiled, "compiled"


def timed(calls: dict[str, Captured], rounds: int) -> dict[str, list[float]]:
    """Quartiles of each call, in microseconds."""
    found = take_turns(calls, rounds, ColdL2())
    return {name: statistics.quantiles(times, n=4) for name, times in found.items()}


def captured_steps(made: Mapping[str, Decoder], batch: int, context: int) -> dict[str, Captured]:
    """A step of each contestant, captured in a graph."""
    shape = next(iter(made.values())).shape
    cache, position = empty_cache(shape, batch, context, "cuda"), torch.tensor([context - 1], device="cuda")
    steps = {}
    for name, model in made.items():
        tokens = torch.arange(batch, device="cuda")[:, None] % shape.vocabulary
        steps[name] = capture(lambda m=model, t=tokens: step(m, t, cache, position))
    return steps


def by_kernel(found: Iterable[tuple[str, float]], replays: int) -> list[dict]:
    """The kernels of one replay, the longest first. found: (name, microseconds) of all kernels of ``replays``
    replays."""
    sums: dict[str, list[float]] = {}
    for name, us in found:
        sums.setdefault(name, []).append(us)
    rows = [{"kernel": n, "count": len(us) / replays, "us": sum(us) / replays} for n, us in sums.items()]
    return sorted(rows, key=lambda row: -row["us"])


def split(call: Captured, replays: int = 5) -> list[dict]:
    """The times of the kernels of one replay, by torch's profiler, L2 warm. Gaps between kernels are in none of
    them."""
    kind = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[kind]) as seen:
        for _ in range(replays):
            call.graph.replay()
        torch.cuda.synchronize()
    # equal, not the same: torch makes another object of the enumeration's value each time
    events = [x for x in seen.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    return by_kernel(((x.name, x.time_range.elapsed_us()) for x in events), replays)


WORK = {
    "norms": r"rsqrt|[Rr]msnorm|add_norm",
    "router": r"norm_route|copy_mul_sum|TopK|bitonic|softmax|moeroute",
    "products": r"nvjet|splitK|gemm|quantize|moe",
    "attention": r"sdpa|flash|fmha|attend_kernel",
    "keys and values kept": r"index_copy",
    "positions": r"split_sub|turn_kernel",
    "activation": r"silu",
    "token": r"reduce_kernel|argmax",
}
"""Parts of kernels' names, and the work that each means. The first match counts."""


def by_work(rows: Sequence[dict]) -> dict[str, float]:
    """Microseconds by kind of work, of the rows of ``by_kernel``."""
    found = dict.fromkeys((*WORK, "other"), 0.0)
    for row in rows:
        found[next((name for name, part in WORK.items() if re.search(part, row["kernel"])), "other")] += row["us"]
    return found


def decode_rows(made: Mapping[str, Decoder], batch: int, context: int, rounds: int) -> list[dict]:
    """A record for each contestant: times of steps and of their products."""
    steps = captured_steps(made, batch, context)
    alone = {name: capture(products(model, batch, "cuda")) for name, model in made.items()}
    times, shares = timed(steps, rounds), timed(alone, rounds)
    return [
        {"what": "decode", "contestant": name, "batch": batch, "context": context, "us": middle}
        | {"quartiles_us": [low, high], "products_us": shares[name][1], "tokens_s": batch / middle * 1e6}
        for name, (low, middle, high) in times.items()
    ]


def captured_prompts(made: Mapping[str, Decoder], length: int) -> dict[str, Captured]:
    """The reading of a prompt by each contestant, captured in a graph."""
    shape = next(iter(made.values())).shape
    cache = empty_cache(shape, 1, length, "cuda")
    tokens = torch.arange(length, device="cuda")[None] % shape.vocabulary
    return {name: capture(lambda m=model: m(tokens, cache)) for name, model in made.items()}


def prefill_rows(calls: dict[str, Captured], length: int, rounds: int) -> list[dict]:
    """A record for each contestant: times of reading a prompt."""
    return [
        {"what": "prefill", "contestant": name, "tokens": length, "us": middle, "quartiles_us": [low, high]}
        | {"tokens_s": length / middle * 1e6}
        for name, (low, middle, high) in timed(calls, rounds).items()
    ]


def rows_of_table(rows: Sequence[dict], names: Sequence[str]) -> list[list[str]]:
    """Milliseconds and speedups over bf16, a line for each measurement; for steps also a line of their products."""
    groups: dict[tuple[str, int], dict[str, dict]] = {}
    for row in rows:
        groups.setdefault((row["what"], row.get("batch", row.get("tokens"))), {})[row["contestant"]] = row
    lines = []
    for (what, size), group in groups.items():
        kinds = ("us", "products_us") if what == "decode" else ("us",)
        for kind in kinds:
            base = group.get("bf16", {}).get(kind)
            label = {"decode": f"decode, batch {size}", "prefill": f"prefill, {size} tokens"}[what]
            lines.append(["… its products" if kind == "products_us" else label])
            for name in names:
                us = group[name][kind]
                lines[-1].append(f"{us / 1e3:.2f} ms" + (f" ({base / us:.2f} ×)" if base and name != "bf16" else ""))
    return lines


def table(rows: Sequence[dict], names: Sequence[str]) -> str:
    """The rows in Markdown."""
    lines = [["", *names], ["---"] * (len(names) + 1), *rows_of_table(rows, names)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def weight_bytes(model: Decoder) -> int:
    """Bytes of all matrices but the embedding."""
    found = sum(x.nbytes for name, x in model.named_buffers() if name not in ("embedding", "frequencies"))
    for module in model.modules():
        if getattr(module, "experts", None) is not None:
            found += sum(x.nbytes for x in module.experts.tensors().values())
        elif hasattr(weight := getattr(module, "weight", None), "packed"):
            found += weight.packed.nbytes
    return found


def measure(shape: Shape, names: list[str], options: argparse.Namespace) -> dict:
    """Takes all measurements and returns the record."""
    begin = time.perf_counter()
    between, how = (Between(), "eager") if options.eager else compiled_between(shape.experts > 0)
    if options.attention == TRITON:
        import between_triton

        replaced = "attention", "add_norm", "norm_route"
        of_triton = {name: functools.partial(getattr(between_triton, name), eps=EPSILON) for name in replaced}
        between = between._replace(**of_triton)
    made = models(shape, names, "cuda", between)
    found = distances(made, "cuda")
    print(f"models made in {time.perf_counter() - begin:.0f} s; distances from bf16: {found}", flush=True)
    if any(distance > CLOSE for name, distance in found.items() if name.startswith("w4a16")):
        raise SystemExit(f"outputs are further than {CLOSE} from those of bf16, which has the same weights")
    rounds = 2 if options.compile else 10 if options.quick else 30
    record = machine() | {"shape": shape._asdict(), "context": options.context, "between": how}
    record |= {"distances": found, "attention": options.attention or "torch's choice", "rows": []}
    record["weight_bytes"] = {name: weight_bytes(model) for name, model in made.items()}
    for batch in options.batches:
        record["rows"] += decode_rows(made, batch, options.context, rounds)
        print(f"{time.perf_counter() - begin:.0f} s: decoded with batch {batch}", flush=True)
    if options.split:
        steps = captured_steps(made, options.batches[0], options.context)
        record["split"] = {name: split(call) for name, call in steps.items()}
    for length in options.prompts:
        calls = captured_prompts(made, length)
        record["rows"] += prefill_rows(calls, length, min(max(rounds // 3, 3), rounds))
        if options.split and length == max(options.prompts):
            record["prompt_split"] = {name: split(call, 2) for name, call in calls.items()}
        print(f"{time.perf_counter() - begin:.0f} s: read {length} tokens", flush=True)
    return record


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/generate_<gpu>.json)")
    parser.add_argument("--model", choices=SHAPES, default=LLAMA_8B.name, help="the model whose sizes to use")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no w4a4: about three minutes")
    parser.add_argument("--context", type=int, default=1024, help="tokens that a decoded one attends to")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPTS)
    parser.add_argument(
        "--names",
        nargs="*",
        choices=[*NAMES, *ROUTERS, *PARTS],
        help="contestants (default: all; --quick: without w4a4)",
    )
    parser.add_argument("--layers", type=int, help="fewer layers, for a trial")
    parser.add_argument("--compile", action="store_true", help="one layer, each call once, no results file")
    parser.add_argument("--split", action="store_true", help="also time kernels of a step and of the longest prompt")
    parser.add_argument("--attention", choices=[*ATTENTION, TRITON], help="one of torch's attentions, or Triton's")
    parser.add_argument("--eager", action="store_true", help="do not compile the operations between products")
    return parser.parse_args(arguments)


@torch.inference_mode()
def main() -> int:
    options = parse()
    gpu_target("tests/unit/test_generate_benchmark.py runs its model on a CPU.")
    names = options.names or [name for name in NAMES if not (options.quick and name == "w4a4")]
    shape = SHAPES[options.model]
    layers = 1 if options.compile else options.layers or shape.layers
    chosen = ATTENTION.get(options.attention)
    with contextlib.nullcontext() if chosen is None else sdpa_kernel(chosen):
        record = measure(shape._replace(layers=layers), names, options)
    if options.compile:
        return 0
    suffix = "" if shape is LLAMA_8B else f"_{shape.name.lower().replace('-', '_')}"
    write(record, options.output or results_path(f"generate{suffix}"))
    sizes = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in record["weight_bytes"].items())
    print(f"{record['gpu']}, {record['date']}, {record['shape']['name']} of {layers} layers, drawn weights")
    print(f"GB: {sizes}; context {options.context}, operations between products {record['between']}")
    splits = {
        f"{name}, {what}": rows for what in ("split", "prompt_split") for name, rows in record.get(what, {}).items()
    }
    for name, rows in splits.items():
        print(f"{name}: {sum(row['us'] for row in rows):.0f} us in kernels; those that take longest:")
        print("\n".join(f"{row['us']:9.1f} us, {row['count']:5.0f} x {row['kernel'][:90]}" for row in rows[:12]))
    print(table(record["rows"], names))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
