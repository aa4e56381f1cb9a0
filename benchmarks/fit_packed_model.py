"""Fits the constants of ``planning/packed_model.py`` to measured plans: ``python benchmarks/fit_packed_model.py``.

``records/packed_plans_nvidia_h200.csv`` has a row for every recorded plan that ``gemm_choice.py`` timed on an H200: the
plans of its seeds 3, 5, 6, 7, 9 and 10. The constants were first fitted to 2,600 plans, but no record keeps most of
them (seeds 1, 2 and 4, and other shapes), so nobody can derive the present values again.

The script fits all constants that the record determines, by least squares of log(modelled / measured); the weight of a
plan is its product's fastest time divided by the plan's. Launches took 4.9 µs on the machine of the first record and
3.2 to 3.4 on the others, so every other record has its own offset in µs, which does not change which plan is first.
``planning/packed_model.json`` then holds for each constant its value, the fit, the fit's relative standard error, how
many plans depend on it, and its basis:

    reproduced    the fit meets the value within a tenth, or within two standard errors
    other         the fit gives another value, and the file keeps the value in use: see ``--take``
    undetermined  too few plans depend on it, or its standard error is more than a quarter

    --take        makes the fit the value of every constant that it determines
    --fp8         fits the constants for x in FP8 instead
    --rows        fits the constants for unpacked NVFP4 operands (gemm_choice.py --packing nvfp4_rows --quantized)
    --add FILE …  first adds records that gemm_choice.py wrote to the CSV file
    --check       writes nothing; exit code 1 if a fit that begins at the file's figures ends elsewhere
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from cute_nvfp4.kernels.gemm.packed.stream_config import StreamConfig
from cute_nvfp4.kernels.gemm.sm90.config import WgmmaConfig
from cute_nvfp4.planning.packed_model import RECORD, RECORD_FP8, RECORD_ROWS, Constants, predict, recorded
from cute_nvfp4.planning.packed_problem import PackedPlan, PackedProblem, decided, default_tiling, tiling_of

PLANS = Path(__file__).resolve().parent / "records" / "packed_plans_nvidia_h200.csv"
PLANS_FP8 = PLANS.with_name("packed_plans_fp8_nvidia_h200.csv")
PLANS_ROWS = PLANS.with_name("packed_plans_rows_nvidia_h200.csv")
SM_COUNT = 132
FEWEST, LARGEST_ERROR = 15, 0.25
"""For a fit to determine a constant: how many plans must depend on it, and its largest relative standard error."""
NEAR, NEAR_ERRORS = 0.1, 2.0
"""A fit reproduces a value if it differs by at most this fraction of it, or by so many standard errors."""
STEPS, ENOUGH, DAMPING, LONGEST = 60, 1e-7, 1e-2, 0.3
"""Most steps of the fit, the gain of a step that ends it, the first damping, and the longest step of a logarithm."""
KINDS = {PLANS_FP8: ("fp8_e4m3", "nvfp4"), PLANS_ROWS: ("nvfp4", "nvfp4_rows")}
"""The formats of activations and weight that the records of each file must have."""
MOVED = 0.2
"""How many standard errors the fit may move in ``--check``."""
WITHIN = 0.05
"""The loss up to which a choice counts as within five percent."""


class Row(NamedTuple):
    """A measured plan. best: µs of the fastest plan of the same product."""

    record: str
    problem: PackedProblem
    plan: PackedPlan
    us: float
    best: float


class Fit(NamedTuple):
    """The result of a fit: constants (undetermined ones keep their values), offsets of records, relative standard
    errors."""

    values: dict[str, float]
    offsets: dict[str, float]
    errors: dict[str, float]


def table(path: Path = PLANS) -> list[Row]:
    """Reads the measured plans. Plans of x in FP8 and of unpacked operands have files of their own."""
    fields: dict[str, Any] = {"dtype": "float8_e4m3fn"} if path == PLANS_FP8 else {}
    if path == PLANS_ROWS:
        fields = {"dtype": "float16", "packing": "nvfp4_rows", "quantized": True}
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    best: dict[tuple[str, ...], float] = {}
    for line in lines:
        product = (line["seed"], line["m"], line["n"], line["k"])
        best[product] = min(best.get(product, math.inf), float(line["us"]))
    rows = []
    for line in lines:
        problem = PackedProblem(m=int(line["m"]), n=int(line["n"]), k=int(line["k"]), **fields)
        kind = StreamConfig if line["slabs"] else WgmmaConfig
        found = {name: line.get(name) or str(x) for name, x in DEFAULTS[kind].items()}
        words = {name: int(x) if x.isdecimal() else TRUTH.get(x, x) for name, x in found.items()}
        tiling = tiling_of(kind, words)
        plan = PackedPlan(kind(**tiling, **decided(problem, kind is StreamConfig)), int(line["workers"]))
        product = (line["seed"], line["m"], line["n"], line["k"])
        rows.append(Row(line["seed"], problem, plan, float(line["us"]), best[product]))
    return rows


TRUTH = {"True": True, "False": False}
DEFAULTS = {kind: default_tiling(kind) for kind in (StreamConfig, WgmmaConfig)}
"""The words of a tiling that a record leaves out."""
COLUMNS = ("seed", "date", "m", "n", "k", *dict.fromkeys(name for words in DEFAULTS.values() for name in words))
COLUMNS += ("workers", "us", "runs")


def add(files: Sequence[Path], path: Path = PLANS) -> None:
    """Appends records of ``gemm_choice.py`` to the file."""
    columns: Sequence[str] = COLUMNS
    if path.exists():
        # fields that plans got later have the same values in all of these records
        columns = path.read_text().partition("\n")[0].split(",")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        for source in files:
            record = json.loads(source.read_text())
            expected = KINDS.get(path, ("bfloat16", "nvfp4"))
            got = record["activations"], record.get("weights", "nvfp4")
            if got != expected:
                found, wanted = (" x and ".join(kinds) for kinds in (got, expected))
                raise SystemExit(f"{source}: got a record of {found}, expected {wanted}")
            shared = {"seed": record["seed"], "date": record["date"]}
            for row in record["rows"]:
                sizes = {name: row[name] for name in "mnk"}
                writer.writerows(shared | sizes | plan for plan in row["plans"] if "error" not in plan)


def modelled(rows: Sequence[Row], values: Mapping[str, float]) -> np.ndarray:
    """The modelled µs of each plan."""
    constants = Constants.of(values)
    return np.array([predict(row.plan, row.problem, SM_COUNT, constants) for row in rows])


Model = Callable[[Sequence[Any], Mapping[str, float]], np.ndarray]


class Problem:
    """The least-squares problem of ``rows``: residuals and derivatives.

    model: gives µs of each plan of ``rows`` for values of the constants.
    fewest: how many plans must depend on a constant for a fit to determine it.
    """

    def __init__(self, rows: Sequence[Any], model: Model = modelled, fewest: int = FEWEST) -> None:
        self.rows, self.model, self.fewest = rows, model, fewest
        self.us = np.array([row.us for row in rows])
        self.weights = np.array([row.best / row.us for row in rows])
        _, *others = dict.fromkeys(row.record for row in rows)
        self.members = {name: np.array([row.record == name for row in rows]) for name in others}

    def residuals(self, us: np.ndarray, offsets: Mapping[str, float]) -> np.ndarray:
        shifted = us + sum((offsets[name] * members for name, members in self.members.items()), np.zeros(len(us)))
        return self.weights * np.log(np.maximum(shifted, 0.1) / self.us)

    def derivatives(
        self, values: Mapping[str, float], offsets: Mapping[str, float], names: Sequence[str]
    ) -> np.ndarray:
        """Derivatives (plans, names and then offsets) by the logarithms of the constants and by the offsets."""
        us, step = self.model(self.rows, values), 1e-4
        here = self.residuals(us, offsets)
        moved = [self.model(self.rows, {**values, name: values[name] * (1 + step)}) for name in names]
        columns = [self.residuals(found, offsets) for found in moved]
        columns += [self.residuals(us, {**offsets, name: offsets[name] + step}) for name in self.members]
        return (np.array(columns).T - here[:, None]) / step

    def rms(self, values: Mapping[str, float], offsets: Mapping[str, float]) -> float:
        found = self.residuals(self.model(self.rows, values), offsets)
        return float(np.sqrt(np.sum(found**2) / np.sum(self.weights**2)))

    def descend(self, values: Mapping[str, float], offsets: Mapping[str, float], names: Sequence[str]) -> Fit:
        """Finds the least squares by the Levenberg-Marquardt method, from these values; ``names`` vary."""
        values, offsets, damping = dict(values), dict(offsets), DAMPING
        residuals = self.residuals(self.model(self.rows, values), offsets)
        for _ in range(STEPS):
            slopes = self.derivatives(values, offsets, names)
            matrix, gradient = slopes.T @ slopes, slopes.T @ residuals
            before = residuals @ residuals
            while damping < 1e6:
                step = -np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), gradient)
                step = np.clip(step, -LONGEST, LONGEST)
                tried = {**values, **{n: values[n] * math.exp(x) for n, x in zip(names, step)}}
                shifted = {n: offsets[n] + x for n, x in zip(offsets, step[len(names) :])}
                residuals = self.residuals(self.model(self.rows, tried), shifted)
                if residuals @ residuals < before:
                    break
                damping *= 4
            else:
                break
            values, offsets, damping = tried, shifted, damping / 4
            if 1 - (residuals @ residuals) / before < ENOUGH:
                break
        slopes = self.derivatives(values, offsets, names)
        residuals = self.residuals(self.model(self.rows, values), offsets)
        variance = residuals @ residuals / (len(residuals) - slopes.shape[1])
        errors = np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)) * variance)
        return Fit(values, offsets, dict(zip(names, map(float, errors))))


def dependents(problem: Problem, values: Mapping[str, float]) -> dict[str, int]:
    """How many plans depend on each constant."""
    slopes = problem.derivatives(values, dict.fromkeys(problem.members, 0.0), list(values))
    return {name: int(np.sum(np.abs(slopes[:, i]) > 1e-3)) for i, name in enumerate(values)}


def fit(problem: Problem, values: Mapping[str, float]) -> Fit:
    """Fits the constants that the record determines; the others keep their ``values``."""
    counts = dependents(problem, values)
    names, offsets = (
        [name for name, count in counts.items() if count >= problem.fewest],
        dict.fromkeys(problem.members, 0.0),
    )
    while True:
        found = problem.descend(values, offsets, names)
        kept = [name for name in names if found.errors[name] <= LARGEST_ERROR]
        if kept == names:
            return found
        names = kept


def basis(value: float, fitted: float | None, error: float) -> str:
    """The basis of a value: "reproduced", "other" or "undetermined"."""
    if fitted is None:
        return "undetermined"
    return "reproduced" if abs(fitted / value - 1) <= max(NEAR, NEAR_ERRORS * error * fitted / value) else "other"


def choice(rows: Sequence[Any], values: Mapping[str, float], model: Model = modelled) -> dict[str, float]:
    """What the model's first plan loses against the fastest measured plan, over the recorded products."""
    products: dict[tuple, list[tuple[float, float]]] = {}
    for row, us in zip(rows, model(rows, values)):
        products.setdefault((row.record, row.problem), []).append((us, row.us))
    losses = np.array([min(plans)[1] / min(us for _, us in plans) - 1 for plans in products.values()])
    within = int(np.sum(losses <= WITHIN))
    mean, worst = round(float(losses.mean()), 4), round(float(losses.max()), 4)
    return {"products": len(losses), "within_5_percent": within, "mean_loss": mean, "worst_loss": worst}


