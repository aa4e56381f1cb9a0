"""Measures what NVFP4 costs a real language model: perplexity and KL divergence of SmolLM2-135M, for each rounding rule
and quantization method.

    python benchmarks/accuracy.py --model SmolLM2-135M-Instruct.Q4_1.gguf --text britannica-11th.txt

``smollm2.py`` loads the model and decodes it to float32. The script judges on windows of ``--length`` tokens, taken at
even distances from a text that this script fits nothing to, and calibrates on windows between those. It quantizes all
linear layers of all blocks; the embedding, which is also the head, stays. Nothing predicts the first token of a window.

A record holds, for each case: perplexity; the mean loss minus the reference's, and the mean divergence KL(reference ‖
quantized), both in nats a token with the standard error over windows; how often the most likely token is the
reference's; and ``error``, the mean error of the layers' weights, by which one would rank methods without a text. Exact
torch on a CPU computes the products; kernels sum in another order. ``--table`` writes the table of
docs/how-to/models.md from the record. It needs ``cute_nvfp4[transformers]`` and takes some minutes a case on a core.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from smollm2 import load
from torch.nn import functional as F

from cute_nvfp4 import prepare_weight, quantize_model
from cute_nvfp4.nn.divergence import divergence
from cute_nvfp4.nn.linear import NVFP4Linear
from cute_nvfp4.nn.report import ModelReport
from cute_nvfp4.nn.rotation import rotate_model
from cute_nvfp4.nn.training import fake_quantize
from cute_nvfp4.row_scaled import by_rows

RESULTS = Path(__file__).resolve().parent / "results" / "accuracy_smollm2.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "models.md"
BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"


class Case(NamedTuple):
    """A row of the table: the options of ``quantize_model``. rotated: whether ``rotate_model`` runs first."""

    rule: str
    method: str = "nearest"
    input_rule: str | None = None
    awq: bool = False
    rotated: bool = False

    @property
    def activations(self) -> str:
        return {None: "W4A16", "fp8": "W4A8"}.get(self.input_rule, "W4A4")

    @property
    def name(self) -> str:
        rules = self.rule if self.input_rule is None else f"{self.rule}, activations {self.input_rule}"
        return f"{self.activations} {'rotated ' * self.rotated}{'awq ' * self.awq}{self.method}, {rules}"


CASES = (
    Case("max"),
    Case("four_six_mse"),
    Case("optimal"),
    Case("max", "gptq"),
    Case("four_six_mse", "gptq"),
    Case("optimal", "gptq"),
    Case("max", input_rule="max"),
    Case("four_six_mse", input_rule="four_six_mse"),
    Case("max", "gptq", "max"),
    Case("four_six_mse", "gptq", "four_six_mse"),
    Case("optimal", "gptq", "four_six_mse"),
    Case("four_six_mse", awq=True),
    Case("four_six_mse", "gptq", awq=True),
    Case("four_six_mse", input_rule="four_six_mse", awq=True),
    Case("four_six_mse", "gptq", "four_six_mse", awq=True),
    Case("four_six_mse", input_rule="fp8"),
    Case("max", "gptq", "fp8"),
    Case("four_six_mse", rotated=True),
    Case("four_six_mse", input_rule="four_six_mse", rotated=True),
    Case("four_six_mse", "gptq", rotated=True),
)


class Emulated(torch.nn.Module):
    """An ``NVFP4Linear`` whose weight is decoded once to the same values in float32. With FP8 rows, each code times its
    scale is rounded to E4M3 first, as the kernel does."""

    def __init__(self, layer: NVFP4Linear) -> None:
        super().__init__()
        self.weight, self.rule, self.scale = layer._decoded(torch.float32), layer.input_rule, layer.input_global_scale
        self.factors = layer.input_scale
        if self.rule == "fp8":
            rounded = prepare_weight(layer.weight, dtype=torch.float8_e4m3fn)
            self.weight = rounded.dequantize(torch.float32)[:, : layer.in_features]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.factors is None else x * self.factors
        if self.rule == "fp8":
            x = by_rows(x.flatten(0, -2)).dequantize(torch.float32).view_as(x)
        elif self.rule is not None:
            x = fake_quantize(x, rule=self.rule, global_scale="auto" if self.scale is None else self.scale)
        return F.linear(x, self.weight)


def emulate(model: torch.nn.Module) -> torch.nn.Module:
    """Replaces quantized layers by ``Emulated`` ones, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, NVFP4Linear):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Emulated(module))
    return model


class Sample(NamedTuple):
    """Windows of tokens (windows, length): some to judge the model with, others to calibrate it with."""

    judged: torch.Tensor
    calibration: torch.Tensor


def sample(ids: Sequence[int], count: int, length: int, between: int) -> Sample:
    """Takes ``count`` windows to judge at even distances, and ``between`` windows to calibrate with after each of
    them."""
    distance = len(ids) // count
    step = distance // (between + 1)
    if step < length:
        raise SystemExit(f"{len(ids)} tokens have no room for {count * (between + 1)} windows of {length}")
    starts = [[i * distance + j * step for j in range(between + 1)] for i in range(count)]
    found = torch.stack([torch.tensor(ids[start : start + length]) for row in starts for start in row])
    found = found.view(count, between + 1, length)
    return Sample(found[:, 0], found[:, 1:].flatten(0, 1))


class Outcome(NamedTuple):
    """What a model gives on the windows: losses (W, T - 1), log probabilities (W, T - 1, V) in bfloat16."""

    losses: torch.Tensor
    logs: torch.Tensor


