"""The support matrix of docs/reference/support.md: the output of ``cute-nvfp4 support --json`` as Markdown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = {
    "B200, B300": ("sm_100a", "sm_103a"),
    "H100, H200": ("sm_90a",),
    "RTX 50, GB10": ("sm_120a", "sm_121a"),
}


def asked() -> dict[str, Any]:
    """The package's answers, from a separate process; nothing is compiled or launched."""
    command = [sys.executable, "-m", "cute_nvfp4", "support", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def cell(row: dict[str, Any], archs: tuple[str, ...]) -> str:
    """Whether a kernel takes the call on the architectures of a column; on which of them, if they differ."""
    runs = [arch for arch in archs if row["architectures"][arch]["runs"]]
    return "yes" if len(runs) == len(archs) else ", ".join(f"`{arch}`" for arch in runs) or "—"


def markdown(answers: dict[str, Any] | None = None) -> str:
    """The table, and below it a line for each reason why a call runs nowhere or not everywhere."""
    answers = answers or asked()
    heads = [f"{name} (`{'`, `'.join(archs)}`)" for name, archs in COLUMNS.items()]
    lines = ["| operation | operands | how | " + " | ".join(heads) + " |", "|---|---|---|" + "---|" * len(heads)]
    for row in answers["rows"]:
        cells = [cell(row, archs) for archs in COLUMNS.values()]
        lines.append("| " + " | ".join([f"`{row['operation']}`", row["operands"], row["form"], *cells]) + " |")
    lines += ["", "What the package says where it refuses a call:", "", "| calls | on | message |", "|---|---|---|"]
    for message, (calls, archs) in refusals(answers).items():
        everywhere = len(archs) == len(answers["architectures"])
        where = "all" if everywhere else ", ".join(f"`{arch}`" for arch in archs)
        lines.append(f"| {', '.join(f'`{call}`' for call in calls)} | {where} | {message} |")
    return "\n".join(lines) + "\n"


def refusals(answers: dict[str, Any]) -> dict[str, tuple[dict[str, None], dict[str, None]]]:
    """The distinct messages, each with the operations and architectures that it is about; "…" replaces the latter in
    it."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for row in answers["rows"]:
        for arch, answer in row["architectures"].items():
            if not answer["runs"]:
                message = " ".join(answer["reason"].split()).replace("|", "\\|")
                message = message.replace(f"got {arch}", "got …").replace(f"on {arch}: got", "on …: got")
                calls, archs = found.setdefault(message, ({}, {}))
                calls[row["operation"]] = archs[arch] = None
    return found
