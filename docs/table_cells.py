"""The parts of tables: Markdown, and figures in a reader's form."""

from __future__ import annotations

from collections.abc import Iterable


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def us(value: float) -> str:
    """Microseconds with three digits, or without decimals."""
    return f"{value:,.0f}" if value >= 200 else f"{value:.1f}"


def times(value: float) -> str:
    """A speedup."""
    return f"{value:.2f}" if value < 9.95 else f"{value:.1f}"
