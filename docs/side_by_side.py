"""README's table: records of ``benchmarks/overview.py`` of several GPUs beside one another."""

from __future__ import annotations

from typing import Any

from table_cells import table, times, us


def of_products(record: dict[str, Any]) -> dict[str, Any]:
    """Converts a record of ``benchmarks/gemm.py`` to one of ``overview.py``: the products that both measure in one
    protocol."""
    from gemm_shapes import Shape
    from overview import PRODUCTS, product_name

    found = {}
    for name in ("m-sweep", "gated", "grouped"):
        for row in record["sets"][name]["rows"]:
            shape = Shape(row["problem"], tuple(row["m"]), row["n"], row["k"])
            timed = {who: x["median_us"] for who, x in row["results"].items() if x["status"] == "timed"}
            for who in ("w4a16", "w4a8"):
                if shape in PRODUCTS and who in timed:
                    us = {"ours": timed[who], "peer": timed["cublas"], "quack": timed.get("quack", 0.0)}
                    call = product_name(shape, who)
                    found[call] = {"call": call, "peer": "cublas", "us": us}
    return {**record["sets"]["m-sweep"], "gpu": record["gpu"], "rows": list(found.values())}


def _has_quack(record: dict[str, Any]) -> bool:
    """Whether quack was timed in any row."""
    return any(row["us"].get("quack") for row in record["rows"])


def side_by_side(records: list[dict[str, Any]], begin: tuple[str, ...] = ("",)) -> str:
    """Records of ``benchmarks/overview.py`` as one table: the calls of all records, three columns for each GPU, four
    where quack ran. A missing figure is an empty cell. begin: the table has the calls whose names begin so."""
    from overview import PEER

    lines, head = [], ["call", "peer"]
    calls: dict[str, str] = {}
    for of in sorted(records, key=lambda of: -len(of["rows"])):  # the record with most rows decides the order
        calls |= {
            row["call"]: PEER[row["peer"]]
            for row in of["rows"]
            if "ours" in row["us"] and row["call"].startswith(begin)
        }
    for of in records:
        short = of["gpu"].removeprefix("NVIDIA ").split()[0]
        packages = ("torch", "nvidia-cutlass-dsl", "quack-kernels")
        named = ", ".join(f"{name} {of['versions'][name]}" for name in packages if name in of["versions"])
        lines.append(
            f"*{short}: {of['gpu']}, {of['date']} (driver {of['driver']}, CUDA {of['versions']['cuda']}, {named}).*\n"
        )
        head += [f"{short}, µs", f"peer on {short}, µs", "times faster"]
        head += ["quack (W4A16), µs"] * _has_quack(of)
    rows = []
    for call, peer in calls.items():
        cells = [call, peer]
        for of in records:
            found = next((row["us"] for row in of["rows"] if row["call"] == call), {})
            ours, theirs, quack = (found.get(who) for who in ("ours", "peer", "quack"))
            ratio = times(theirs / ours) if ours and theirs else ""
            cells += [us(ours) if ours else "", us(theirs) if theirs else "", ratio]
            cells += [us(quack) if quack else ""] * _has_quack(of)
        rows.append(cells)
    how = "*Medians of replays of a CUDA graph, launch included, L2 cold and clean, contestants in turn.*\n"
    return "\n".join([*lines, how]) + "\n" + table(head, rows)