@torch.inference_mode()
def run(model: torch.nn.Module, tokens: torch.Tensor) -> Outcome:
    """Runs the model on all windows, one at a time."""
    losses, logs = [], []
    for window in tokens:
        found = model(window[None]).logits[0, :-1].float().log_softmax(-1)
        losses.append(-found.gather(1, window[1:, None])[:, 0])
        logs.append(found.to(torch.bfloat16))
    return Outcome(torch.stack(losses), torch.stack(logs))


def mean_and_error(values: torch.Tensor) -> list[float]:
    """The mean over windows of a value (W,), and its standard error."""
    found = values.tolist()
    return [statistics.fmean(found), statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0]


def compared(outcome: Outcome, reference: Outcome) -> dict[str, Any]:
    """The figures of a record: ``outcome`` against ``reference``."""
    divergences, agreements = [], []
    for found, exact in zip(outcome.logs, reference.logs):
        mean, agreement = divergence(exact, found)
        divergences.append(mean)
        agreements.append(agreement)
    return {
        "perplexity": math.exp(float(outcome.losses.mean())),
        "loss": mean_and_error((outcome.losses - reference.losses).mean(1)),
        "divergence": mean_and_error(torch.tensor(divergences)),
        "agreement": mean_and_error(torch.tensor(agreements)),
    }


def quantized(model: torch.nn.Module, case: Case, calibration: torch.Tensor) -> tuple[torch.nn.Module, ModelReport]:
    """A quantized copy of ``model``, and the report. Calibration runs in batches of four windows."""
    needed = case.method != "nearest" or case.input_rule is not None or case.awq
    batches = list(calibration.split(4)) if needed else None
    options = {"method": case.method, "input_rule": case.input_rule, "calibration": batches, "awq": case.awq}
    model = rotate_model(copy.deepcopy(model)) if case.rotated else copy.deepcopy(model)
    return quantize_model(model, case.rule, ignore=["lm_head"], prepare=False, **options)


def row_of(model: torch.nn.Module, case: Case, tokens, calibration, reference: Outcome) -> dict[str, Any]:
    begin = time.perf_counter()
    made, report = quantized(model, case, calibration)
    spent = time.perf_counter() - begin
    errors = [layer.error for layer in report.layers]
    found = compared(run(emulate(made), tokens), reference)
    return case._asdict() | found | {"error": statistics.fmean(errors), "seconds": spent}


def case_of(row: dict[str, Any]) -> Case:
    """The ``Case`` that a row of the record belongs to."""
    return Case(**{name: row[name] for name in Case._fields if name in row})


def table(record: dict[str, Any]) -> str:
    """The rows of the page's table, in the order of ``CASES``."""
    lines = [
        f"| weights and activations | rule | perplexity ({record['reference']:.2f} in float32) | loss, more by "
        "| KL, nats a token | same first token | mean error of weights |",
        "|---|---|---|---|---|---|---|",
    ]
    found = {case_of(row): row for row in record["rows"]}
    for case in (case for case in CASES if case in found):
        row = found[case]
        (loss, loss_error), (kl, kl_error) = row["loss"], row["divergence"]
        method = (
            "rotated, " * case.rotated + "AWQ, " * case.awq + {"nearest": "to nearest", "gptq": "GPTQ"}[case.method]
        )
        named = case.input_rule not in (None, "fp8", case.rule)
        rules = f"{case.rule}, activations {case.input_rule}" if named else case.rule
        lines.append(
            f"| {case.activations}, {method} | `{rules}` | {row['perplexity']:.2f} | {loss:.3f} ± {loss_error:.3f} "
            f"| {kl:.3f} ± {kl_error:.3f} | {100 * row['agreement'][0]:.1f} % | {row['error']:.4f} |"
        )
    return "\n".join(lines)


def write_table(record: dict[str, Any], page: Path = PAGE) -> None:
    """Writes the table between the page's two markers."""
    text = page.read_text()
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table(record)}\n{END}{rest.split(END)[1]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the GGUF file")
    parser.add_argument("--text", type=Path, help="a file of prose")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--between", type=int, default=2, help="calibration windows after each judged window")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="places in CASES")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="measure nothing; write the page's table from the record")
    options = parser.parse_args()
    record = json.loads(options.output.read_text()) if options.output.exists() else {"rows": []}
    if not options.table:
        model, tokenizer = load(options.model)
        ids = tokenizer.encode(options.text.read_text(errors="replace")).ids
        tokens, calibration = sample(ids, options.windows, options.length, options.between)
        reference = run(model, tokens)
        settings = {"text": options.text.name, "windows": list(tokens.shape), "calibration": list(calibration.shape)}
        settings |= {"model": options.model.name, "reference": math.exp(float(reference.losses.mean()))}
        if {name: record.get(name) for name in ("text", "windows", "calibration", "model")} != {
            name: settings[name] for name in ("text", "windows", "calibration", "model")
        }:
            record = {"rows": []}
        record |= settings | {"torch": torch.__version__}
        print(f"reference {record['reference']:.2f}", flush=True)
        for case in (CASES[i] for i in options.cases):
            row = row_of(model, case, tokens, calibration, reference)
            row["seconds"] = round(row["seconds"])
            record["rows"] = [x for x in record["rows"] if case_of(x) != case] + [row]
            options.output.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{case.name}: {row['perplexity']:.2f}, {row['seconds']:.0f} s", flush=True)
    write_table(record)
    print(table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
