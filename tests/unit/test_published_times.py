"""The published times that the clock is compared with, and what ``benchmarks`` makes of modelled ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ours_b200
import published
import timing_b200


@pytest.mark.parametrize(("table", "count"), [("dense", 147), ("grouped", 108), ("bf16", 15)])
def test_points_have_names_of_their_own_and_a_program(table: str, count: int) -> None:
    points = published.TABLES[table].points()
    assert len(points) == count
    assert len({p.name for p in points}) == count
    assert all(p.us > 0 for p in points)
    program, words = published.TABLES[table].command(points[:1])
    assert program.suffix == ".py"
    assert any(points[0].argument in word for word in words)


def test_rows_of_groups_agree_with_the_published_throughput() -> None:
    """2 M N K / t is within what rounding to 1 us and to 1 TFLOPS leaves."""
    for point, r in zip(published.grouped(), published.records("nvfp4_grouped_b200.csv"), strict=True):
        shape, rows = point.argument.split(":")
        n, k = map(int, shape.split("x"))
        work = 2 * sum(map(int, rows.split("/"))) * n * k / 1e6
        us, tflops = float(r["us"]), float(r["tflops"])
        assert (us - 0.5) * (tflops - 0.5) <= work <= (us + 0.5) * (tflops + 0.5), point.name


def test_errors_and_ranks() -> None:
    """Rows of the report keep their sign; pairs that differ by a tenth or less have no order."""
    points = [
        published.Point(name, row, us, "") for name, row, us in (("a", "x", 1.0), ("b", "x", 2.0), ("c", "y", 2.1))
    ]
    times = {"a": {"modelled_us": 2.5}, "b": {"modelled_us": 1.0}, "c": {"modelled_us": 4.2}}
    assert timing_b200.errors(points, times) == {"x": [1.5, -0.5], "y": [1.0], "all": [1.5, -0.5, 1.0]}
    assert timing_b200.ranked(points, times) == (1, 2)
    assert timing_b200.errors(points, {}) == {}


def test_every_launch_of_the_contest_has_a_row() -> None:
    """Fourteen shapes; seven have two examples beside them, four of these a third; what the clock refuses says so."""
    launches = [launch for launch in ours_b200.launches() if launch.table == "contest"]
    assert sum(launch.program == "ours" for launch in launches) == 14
    assert len(launches) == len({launch.key for launch in launches}) == 14 + 2 * 7 + 4
    phases = [{"bound_by": name, "share": 0.5} for name in ("issue", "dram", "dram", "tail")]
    now = timing_b200.version()
    record = {launch.key: {"modelled_us": 4.0, "phases": phases, "clock": now} for launch in launches}
    record[launches[-1].key] = {"refused": "0 launches have a time", "clock": "another"}
    *rows, _, said = ours_b200.tables(record)["contest"]
    assert said == f"1 of the {len(launches)} times are by earlier versions of the clock."
    assert len(rows) == 2 + 14 + 4
    assert "issue · dram · dram · tail" in rows[2] and "**4.00**" in rows[5]
    assert sum("refused" in row for row in rows) == 1
