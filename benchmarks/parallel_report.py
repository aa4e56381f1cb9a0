"""What ``parallel.py`` measured, as text and as tables of the pages, and a prediction of what it would measure.

``python benchmarks/parallel_report.py RECORD OUTPUT`` takes a record of layers without sums by stores into the peer's
memory and without early starts, and predicts their times with both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMS = {
    "nccl": "NCCL",
    "halves": "NCCL, halves",
    "peer": "peer loads",
    "pushed": "peer stores",
    "copies": "copy engine",
    "copies, halves": "copy engine, halves",
    "local": "no exchange",
}
"""Names in a record, and titles, of the forms of a layer over two GPUs."""
ALONE = {
    "all_reduce": "NCCL",
    "peer_all_reduce": "peer loads",
    "pushed_all_reduce": "peer stores",
    "copy_all_reduce": "copy engine",
}
"""Names in a record, and titles, of one exchange alone."""

HIDDEN = {"Qwen3-32B": 5120, "Llama-3.1-70B": 8192}
STORED_BYTES_S = 300e9
"""One way, by a kernel's stores: between NCCL's 205 GB/s or the copy engine's 270 on two H100s, and NVLink's 450."""
LATENCY_US = {"launch": 1.5, "loads": 0.5, "one way": 1.0, "wait, add, store": 0.7}
"""The parts of the latency of a sum of no bytes."""
EARLY_US = {"product": 2.5, "sum": 1.0}
"""What an early start saves: the launch, the prologue and the first loads of a product, and the launch of a sum."""
PRODUCTS, SUMS, MOST_ROWS = 4, 2, 128


def predicted(record: dict[str, Any]) -> dict[str, Any]:
    """µs of layers with NVFP4 weights and few rows: whole, and over two GPUs with sums by stores; both early, too."""
    saved, found = PRODUCTS * EARLY_US["product"], []
    for row in predicted_rows(record):
        us, one = row["us"], row["sum"]
        times = {
            "one": us["one"],
            "pushed": us["local"] + SUMS * one,
            "one early": us["one"] - saved,
            "pushed early": us["local"] - saved + SUMS * (one - EARLY_US["sum"]),
        }
        rounded = {name: round(x, 1) for name, x in times.items()}
        found.append({"model": row["model"], "rows": row["rows"], "sum": round(one, 2), "us": rounded})
    return {"from": {name: record[name] for name in ("gpu", "date")}, "predicted": found}


def predicted_rows(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the layers' measurements that a prediction needs, with the predicted µs of a sum."""
    for row, _ in dense_rows(record):
        if row["contestant"] == "w4a16" and row["rows"] <= MOST_ROWS:
            wire = row["rows"] * HIDDEN[row["model"]] * 2 / STORED_BYTES_S * 1e6
            yield row | {"sum": sum(LATENCY_US.values()) + wire}


def dense_rows(record: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Yields the measurements of dense layers, by model, contestant and rows, with the times of all forms."""
    kinds = [(row["model"], row["contestant"]) for row in record["dense"]]
    peers = {(x["model"], x["contestant"], x["rows"]): x["us"] for x in record["peer"]}
    for row in sorted(record["dense"], key=lambda x: (kinds.index((x["model"], x["contestant"])), x["rows"])):
        yield row, row["us"] | peers.get((row["model"], row["contestant"], row["rows"]), {})


def text(record: dict[str, Any]) -> str:
    """The whole record in a screen or two: microseconds, and speedups over one GPU."""
    lines = ["model, contestant, rows: one GPU | two, each with × one: " + " | ".join(FORMS.values())]
    for row, us in dense_rows(record):
        cells = [f"{us[x]:8.1f} ({us['one'] / us[x]:.2f})" if x in us else " " * 15 for x in FORMS]
        alone = [f"{x} {us[x]:.1f}" for x in ALONE if x in us]
        name = f"{row['model']:>13} {row['contestant']:>11} {row['rows']:4}"
        lines.append(f"{name}: {us['one']:8.1f} | {' | '.join(cells)} | {', '.join(alone)}")
        lines += [
            f"{who:>26}: " + ", ".join(f"{name} {x:.1f}" for name, x in parts.items())
            for who, parts in row.get("parts_us", {}).items()
        ]
    lines.append("experts, tokens a GPU: µs")
    for row in record["mixtures"]:
        cells = ", ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
        lines.append(f"{row['model']:>15} {row['tokens']:4}, {row['sent_rows']} rows sent: {cells}")
    lines += ["replays, {form}: {replays}, {differing} of them differ".format(**x) for x in record["replays"]]
    lines += [f"{name} did not run: {why}" for name, why in record["failed"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(json.dumps(predicted(json.loads(source.read_text())), indent=1) + "\n")
