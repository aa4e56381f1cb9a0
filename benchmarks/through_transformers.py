"""Measures a model through transformers: memory while it loads, and tokens a second of ``generate``.

``from_pretrained`` loads a checkpoint of drawn NVFP4 weights in ModelOpt's layout, in a model's shape, which decodes
with a static cache: transformers compiles the step, torch records it in a CUDA graph. Beside it run the same model
after ``model.dequantize()``, and transformers' own model in bf16. Each has its own process; they compile at the same
time, and are timed one after the other. A step's time is the time between two tokens as a program receives them, with
all of transformers' work on the host; ``gpu_us`` is the time of a step's kernels.

    python benchmarks/through_transformers.py --models SmolLM2-135M Llama-3.1-8B
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import gpu_target, machine, results_path, write
from generate_model import LLAMA_8B, SMOLLM2, Shape

from cute_nvfp4.nn.layout_configs import modelopt_config

SHAPES = {shape.name: shape for shape in (SMOLLM2, LLAMA_8B)}
NAMES = "w4a16", "bf16"
PROMPT, TOKENS = 128, 64
SCALES = 56, 88
"""Range of drawn scale codes in E4M3: 1 to 16."""


def config_of(shape: Shape) -> Any:
    """The transformers configuration of a model of this shape."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        tie_word_embeddings=False,
    )
    config.architectures = ["LlamaForCausalLM"]
    return config


def write_checkpoint(shape: Shape, folder: Path, device: torch.device | str) -> int:
    """Writes drawn weights, matrices of blocks in NVFP4, embedding and head in bf16. Returns the bytes of the file."""
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    config = config_of(shape)
    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in LlamaForCausalLM(config).state_dict().items()}
    state = {}
    for name, size in shapes.items():
        if not name.endswith("_proj.weight"):
            drawn = torch.randn(size, device=device, generator=generator, dtype=torch.bfloat16)
            state[name] = (1 + 0.1 * drawn if len(size) == 1 else drawn * 0.02).cpu()
            continue
        n, k = size
        options = {"dtype": torch.uint8, "device": device, "generator": generator}
        state[name] = torch.randint(256, (n, k // 2), **options).cpu()
        state[f"{name}_scale"] = torch.randint(*SCALES, (n, k // 16), **options).cpu().view(torch.float8_e4m3fn)
        # makes values of about k ** -0.5, since codes are about 3 and scales about 6
        state[f"{name}_scale_2"] = torch.tensor(k**-0.5 / 18)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    fields = config.to_dict() | {"quantization_config": modelopt_config(["lm_head"], False), "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(fields))
    return (folder / "model.safetensors").stat().st_size


class Clock:
    """A streamer for ``generate`` that notes when it gets each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Does nothing; ``generate`` calls it at the end."""


def seconds_of_steps(model: Any, ids: torch.Tensor, count: int) -> list[float]:
    """Seconds between tokens while ``generate`` makes ``count``, without the first step after the prompt."""
    clock = Clock()
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "streamer": clock}
    model.generate(ids, attention_mask=torch.ones_like(ids), cache_implementation="static", pad_token_id=0, **options)
    return [y - x for x, y in zip(clock.times[-count + 1 :], clock.times[-count + 2 :])]


def traced(model: Any, ids: torch.Tensor, count: int = TOKENS) -> dict[str, float]:
    """Launches of graphs, and microseconds of kernels, of a step."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        seconds_of_steps(model, ids, count)
        torch.cuda.synchronize()
    graphs = sum(x.name == "cudaGraphLaunch" for x in seen.events())
    kernels = [x for x in seen.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    kernels = sorted(kernels, key=lambda x: x.time_range.start)
    # the prompt takes about as many kernels as a step, so that the second half of all kernels belongs to steps
    last = kernels[len(kernels) // 2 :]
    return {"graphs": graphs, "gpu_us": sum(x.time_range.elapsed_us() for x in last) / (count / 2)}


@torch.no_grad()
def contestant(name: str, folder: Path, barrier: Any, turn: Any, results: Any, batch: int = 1) -> None:
    """Loads, compiles, waits for the others, and measures in its turn; puts a record into ``results``."""
    from transformers import AutoModelForCausalLM

    import cute_nvfp4.integrations.transformers  # noqa: F401 (registers NVFP4)

    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": "cuda"})
    row = {"contestant": name, "batch": batch, "load_s": time.perf_counter() - begin}
    row |= {"peak_bytes": torch.cuda.max_memory_allocated(), "held_bytes": torch.cuda.memory_allocated()}
    if name == "bf16":
        model = model.dequantize()
        row["held_bytes"] = torch.cuda.memory_allocated()
    generator = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (batch, PROMPT), device="cuda", generator=generator)
    logits = model(ids).logits[:, -1].float().cpu()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    seconds_of_steps(model, ids, TOKENS)
    row |= {"compile_s": time.perf_counter() - begin, "activation_bytes": torch.cuda.max_memory_allocated() - before}
    try:
        barrier.wait(60)
    except threading.BrokenBarrierError:
        row["late"] = True
    with turn:
        steps = [x for _ in range(3) for x in seconds_of_steps(model, ids, TOKENS)]
        row |= {"step_us": statistics.median(steps) * 1e6, **traced(model, ids)}
    results.put((row, logits.numpy()))


def started(folder: Path, spawn: Any, turn: Any) -> tuple[Any, list[Any], Any]:
    """Starts a model's contestants. Returns the queue of their records, the processes, and the barrier, which must live
    as long."""
    results, barrier = spawn.Queue(), spawn.Barrier(len(NAMES))
    made = [spawn.Process(target=contestant, args=(name, folder, barrier, turn, results)) for name in NAMES]
    for process in made:
        process.start()
    return results, made, barrier


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/…)")
    options = parser.parse_args(arguments)
    gpu_target("tests/unit/test_through_transformers.py runs it with a small model on a CPU.")
    spawn = multiprocessing.get_context("spawn")
    turn = spawn.Lock()
    record = machine() | {"prompt": PROMPT, "tokens": TOKENS, "models": []}
    with tempfile.TemporaryDirectory() as place:
        runs = {}
        for name in options.models:
            folder = Path(place) / name
            folder.mkdir()
            size = write_checkpoint(SHAPES[name], folder, "cuda")
            torch.cuda.empty_cache()
            runs[name] = size, *started(folder, spawn, turn)
        for name, (size, results, processes, _) in runs.items():
            found = [results.get() for _ in processes]
            rows, logits = [row for row, _ in found], [torch.from_numpy(x) for _, x in found]
            far = float((logits[0] - logits[1]).norm() / logits[1].norm())
            record["models"].append({"shape": name, "file_bytes": size, "distance": far, "rows": rows})
            print(f"{name}: file {size / 1e9:.3f} GB, logits {far:.4f} apart")
            for row in sorted(rows, key=lambda row: row["contestant"]):
                print(json.dumps({n: round(x, 1) if isinstance(x, float) else x for n, x in row.items()}), flush=True)
            for process in processes:
                process.join()
            write(record, options.output or results_path("through_transformers"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
