"""Measures errors of real layers' products by width of activations: ``python benchmarks/accuracy_w4a8_layers.py``.

The layers are linear layers of SmolLM2-135M-Instruct (``smollm2.py`` says where its file is), with the activations of a
text. A rule rounds weights to NVFP4; x stays bfloat16 (W4A16), becomes E4M3 with a scale a row (W4A8), or NVFP4 (W4A4).
The error is the norm of the difference from the product of the unrounded floats, divided by that product's norm. This
package quantizes the operands; products are exact, so that sums add no error. ``--simulated N`` layers also run the
kernels for sm_90a in the simulator, with the tensor cores' own sums and with promoted sums. ``--parts`` measures what
finer scales gain instead: a scale for each 128 of K of a row of x, and a power of two for each 128 of K of a weight
row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accuracy_w4a8 import E4M3, error
from smollm2 import load

import cute_nvfp4 as nv

RESULTS = Path(__file__).with_name("results") / "accuracy_w4a8_layers.json"
PARTS = Path(__file__).with_name("results") / "accuracy_w4a8_parts.json"
PART = 128
"""Elements along K that share a finer scale."""
WAYS = ("W4A16", "W4A8", "W4A8, promoted sums", "W4A4")


class Layer(NamedTuple):
    """A linear layer: its weight (N, K) and rows of its input (M, K), both bfloat16."""

    name: str
    weight: torch.Tensor
    x: torch.Tensor


def layers(path: Path, text: str, rows: int, every: int) -> Iterator[Layer]:
    """Yields the layers of every ``every``-th block, with inputs for the last ``rows`` tokens at the beginning of the
    text."""
    model, tokenizer = load(path)
    ids = torch.tensor([tokenizer.encode(text).ids[: 8 * rows]])
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable:
        def hook(module: torch.nn.Module, given: tuple) -> None:
            found[name] = given[0].flatten(0, -2)[-rows:].bfloat16()

        return hook

    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layers" in n}
    linear = {n: m for n, m in linear.items() if int(n.split(".")[2]) % every == 0}
    for name, module in linear.items():
        module.register_forward_pre_hook(keep(name))
    with torch.inference_mode():
        model(ids)
    for name, module in linear.items():
        yield Layer(name, module.weight.detach().bfloat16(), found[name])


def errors(layer: Layer, rule: str, simulated: bool) -> dict[str, float]:
    """The error of each way to multiply; errors of W4A8's sums only if ``simulated``."""
    exact = layer.x.double() @ layer.weight.double().t()
    weight, x = nv.quantize(layer.weight, "nvfp4", rule), layer.x
    rows, codes = nv.quantize(x, "fp8_e4m3", backend="reference"), nv.quantize(x, "nvfp4", rule, backend="reference")
    fp8 = [nv.prepare_weight(weight, dtype=E4M3, promoted=promoted) for promoted in (False, True)]
    operands = dict(
        zip(
            WAYS,
            (
                (x, nv.prepare_weight(weight)),
                (rows, fp8[0]),
                (rows, fp8[1]),
                (codes, nv.prepare_weight(weight, dtype=torch.float16)),
            ),
        )
    )
    backend = "auto" if simulated else "reference"
    with nv.simulating("sm_90a") if simulated else contextlib.nullcontext():
        found = {
            name: error(nv.gemm(*pair, out_dtype=torch.float32, backend=backend), exact)
            for name, pair in operands.items()
            if simulated or "promoted" not in name
        }
    return found


