"""A run of ``tests/gpu/sanitize.py`` fails if it checks no kernel, or not all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import sanitize


def test_only_a_run_whose_kernels_are_all_checked_is_good() -> None:
    assert sanitize.unchecked(["kernel_cutlass_gemv"]) == ""
    assert sanitize.unchecked([]).startswith("kernels that were loaded: got none")
    assert sanitize.unchecked(["kernel_cutlass_gemv", "mine"]).endswith(": mine")


def test_a_name_that_no_launch_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(sanitize, "launches", lambda device: {"gemv": lambda: ran.append("gemv")})
    monkeypatch.setattr(sanitize.driver, "load", sanitize.driver.load)
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--only", "gemm"])
    with pytest.raises(SystemExit) as ended:
        sanitize.main()
    assert ended.value.code == 2 and not ran
    assert "--only: got 'gemm', expected a part of one of these names: gemv" in capsys.readouterr().err