def judged(problem: Problem, values: Mapping[str, float], offsets: Mapping[str, float]) -> dict[str, float]:
    """How well ``values`` meet the record, and what the choices by them lose."""
    return {"rms": round(problem.rms(values, offsets), 4), **choice(problem.rows, values, problem.model)}


def entry(value: float, fitted: float | None, error: float, plans: int) -> dict[str, object]:
    """The file's entry of one constant."""
    about: dict[str, object] = {"value": value, "basis": basis(value, fitted, error), "plans": plans}
    return about if fitted is None else about | {"fit": float(f"{fitted:.5g}"), "error": round(error, 4)}


def between_widths(values: Mapping[str, float], fitted: Mapping[str, float]) -> dict[str, float]:
    """Times in FP8 of a stage and a tile for widths that the fit leaves out: interpolated between neighbouring widths,
    relative to 16-bit x."""
    wide, found = recorded(), {}
    for table in ("stage_us", "tile_us"):
        names = {int(name.split()[1]): name for name in values if name.startswith(table + " ")}
        known = sorted(width for width, name in names.items() if name in fitted)
        ratios = [values[names[width]] / wide[names[width]] for width in known]
        for width in names.keys() - known:
            found[names[width]] = float(f"{wide[names[width]] * np.interp(width, known, ratios):.4g}")
    return found


