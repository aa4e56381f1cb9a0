"""The constants of the model of packed weights are what ``benchmarks/fit_packed_model.py`` says of the record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import fit_packed_model as script

from cute_nvfp4.planning.packed_model import RECORD, RECORD_ROWS, Constants, recorded

FILE = json.loads(RECORD.read_text())
ROWS = script.table()
SOME = script.Problem([row for row in ROWS if row.record in ("3", "10")])


def test_the_file_is_what_the_record_gives() -> None:
    """The fit begins at the file's figures and ends there: within a fifth of each standard error, which no rounding of
    a processor's or a BLAS's reaches."""
    assert script.disagreements(script.Problem(ROWS), FILE) == []
    assert FILE["plans"] == len(ROWS) == 3428


def test_the_file_of_operands_that_nobody_packed_is_what_its_record_gives() -> None:
    """Its values are the fit's, where the record determines one."""
    file, rows = json.loads(RECORD_ROWS.read_text()), script.table(script.PLANS_ROWS)
    assert script.disagreements(script.Problem(rows), file) == []
    assert file["plans"] == len(rows) > 200
    assert {row.plan.config.decodes_x for row in rows} == {True, False}
    fitted = {name: about for name, about in file["constants"].items() if "fit" in about}
    assert {about["basis"] for about in fitted.values()} == {"reproduced"}
    assert {"decoded_us", "decoding 128", "stage_us 128"} <= fitted.keys()


def test_how_well_the_values_meet_the_record_is_what_the_file_says() -> None:
    said, found = FILE["by_the_values"], script.choice(ROWS, recorded())
    assert found == {name: said[name] for name in found}
    assert said["rms"] < 0.075 and FILE["by_the_fit"]["rms"] < said["rms"]
    # the fit is closer in the mean of all plans, and no better at naming the fastest: the values stay
    assert said["within_5_percent"] >= FILE["by_the_fit"]["within_5_percent"] > 0.85 * said["products"]


def test_every_constant_says_what_it_rests_on() -> None:
    bases = {name: about["basis"] for name, about in FILE["constants"].items()}
    assert set(bases.values()) <= {"reproduced", "other", "undetermined"}
    assert all(("fit" in about) == (about["basis"] != "undetermined") for about in FILE["constants"].values())
    # no plan of eight bits or of NVFP4 x is on record
    assert {bases[name] for name in ("eight_bits", "waiting", "decoded_x_us")} == {"undetermined"}
    assert Constants.of(recorded()).stage_us[128] == FILE["constants"]["stage_us 128"]["value"]


@pytest.mark.parametrize("name", ["stage_us 128", "cut_us"])
def test_another_value_or_another_record_is_noticed(name: str) -> None:
    """A constant that somebody changed by hand, and times a tenth longer."""
    constants = {**FILE["constants"], name: FILE["constants"][name] | {"value": 1.5 * FILE["constants"][name]["fit"]}}
    known = {n: about for n, about in constants.items() if n in (name, "start_us")}
    rest = {n: {k: x for k, x in about.items() if k not in ("fit", "error")} for n, about in constants.items()}
    offsets = {"10": FILE["offsets_us"]["10"]}
    rest = {n: about | {"basis": "undetermined"} for n, about in rest.items()}
    found = script.disagreements(SOME, {"constants": rest | known, "offsets_us": offsets})
    assert f"{name}: got basis reproduced, expected other" in found
    slower = script.Problem([row._replace(us=1.1 * row.us, best=1.1 * row.best) for row in SOME.rows])
    found = script.disagreements(slower, {"constants": rest | known, "offsets_us": offsets})
    assert any(line.startswith("start_us: got ") and "as in the file" in line for line in found)


def test_a_fit_finds_constants_that_made_the_times() -> None:
    values = recorded()
    made = values | {"start_us": 4.0, "stage_us 64": 0.5, "multicast": 0.9}
    rows = [row._replace(us=us) for row, us in zip(SOME.rows, script.modelled(SOME.rows, made))]
    problem = script.Problem(rows)
    found = problem.descend(values, {"10": 0.5}, ["start_us", "stage_us 64", "multicast"])
    assert {name: found.values[name] for name in made} == pytest.approx(made, rel=1e-3)
    assert found.offsets["10"] == pytest.approx(0.0, abs=1e-2)


def test_records_are_added_as_the_benchmark_writes_them(tmp_path: Path) -> None:
    plan = {"slabs": 4, "warps_m": 1, "warps_k": 8, "stage_tiles": 2, "stages": 16, "ctas_per_sm": 1}
    plans = [plan | {"workers": 106, "us": 8.4, "runs": 30, "model_us": 9.0, "plan": "stream"}, {"error": "it hangs"}]
    record = {"seed": 77, "date": "2030-01-02", "activations": "bfloat16", "rows": [{"m": 7, "n": 3376, "k": 1840}]}
    record["rows"][0]["plans"] = plans
    source, target = tmp_path / "record.json", tmp_path / "plans.csv"
    source.write_text(json.dumps(record))
    script.add([source], target)
    (row,) = script.table(target)
    assert (row.record, row.us, row.plan.workers) == ("77", 8.4, 106)
    assert row.plan.tiling == plan | {"programmatic": ""}
    source.write_text(json.dumps(record | {"activations": "nvfp4"}))
    with pytest.raises(SystemExit, match="got a record of nvfp4 x"):
        script.add([source], target)
