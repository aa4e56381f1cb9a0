"""Fits the constants of ``planning/group_costs.py`` to measured plans: ``python benchmarks/fit_group_costs.py``.

``records/group_plans_nvidia_h200.json`` holds the times of ``group_plans.py`` on an H200: each product of experts by
itself, by plans of several widths, with the rows of each expert. The fit is that of ``fit_packed_model.py``: least
squares of log(modelled / measured), where the weight of a plan is its product's fastest time divided by the plan's.
``planning/group_costs.json`` then holds for each constant its value, the fit, its relative standard error, how many
plans depend on it, and its basis (see ``fit_packed_model.py``).

    --take        makes the fit the value of every constant that it determines
    --add FILE …  first adds records that group_plans.py wrote
    --check       writes nothing; exit code 1 if a fit that begins at the file's figures ends elsewhere
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from fit_packed_model import SM_COUNT, Problem, disagreements, result

from cute_nvfp4.kernels.gemm.routed_config import RoutedConfig
from cute_nvfp4.kernels.gemm.sm90.grouped_config import GroupedWgmmaConfig
from cute_nvfp4.planning.group_costs import RECORD, GroupCosts
from cute_nvfp4.planning.packed_groups import GROUPED_TILING, PackedGroups, predict
from cute_nvfp4.planning.packed_model import recorded
from cute_nvfp4.planning.packed_problem import PackedPlan

PLANS = Path(__file__).resolve().parent / "records" / "group_plans_nvidia_h200.json"

FEWEST = 4
"""How many plans must depend on a constant for the fit to determine it."""


class Row(NamedTuple):
    """A measured plan. best: µs of the fastest plan of the same product."""

    record: str
    problem: PackedGroups
    plan: PackedPlan
    us: float
    best: float


def table(path: Path = PLANS) -> list[Row]:
    """Reads the measured plans."""
    rows = []
    for record in json.loads(path.read_text())["records"]:
        for product in record["products"]:
            best = min(plan["us"] for plan in product["plans"])
            sizes = tuple((m, product["n"], product["k"]) for m in product["rows"] if m)
            first = product["which"] == "first"
            gate = {"gate": "silu"} if first else {}
            problem = PackedGroups(sizes=sizes, dtype=product["dtype"], **gate)
            for plan in product["plans"]:
                tiling = {name: plan[name] for name in GROUPED_TILING}
                tiling["narrower"] = tuple(tiling["narrower"])
                config = GroupedWgmmaConfig(
                    dtype=product["dtype"], routed=RoutedConfig(gathered=first), **tiling, **gate
                )
                rows.append(Row(record["date"], problem, PackedPlan(config, plan["workers"]), plan["us"], best))
    return rows


def modelled(rows: Sequence[Row], values: Mapping[str, float]) -> np.ndarray:
    """The modelled µs of each plan."""
    costs = GroupCosts.of(values)
    return np.array([predict(row.plan, row.problem, SM_COUNT, costs) for row in rows])


def add(files: Sequence[Path], path: Path = PLANS) -> None:
    """Appends records of ``group_plans.py`` to the file."""
    held = json.loads(path.read_text()) if path.exists() else {"records": []}
    for source in files:
        record = json.loads(source.read_text())
        if "H200" not in record["gpu"]:
            raise SystemExit(f"{source}: got a record of {record['gpu']}, expected one of an H200")
        held["records"].append({name: record[name] for name in ("gpu", "date", "driver", "products")})
    path.write_text(json.dumps(held) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", action="store_true", help="make the fit the values in use")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FILE", help="records of group_plans.py")
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the record gives the file")
    options = parser.parse_args(arguments)
    if options.add:
        add(options.add)
    problem = Problem(table(), modelled, FEWEST)
    if options.check:
        found = disagreements(problem, json.loads(RECORD.read_text()))
        print("\n".join(found) or f"{RECORD.name} is what {len(problem.rows)} plans give")
        return int(bool(found))
    found = result(problem, recorded(RECORD), options.take, PLANS)
    RECORD.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: found[name] for name in ("plans", "by_the_values", "by_the_fit")}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
