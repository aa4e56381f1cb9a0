"""``cute-nvfp4 support``: which calls run on which architectures, as the package itself answers."""

from __future__ import annotations

from .output import STDOUT, JsonOption, shown_errors, stdout, write_json


def support(json: JsonOption = "") -> None:
    """Prints which operation takes which formats on which GPU, and how: plain, prepared, gated, quantized output.

    Each call is checked and planned for each architecture, and neither compiled nor launched. The JSON has the reason
    of each refusal.
    """
    with shown_errors():
        import torch

        from .support_matrix import ARCHS, matrix

        torch.set_num_threads(1)
        found = matrix()
    if json:
        rows = [
            {"operation": row.operation, "operands": row.operands, "form": row.form}
            | {"architectures": {arch: {"runs": a.runs, "reason": a.reason} for arch, a in answers.items()}}
            for row, answers in found
        ]
        write_json({"architectures": list(ARCHS), "rows": rows}, json)
    if json != STDOUT:
        _show(found, ARCHS)


def _show(found: list, archs: tuple[str, ...]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("operation", "operands", "how", *archs):
        table.add_column(column)
    before = ""
    for row, answers in found:
        cells = ("yes" if answers[arch].runs else "no" for arch in archs)
        table.add_row(row.operation if row.operation != before else "", row.operands, row.form, *cells)
        before = row.operation
    stdout().print(table)
