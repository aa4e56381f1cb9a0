"""The harness on a GPU: times, peers, and cheats that only a GPU makes possible."""

from __future__ import annotations

import pytest
import torch
from support import CHEATS, TINY

from cute_nvfp4.harness.evaluate import Evaluation, Options

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(name: str, mode: str):
    submission = CHEATS / "submissions" / f"{name}.py"
    return Evaluation(Options("nvfp4_gemv", mode, submission, "cuda", task_file=TINY)).run()


@pytest.mark.parametrize("name", ["honest", "own_output"])
@pytest.mark.parametrize("mode", ["test", "benchmark", "leaderboard", "profile"])
def test_honest_submissions_pass(name, mode):
    result = run(name, mode)
    assert result.passed, [case.error for case in result.cases]
    timed = mode in ("benchmark", "leaderboard")
    for case in result.cases:
        assert case.wall_s is None  # a wall time would be taken for a GPU time
        assert (case.gpu is not None) is timed
        if timed:
            assert case.gpu.best > 1_000 and case.peer.mean > 1_000  # ns
    assert (result.score_us is not None) is timed


@pytest.mark.parametrize(
    "name,mode,message",
    [
        ("late_stream", "leaderboard", "elements are wrong"),
        ("cache_by_pointer", "leaderboard", "call 2, fresh data"),
        ("cache_by_pointer", "benchmark", "call 2, fresh data"),
        ("idle_when_timed", "benchmark", "may never have been written"),
        ("stale_output", "leaderboard", "elements are wrong"),
        ("input_mutation", "test", "changed its inputs: sfa"),
        ("partial_output", "test", "may never have been written"),
    ],
)
def test_cheats_are_caught(name, mode, message):
    result = run(name, mode)
    assert not result.passed
    assert any(message in case.error for case in result.cases), [case.error for case in result.cases]
