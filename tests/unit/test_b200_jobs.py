"""Modelling in several processes: it is told in the order of the tasks, and an error loses nothing else."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import clocked_plans
import gemm_refit
import ours_b200
import timing_b200
from clocked_plans import Task, Time

FORK = multiprocessing.get_context("fork")


def shared_sizes(task: Task) -> Time:
    """A time that says which task it is of, in place of what the clock says."""
    ((m, n, _),) = task.problem.sizes
    return Time(m + n / 1e4 + task.plan.config.tile_n / 1e6, 1.0, task.plan, 0.1)


@pytest.mark.parametrize("jobs", [1, 2])
def test_times_come_in_the_order_of_their_tasks(jobs, monkeypatch):
    problems = [gemm_refit.problem_of(sizes) for sizes in itertools.islice(gemm_refit.problems(1), 3)]
    tasks = [Task(problem, plan) for problem in problems for _, plan in problem.candidates()[:2]]
    monkeypatch.setattr(clocked_plans, "timed", shared_sizes)
    if jobs > 1:  # a process of its own would import the real one
        monkeypatch.setattr(clocked_plans.multiprocessing, "get_context", lambda method: FORK)
    times = list(clocked_plans.times_of(tasks, jobs))
    assert [(t.us, t.plan.config) for t in times] == [(shared_sizes(t).us, t.plan.config) for t in tasks]


def test_choices_are_what_the_model_s_first_plans_take(monkeypatch):
    monkeypatch.setattr(clocked_plans, "timed", shared_sizes)
    record = {"plans": [], "fitted": {"START_US": 1.0, "CLUSTER_US": 2.0}, "choices": {}}
    gemm_refit.draw_plans(record, 2, 1, lambda: None)
    gemm_refit.draw_choices(record, 2, 2, 1, lambda: None)
    gemm_refit.draw_choices(record, 2, 3, 1, lambda: None)
    assert [tuple(p["sizes"]) for p in record["plans"]] == list(itertools.islice(gemm_refit.problems(1), 2))
    drawn = list(itertools.islice(gemm_refit.problems(2), 3))
    choices = record["choices"]["2"]
    assert [tuple(c["sizes"]) for c in choices] == drawn
    for (m, n, k), choice in zip(drawn, choices):
        for t in choice["times"]:
            assert t["us"] == round(m + n / 1e4 + t["tiling"]["tile_n"] / 1e6, 3)
        _, today = gemm_refit.ranked((m, n, k))[0]
        assert gemm_refit.described(today) in list(map(gemm_refit.plan_in, choice["times"]))
    assert len(gemm_refit.losses(choices, record["fitted"])) == 3
    before = json.loads(json.dumps(record))
    gemm_refit.draw_choices(record, 2, 3, 1, lambda: None)
    assert json.loads(json.dumps(record)) == before, "what has a time is timed again"


def test_an_error_loses_no_other_launch(monkeypatch, tmp_path, capsys):
    wanted = [launch for launch in ours_b200.launches() if launch.table == "decode"]

    def modelled(launch):
        if launch is wanted[1] or launch.key == wanted[1].key:
            raise RuntimeError("no such program")
        return {"modelled_us": 1.0, "clock": timing_b200.version(), "phases": []}

    old = {launch.key: {"modelled_us": 2.0, "clock": "before"} for launch in wanted[:2]} | {"gone": {"clock": "before"}}
    monkeypatch.setattr(ours_b200, "RESULTS", tmp_path / "record.json")
    monkeypatch.setattr(ours_b200, "modelled", modelled)
    monkeypatch.setattr(ours_b200, "tables", lambda record: {})
    ours_b200.RESULTS.write_text(json.dumps(old))
    monkeypatch.setattr(sys, "argv", ["ours_b200.py", "--only", "decode", "--stale", "--jobs", "3"])
    assert ours_b200.main() == 0
    found = json.loads(ours_b200.RESULTS.read_text())
    assert list(found) == [launch.key for launch in wanted] + ["gone"]
    assert [launch.key for launch in wanted if found[launch.key]["modelled_us"] == 2.0] == [wanted[1].key]
    assert "no such program" in capsys.readouterr().err
