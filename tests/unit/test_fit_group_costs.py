"""The constants of tiles of groups are what ``benchmarks/fit_group_costs.py`` says of the record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import fit_group_costs as script
from fit_packed_model import Problem, choice, disagreements

from cute_nvfp4.planning.group_costs import GROUP_COSTS, RECORD, GroupCosts
from cute_nvfp4.planning.packed_model import recorded

FILE = json.loads(RECORD.read_text())
WIDTHS = ((32,), (48,), (64, 72, 80, 96), (112, 120, 128, 144))


def product(which: str, dtype: str, mean: int) -> dict:
    """A product of a record, without times: experts with more rows and fewer."""
    plans = []
    for *narrower, widest in WIDTHS:
        ctas = 1 if narrower else 2
        tiling = {"tile_n": widest, "narrower": narrower, "warpgroups": 2, "ctas_per_sm": ctas}
        plans.append(tiling | {"stage_tiles": 2, "stages": 0, "workers": 132 * ctas, "us": 1.0})
    rows = [mean + 3 * (i % 5 - 2) for i in range(40)] + [0]
    return {"which": which, "dtype": dtype, "n": 768, "k": 2048, "rows": rows, "plans": plans}


def record(path: Path, products: list[dict]) -> Path:
    """A file as ``group_plans.py`` writes it."""
    about = {"gpu": "NVIDIA H200", "date": "2030-01-02", "driver": "1.2"}
    path.write_text(json.dumps(about | {"products": products}))
    return path


def test_a_fit_finds_constants_that_made_the_times(tmp_path: Path) -> None:
    products = [product(*x, mean) for x in (("first", "bfloat16"), ("second", "bfloat16")) for mean in (20, 60, 110)]
    held = tmp_path / "plans.json"
    script.add([record(tmp_path / "new.json", products)], held)
    rows = script.table(held)
    assert len(rows) == len(products) * len(WIDTHS) and all(row.plan.config.gathered for row in rows[:12])
    made = recorded(RECORD) | {"stage 2 48": 0.3, "stage 1 64": 0.7, "gathered 48": 4.0, "start_us": 6.0}
    rows = [row._replace(us=us) for row, us in zip(rows, script.modelled(rows, made))]
    problem = Problem(rows, script.modelled)
    found = problem.descend(recorded(RECORD), {}, ["stage 2 48", "stage 1 64", "gathered 48", "start_us"])
    assert {name: found.values[name] for name in made} == pytest.approx(made, rel=1e-3)


def test_only_records_of_an_h200_are_added(tmp_path: Path) -> None:
    source = record(tmp_path / "new.json", [])
    source.write_text(source.read_text().replace("H200", "H100"))
    with pytest.raises(SystemExit, match="got a record of NVIDIA H100"):
        script.add([source], tmp_path / "plans.json")


def test_the_file_is_what_the_record_gives() -> None:
    problem = Problem(script.table(), script.modelled, script.FEWEST)
    assert disagreements(problem, FILE) == []
    assert FILE["plans"] == len(problem.rows)
    said, found = FILE["by_the_values"], choice(problem.rows, recorded(RECORD), script.modelled)
    assert found == {name: said[name] for name in found}
    # the record, of one layer, says nothing else of any constant, and choices by the values lose little
    assert "other" not in {about["basis"] for about in FILE["constants"].values()}
    assert said["mean_loss"] < 0.01 and said["worst_loss"] < 0.06


def test_a_constant_that_somebody_changed_is_noticed() -> None:
    name, about = next((n, x) for n, x in FILE["constants"].items() if "fit" in x)
    changed = FILE["constants"] | {name: about | {"value": 3 * about["fit"], "basis": "reproduced"}}
    found = disagreements(Problem(script.table(), script.modelled, script.FEWEST), FILE | {"constants": changed})
    assert f"{name}: got basis reproduced, expected other" in found


def test_plans_go_by_the_file() -> None:
    assert GroupCosts.of(recorded(RECORD)) == GROUP_COSTS
    assert GROUP_COSTS.stage[2][32] == FILE["constants"]["stage 2 32"]["value"]
    bases = {about["basis"] for about in FILE["constants"].values()}
    assert bases <= {"reproduced", "other", "undetermined"}
