"""The table and the plot of a record of ``gemm.py``. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

BASELINES = ("cublas", "grouped_mm")
"""Contestants in bf16; the columns × divide the faster one's time."""
RATIOS = {"W4A16": ("w4a16", "w4a16-plain"), "W4A4": ("w4a4", "w4a4-plain", "gemv"), "quack": ("quack",)}
"""Column titles, and the contestants whose best time each compares with bf16."""
COLOURS = {"cublas": "0.45", "grouped_mm": "0.7", "quack": "C1", "triton": "C2"}
COLOURS |= {"w4a16": "C0", "w4a4": "C3", "w4a16-plain": "C9", "w4a4-plain": "C6", "gemv": "C4"}


def median(row: Mapping, name: str) -> float | None:
    """The median of a contestant in µs, or None if it was not timed."""
    return row["results"].get(name, {}).get("median_us")


def fastest(row: Mapping, names: Iterable[str]) -> float | None:
    """The best median of some contestants."""
    return min((us for name in names if (us := median(row, name)) is not None), default=None)


def columns(rows: Sequence[Mapping]) -> list[str]:
    """Contestants that were timed in any row, peers first."""
    timed = {name for row in rows for name in row["results"] if median(row, name) is not None}
    return [name for name in COLOURS if name in timed]


def cell(result: Mapping) -> str:
    """The median, and half the distance from the 10th to the 90th percentile in percent of the median."""
    if "median_us" not in result:
        return "wrong" if result.get("status") == "wrong" else "–"
    middle = result["median_us"]
    return f"{middle:.1f} ±{50 * (result['p90_us'] - result['p10_us']) / middle:.0f}%"


def heading(names: Sequence[str]) -> str:
    cells = " ".join(f"{name:>12}" for name in names)
    return f"{'m, n, k':>24} {'floor':>7} {cells} " + " ".join(f"{title + ' ×':>7}" for title in RATIOS)


def of_ceilings(found: Mapping) -> str:
    """The rates and times that the floors consist of, in words."""
    copy, dense = found["copy_bytes_s"] / 1e12, found["dense_flop_s"] / 1e12
    return f"copy {copy:.2f} TB/s, bf16 {dense:.0f} TFLOPS, a tiny kernel {found['launch_us']:.1f} µs"


def line(row: Mapping, names: Sequence[str]) -> str:
    """One shape: µs of each contestant, and speedups over bf16."""
    cells = " ".join(f"{cell(row['results'].get(name, {})):>12}" for name in names)
    base, ratios = fastest(row, BASELINES), []
    for contestants in RATIOS.values():
        us = fastest(row, contestants)
        ratios.append(f"{base / us:7.2f}" if base and us else f"{'–':>7}")
    shape = row["text"] if len(row["text"]) <= 24 else f"{len(row['m'])} groups, {row['n']}, {row['k']}"
    return f"{shape:>24} {row['floor_us']:7.1f} {cells} {' '.join(ratios)}  {row['name']}".rstrip()


def notes(rows: Sequence[Mapping]) -> list[str]:
    """Why contestants were not timed, each reason once."""
    reasons: dict[str, int] = {}
    for row in rows:
        for name, result in row["results"].items():
            if result["status"] != "timed":
                text = f"{name}: {result['status']}: {result['reason']}"
                reasons[text] = reasons.get(text, 0) + 1
    return [f"{text} ({count} shapes)" for text, count in reasons.items()]


def table(record: Mapping) -> str:
    """Every set of a record, with its ceilings and the reasons for missing times."""
    lines = []
    for title, found in record["sets"].items():
        names = columns(found["rows"])
        lines += [
            f"{title}: {record['gpu']}, {found['date']}, driver {found['driver']}, {versions(found)}",
            f"{of_ceilings(found['ceilings'])}; µs, medians, ± half of the middle 80 %; × over bf16",
            heading(names),
            *(line(row, names) for row in found["rows"]),
            *notes(found["rows"]),
            "",
        ]
    return "\n".join(lines)


def versions(found: Mapping) -> str:
    return ", ".join(f"{name} {version}" for name, version in found["versions"].items())


def plot(record: Mapping, path: Path) -> None:
    """Plots each set: times over M for the sweep, else speedups over bf16, with the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sets = {name: found for name, found in record["sets"].items() if found["rows"]}
    heights = [4.0 if name == "m-sweep" else 1.0 + 0.35 * len(found["rows"]) for name, found in sets.items()]
    figure, axes = pyplot.subplots(
        len(sets), 1, figsize=(9, sum(heights) + len(sets)), squeeze=False, layout="constrained", height_ratios=heights
    )
    for axis, (title, found) in zip(axes[:, 0], sets.items()):
        (sweep if title == "m-sweep" else bars)(axis, found["rows"])
        axis.set_title(f"{title} — {record['gpu']}, {found['date']}")
        axis.legend(fontsize=7)
    figure.savefig(path)
    pyplot.close(figure)


def sweep(axis, rows: Sequence[Mapping]) -> None:
    """Plots times over M."""
    m = [row["m"][0] for row in rows]
    for name in columns(rows):
        points = [(x, us) for x, row in zip(m, rows) if (us := median(row, name)) is not None]
        axis.plot(*zip(*points), marker="o", markersize=3, color=COLOURS[name], label=name)
    axis.plot(m, [row["floor_us"] for row in rows], "k--", linewidth=1, label="floor")
    axis.set(xscale="log", yscale="log", xlabel=f"M at {rows[0]['n']} × {rows[0]['k']}", ylabel="µs")
    axis.set_xticks(m, list(map(str, m)), minor=False)


def bars(axis, rows: Sequence[Mapping]) -> None:
    """Plots each contestant's speedup over bf16; the floor is a mark."""
    names = [name for name in columns(rows) if name not in BASELINES]
    thick = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        ratios = [(fastest(row, BASELINES) or 0) / us if (us := median(row, name)) is not None else 0 for row in rows]
        places = [y + (i + 0.5) * thick - 0.4 for y in range(len(rows))]
        axis.barh(places, ratios, thick, color=COLOURS[name], label=name)
    floors = [(fastest(row, BASELINES) or 0) / row["floor_us"] for row in rows]
    axis.plot(floors, range(len(rows)), "k|", markersize=10, label="floor")
    axis.axvline(1, color="0.45", linewidth=1)
    axis.set_yticks(range(len(rows)), [f"{row['text']}  {row['name']}".strip() for row in rows], fontsize=6)
    axis.invert_yaxis()
    axis.set_xlabel("× faster than bf16")
