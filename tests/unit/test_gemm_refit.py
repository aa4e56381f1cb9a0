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

MADE = {"START_US": 1.9, "STAGE_LATENCY_US": 0.9, "CLUSTER_US": 0.5}
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


def test_no_step_from_the_record_s_constants_is_better():
    record = json.loads(gemm_refit.RECORD.read_text())
    least = gemm_refit.loss(record["plans"], record["fitted"])
    assert len(record["plans"]) == 300 and len(record["choices"]) == 60
    assert least < gemm_refit.loss(record["plans"], {})
    # the constants are rounded to four digits
    for values in gemm_refit.neighbours(record["fitted"], 2 * gemm_refit.FINEST):
        assert gemm_refit.loss(record["plans"], values) > 0.999 * least