def of_parts(layer: Layer, rule: str) -> dict[str, float]:
    """Errors of W4A16 and W4A8: with scales of rows, and with finer scales of x, of the weight, and of both."""
    exact = layer.x.double() @ layer.weight.double().t()
    weight = nv.quantize(layer.weight, "nvfp4", rule)
    data, scale = weight.data, weight.rowmajor_scale().reshape(len(weight.data), -1)
    halves = zip(data.split(PART // 2, 1), scale.split(PART // 16, 1))
    matrices = [nv.BlockScaledTensor(*(x.contiguous() for x in pair), weight.global_scale) for pair in halves]

    def rows(x: torch.Tensor) -> torch.Tensor:
        return nv.quantize(x.contiguous(), "fp8_e4m3", backend="reference").dequantize(torch.float64)

    def decoded(w: nv.BlockScaledTensor) -> torch.Tensor:
        return nv.prepare_weight(w, dtype=E4M3).dequantize(torch.float64)

    x, w = rows(layer.x), decoded(weight)
    fine_x = torch.cat([rows(part) for part in layer.x.split(PART, 1)], 1)
    fine_w = torch.cat([decoded(part) for part in matrices], 1)
    exact_w = weight.dequantize(torch.float64)
    pairs = (layer.x.double(), exact_w), (x, w), (fine_x, w), (x, fine_w), (fine_x, fine_w)
    return {name: error(a @ b.t(), exact) for name, (a, b) in zip(OF_PARTS, pairs)}


OF_PARTS = ("W4A16", "W4A8", "x by 128", "weight by 128", "both by 128")


def table_of_parts(record: dict) -> str:
    """A row for each way to scale: its mean error in percent, and the ratio to the error of W4A16."""
    lines = ["| scales | error, mean | over W4A16's, mean | largest |", "|---|---|---|---|"]
    for name in OF_PARTS:
        found = [row["errors"][name] for row in record["layers"]]
        ratios = [row["errors"][name] / row["errors"]["W4A16"] for row in record["layers"]]
        cells = f"{100 * statistics.mean(found):.3f} | {statistics.mean(ratios):.3f} | {max(ratios):.3f}"
        lines.append(f"| {'W4A8, of rows' if name == 'W4A8' else name} | {cells} |")
    return "\n".join(lines)


def table(record: dict) -> str:
    """A row for each kind of layer: mean errors over the blocks in percent, and the ratio of W4A8's error to
    W4A16's."""
    kinds: dict[str, list[dict]] = {}
    for row in record["layers"]:
        kinds.setdefault(row["name"].rsplit(".", 1)[1], []).append(row["errors"])
    kinds["all"] = [row["errors"] for row in record["layers"]]
    lines = ["| layers | W4A16 | W4A8 | W4A4 | W4A8 / W4A16, mean | largest |", "|---|---|---|---|---|---|"]
    for kind, found in kinds.items():
        means = [100 * statistics.mean(x[name] for x in found) for name in ("W4A16", "W4A8", "W4A4")]
        ratios = [x["W4A8"] / x["W4A16"] for x in found]
        cells = " | ".join(f"{x:.2f}" for x in means)
        lines.append(f"| {kind} ({len(found)}) | {cells} | {statistics.mean(ratios):.3f} | {max(ratios):.3f} |")
    lines += ["", "| simulated kernels | " + " | ".join(WAYS) + " |", "|---" * 5 + "|"]
    for row in record["simulated"]:
        cells = " | ".join(f"{100 * row['errors'][name]:.3f}" for name in WAYS)
        lines.append(f"| {row['name']} | {cells} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="the model's GGUF file (not needed with --from)")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="a text of a few hundred words or more")
    parser.add_argument("--rows", type=int, default=64, help="tokens")
    parser.add_argument("--every", type=int, default=1, help="blocks: 1 for all")
    parser.add_argument("--rule", default="four_six_mse", help="rounding rule of weights, and of x in NVFP4")
    parser.add_argument("--simulated", type=int, default=3, help="layers that run in the simulator, too, with 16 rows")
    parser.add_argument("--from", dest="source", action="store_true", help=f"print {RESULTS.name} instead")
    parser.add_argument("--parts", action="store_true", help=f"measure finer scales instead, into {PARTS.name}")
    options = parser.parse_args()
    if options.parts:
        found = [
            {"name": layer.name, "errors": of_parts(layer, options.rule)}
            for layer in layers(options.model, options.text.read_text(), options.rows, options.every)
        ]
        PARTS.write_text(json.dumps({"rule": options.rule, "rows": options.rows, "layers": found}, indent=1) + "\n")
        print(table_of_parts({"layers": found}))
        return 0
    if options.source:
        print(table(json.loads(RESULTS.read_text())))
        return 0
    record: dict = {"rule": options.rule, "rows": options.rows, "layers": [], "simulated": []}
    for i, layer in enumerate(layers(options.model, options.text.read_text(), options.rows, options.every)):
        record["layers"].append({"name": layer.name, "errors": errors(layer, options.rule, False)})
        if i < options.simulated:
            few = layer._replace(x=layer.x[-16:])
            record["simulated"].append({"name": layer.name, "errors": errors(few, options.rule, True)})
        print(
            layer.name, {name: round(100 * x, 2) for name, x in record["layers"][-1]["errors"].items()}, file=sys.stderr
        )
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
