"""Pages of hazards and findings, with the source lines that they name."""

from __future__ import annotations

import linecache
import re
import textwrap
from typing import TYPE_CHECKING

from .names import short
from .svg import BAD, MONO, Page, escape

if TYPE_CHECKING:
    from ..errors import SimError
    from ..sim.checks.findings import Finding

PLACE = re.compile(r"([^\s,;()`]+\.py):(\d+)")
AROUND = 1
WIDTH = 110
COLORS = {"hazard": BAD, "warning": "#997700", "judge": "#228833"}


def finding(found: Finding) -> Page:
    """Returns a page of a finding of the checks: its class, count, message and source lines."""
    times = f" ({found.count} times)" if found.count > 1 else ""
    return told(found.severity, f"{found.rule}{times}", found.message)


def error(stopped: SimError) -> Page:
    """Returns a page of the error that stopped a launch, and of what the checks had found before it."""
    pages = [told("hazard", type(stopped).__name__, str(stopped))]
    pages += [finding(f) for f in getattr(stopped, "findings", ()) if f.message not in str(stopped)]
    return Page("".join(p.html for p in pages), "\n".join(p.words for p in pages))


def told(severity: str, head: str, message: str) -> Page:
    """Returns a page of a message with short kernel names, and the source lines that it names, in its order."""
    message = re.sub(r"(kernel_cutlass_\w+)…?", lambda m: short(m[1]), message)
    lines = source_lines(message)
    shown = PLACE.sub(lambda m: f"{m[1].rpartition('/')[2]}:{m[2]}", message)
    wrapped = []
    for line in shown.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapped += textwrap.wrap(
            line.strip(), WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
    color = COLORS.get(severity, BAD)
    code = "".join(
        f'<pre style="margin:2px 0;font-family:{MONO};background:#f6f6f6;color:#222">'
        + "".join(_marked(name, n, text, n == at, color) for n, text in around)
        + "</pre>"
        for name, at, around in lines
    )
    page = (
        f'<div style="border-left:4px solid {color};padding:4px 10px;margin:6px 0">'
        f'<b style="color:{color}">{escape(severity)}: {escape(head)}</b>'
        f'<pre style="white-space:pre-wrap">{escape(chr(10).join(wrapped))}</pre>{code}</div>'
    )
    plain = [f"    {name}:{at}: {dict(around)[at].strip()}" for name, at, around in lines]
    return Page(page, "\n".join([f"{severity}: {head}", *wrapped, *plain]))


def source_lines(message: str) -> list[tuple[str, int, list[tuple[int, str]]]]:
    """Returns (file, line, [(number, text) of that line and its neighbours]) for each readable place in a message."""
    out = []
    for path, number in dict.fromkeys(PLACE.findall(message)):
        at = int(number)
        if not linecache.getline(path, at):
            continue
        around = [(n, linecache.getline(path, n).rstrip()) for n in range(max(1, at - AROUND), at + AROUND + 1)]
        out.append((path.rpartition("/")[2], at, [(n, text) for n, text in around if text or n == at]))
    return out


def _marked(name: str, number: int, text: str, marked: bool, color: str) -> str:
    line = escape(f"{name}:{number:<4} {text}") + "\n"
    return f'<b style="color:{color}">{line}</b>' if marked else line
