"""Another release of the DSL, or none: a sentence that says what to install, whatever is asked for."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import cute_nvfp4 as nv
from cute_nvfp4 import dsl_version
from cute_nvfp4.cli import diagnosis
from cute_nvfp4.cli.main import app
from cute_nvfp4.errors import TargetError
from cute_nvfp4.runtime import compile as compiling
from cute_nvfp4.runtime.session import simulated_gpu

SAYS = rf"{dsl_version.PACKAGE} 4\.4\.2 is installed, compiling a kernel needs 4\.8: pip install 'nvidia-cutlass-dsl>="


@pytest.fixture
def older(monkeypatch):
    """The DSL says that it is 4.4.2, and no kernel has been compiled."""
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "4.4.2" if name == dsl_version.PACKAGE else version(name))
    monkeypatch.setattr(compiling, "_memory", {})
    dsl_version.wrong_dsl.cache_clear()
    yield
    dsl_version.wrong_dsl.cache_clear()


def test_the_release_is_that_of_the_package():
    wanted = re.search(r'"nvidia-cutlass-dsl(>=[^"]+)"', (Path(__file__).parents[2] / "pyproject.toml").read_text())[1]
    assert dsl_version.ADVICE == f"pip install 'nvidia-cutlass-dsl{wanted}'"
    assert wanted.startswith(f">={dsl_version.SERIES}.")


@pytest.mark.parametrize("command", [["eval", "nvfp4_gemv", "--backend", "sim"], ["inspect", "gemm"]])
def test_commands(older, command):
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0
    assert re.search(SAYS, " ".join(result.output.split())), result.output
    assert "Traceback" not in result.output


def test_operations(older):
    a, b = (nv.quantize(torch.randn(128, 256), backend="reference") for _ in range(2))
    with pytest.raises(TargetError, match=SAYS):
        nv.gemm(a, b, backend="sim")


def test_sessions(older):
    with pytest.raises(TargetError, match=SAYS), simulated_gpu("sm_100a"):
        pass


def test_doctor(older):
    found = {finding.name: finding for finding in diagnosis._packages()}[dsl_version.PACKAGE]
    assert (found.status, found.found) == ("fail", "4.4.2, this package needs 4.8")
    assert found.advice == dsl_version.ADVICE


def test_no_dsl(monkeypatch):
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    dsl_version.wrong_dsl.cache_clear()
    try:
        with pytest.raises(TargetError, match=r"nvidia-cutlass-dsl is not installed, .*: pip install"):
            dsl_version.require_dsl()
    finally:
        dsl_version.wrong_dsl.cache_clear()
