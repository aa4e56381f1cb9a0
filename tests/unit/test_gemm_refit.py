"""The fit of the analytic model's constants to the clock's times: it finds the constants that times were made with."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gemm_refit

from cute_nvfp4.planning import gemm, rates

MADE = {"START_US": 1.9, "STAGE_LATENCY_US": 0.6, "CLUSTER_US": 0.5}
"""Other constants than today's."""


def plans(count: int) -> list[dict]:
    """Plans of the refit's first problems, with the times that the model has for them with ``MADE``."""
    out = []
    for sizes in itertools.islice(gemm_refit.problems(1), count):
        for _, plan in gemm_refit.ranked(sizes)[:6]:
            entry = {"sizes": list(sizes), **gemm_refit.described(plan)}
            problem, again = gemm_refit.plan_of(sizes, entry)
            assert again.config == plan.config and again.swap == plan.swap
            with gemm_refit.constants(MADE):
                out.append(entry | {"us": gemm.predict_plan(again, problem, rates.SM_COUNT).us})
    return out


def test_the_fit_finds_what_the_times_were_made_with():
    before = {name: float(getattr(rates, name)) for name in gemm_refit.CONSTANTS}
    known = plans(8)
    assert max(map(abs, gemm_refit.errors(known, {}))) > 0.05
    found = gemm_refit.fit(known)
    assert max(map(abs, gemm_refit.errors(known, found))) < 0.01
    assert found["START_US"] == pytest.approx(MADE["START_US"], rel=0.05)
    assert {name: float(getattr(rates, name)) for name in gemm_refit.CONSTANTS} == before


def test_the_record_s_constants_are_in_use_and_no_step_from_them_is_better():
    record = json.loads(gemm_refit.RECORD.read_text())
    plans, fitted, replaced = record["plans"], record["fitted"], record["replaced"]
    assert {name: float(getattr(rates, name)) for name in gemm_refit.CONSTANTS} == fitted
    assert len(plans) == 300 and [len(choices) for choices in record["choices"].values()] == [60, 60, 60]
    least = gemm_refit.loss(plans, fitted)
    assert least < gemm_refit.loss(plans, replaced)
    # the constants are rounded to four digits
    for values in gemm_refit.neighbours(fitted, replaced, 2 * gemm_refit.FINEST):
        assert gemm_refit.loss(plans, values) > 0.999 * least


def test_the_model_s_choices_lose_little_on_problems_that_it_has_not_seen():
    record = json.loads(gemm_refit.RECORD.read_text())
    lost = gemm_refit.losses(record["choices"]["20261130"], {})
    assert len(lost) == 60 and sum(lost) / 60 < 0.05
