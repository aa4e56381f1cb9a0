"""``cute-nvfp4 doctor``: what is installed, what compiles, and what runs on this machine."""

from __future__ import annotations

import typer

from .output import STDOUT, JsonOption, shown_errors, stderr, stdout, write_json

_STYLE = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}


def doctor(json: JsonOption = "") -> None:
    """Checks this machine: packages, compilers, GPUs, simulator, cache.

    Exit code 1 when something that is needed is broken; each line that is not well says what to do.
    """
    with shown_errors():
        from .diagnosis import diagnose

        with stderr().status("checking packages, compiling a small kernel for each architecture"):
            findings = diagnose()
    broken = [finding for finding in findings if finding.status == "fail"]
    if json:
        write_json({"ok": not broken, "findings": [finding.to_dict() for finding in findings]}, json)
    if json != STDOUT:
        _show(findings)
    if broken:
        raise typer.Exit(1)


def _show(findings: list) -> None:
    from rich.table import Table
    from rich.text import Text

    console = stdout()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "check", "status", "found"):
        table.add_column(column, overflow="fold")
    area = ""
    for finding in findings:
        table.add_row(
            Text(finding.area if finding.area != area else "", "bold"),
            finding.name,
            Text(finding.status, _STYLE[finding.status]),
            Text(finding.found),
        )
        area = finding.area
    console.print(table)
    todo = [finding for finding in findings if finding.advice]
    for finding in todo:
        console.print(Text(f"{finding.name}: ", _STYLE[finding.status]) + Text(finding.advice), soft_wrap=True)
    if not any(finding.status == "fail" for finding in findings):
        console.print("Everything that is needed works.", style="bold green")
