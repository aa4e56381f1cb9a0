"""README's table: records of ``benchmarks/overview.py`` of several GPUs beside one another."""

from __future__ import annotations

from typing import Any

from cells import table, times, us


def side_by_side(records: list[dict[str, Any]]) -> str:
    """Records of ``benchmarks/overview.py`` as one table: the calls of all, and four columns for each GPU.

    A figure that a record lacks is an empty cell.
    """
    from overview import PEER

    lines, head, calls = [], ["call", "peer"], {}
    for of in records:
        short = of["gpu"].removeprefix("NVIDIA ").split()[0]
        packages = ("torch", "nvidia-cutlass-dsl", "quack-kernels")
        named = ", ".join(f"{name} {of['versions'][name]}" for name in packages if name in of["versions"])
        lines.append(
            f"*{short}: {of['gpu']}, {of['date']} (driver {of['driver']}, CUDA {of['versions']['cuda']}, {named}).*\n"
        )
        head += [f"{short}, µs", f"peer on {short}, µs", "times faster", "quack (W4A16), µs"]
        calls |= {row["call"]: PEER[row["peer"]] for row in of["rows"]}
    rows = []
    for call, peer in calls.items():
        cells = [call, peer]
        for of in records:
            found = next((row["us"] for row in of["rows"] if row["call"] == call), {})
            ours, theirs, quack = (found.get(who) for who in ("ours", "peer", "quack"))
            ratio = times(theirs / ours) if ours and theirs else ""
            cells += [us(ours) if ours else "", us(theirs) if theirs else "", ratio, us(quack) if quack else ""]
        rows.append(cells)
    return "\n".join(lines) + "\n" + table(head, rows)
