"""What ``parallel.py`` has measured, as text and as the tables of the pages."""

from __future__ import annotations

from collections.abc import Iterator
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
"""Forms of a layer over two GPUs, by the name that a record has."""
ALONE = {
    "all_reduce": "NCCL",
    "peer_all_reduce": "peer loads",
    "pushed_all_reduce": "peer stores",
    "copy_all_reduce": "copy engine",
}
"""One exchange alone, likewise."""


def dense_rows(record: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """The measurements of dense layers, with the times of all forms."""
    peers = {(x["model"], x["contestant"], x["rows"]): x["us"] for x in record["peer"]}
    for row in record["dense"]:
        yield row, row["us"] | peers.get((row["model"], row["contestant"], row["rows"]), {})


def text(record: dict[str, Any]) -> str:
    """Everything in one screen or two: microseconds, and times faster than one GPU."""
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