def result(
    problem: Problem, values: dict[str, float], take: bool, plans: Path, others: Callable[..., dict] | None = None
) -> dict[str, object]:
    """The content of the file. take: whether the fitted constants become the values in use. others: finds values of
    constants that the fit leaves out."""
    counts, found = dependents(problem, values), fit(problem, values)
    if take:
        values |= {name: float(f"{found.values[name]:.4g}") for name in found.errors}
        values |= others(values, found.errors) if others else {}
    fitted = {name: found.values[name] if name in found.errors else None for name in values}
    own = problem.descend(values, dict.fromkeys(problem.members, 0.0), [])
    return {
        "record": f"{plans.parent.name}/{plans.name}",
        "plans": len(problem.rows),
        "by_the_values": judged(problem, values, own.offsets),
        "by_the_fit": judged(problem, found.values, found.offsets),
        "offsets_us": {name: round(us, 4) for name, us in found.offsets.items()},
        "constants": {n: entry(x, fitted[n], found.errors.get(n, 0.0), counts[n]) for n, x in values.items()},
    }


def disagreements(problem: Problem, file: Mapping[str, Any]) -> list[str]:
    """Constants whose fit, begun at the file's figures, ends elsewhere, and entries whose basis does not follow from
    the fit."""
    constants = file["constants"]
    names = [name for name, about in constants.items() if "fit" in about]
    begin = {name: about.get("fit", about["value"]) for name, about in constants.items()}
    found = problem.descend(begin, file["offsets_us"], names)
    moved = [
        f"{name}: got {found.values[name]:.5g} from the record, expected {constants[name]['fit']:.5g} as in the file"
        for name in names
        if abs(math.log(found.values[name] / constants[name]["fit"])) > MOVED * constants[name]["error"]
    ]
    wrong = [
        f"{name}: got basis {about['basis']}, expected {right}"
        for name, about in constants.items()
        if (right := basis(about["value"], about.get("fit"), about.get("error", 0.0))) != about["basis"]
    ]
    return moved + wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", action="store_true", help="make the fit the values in use")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FILE", help="records of gemm_choice.py")
    parser.add_argument("--check", action="store_true", help="write nothing; say whether the record gives the file")
    parser.add_argument("--fp8", action="store_true", help="plans of x in FP8, and their constants")
    parser.add_argument("--rows", action="store_true", help="plans of unpacked NVFP4 operands, and their constants")
    options = parser.parse_args(arguments)
    plans, record = (PLANS_FP8, RECORD_FP8) if options.fp8 else (PLANS, RECORD)
    if options.rows:
        plans, record = PLANS_ROWS, RECORD_ROWS
    add(options.add, plans)
    problem = Problem(table(plans))
    if options.check:
        found = disagreements(problem, json.loads(record.read_text()))
        print("\n".join(found) or f"{record.name} is what {len(problem.rows)} plans give")
        return int(bool(found))
    found = result(problem, recorded(record), options.take, plans, between_widths if options.fp8 else None)
    record.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: found[name] for name in ("plans", "by_the_values", "by_the_fit", "offsets_us")}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
