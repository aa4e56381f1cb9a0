"""``cute-nvfp4 doctor``: a healthy machine, and what it says of broken ones."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from cute_nvfp4.cli import diagnosis
from cute_nvfp4.cli.main import app
from cute_nvfp4.errors import CompileError
from cute_nvfp4.runtime import inspection

CU12, CU13 = "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13"


def test_a_working_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_NVFP4_CACHE_DIR", str(tmp_path / "cache"))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["ok"] is True
    found = {finding["name"]: finding for finding in content["findings"]}
    working = ("sm_90a (H100/H200)", "sm_100a (B200)", "simulator, sm_90a", "simulator, sm_100a", "nvdisasm", "ptxas")
    for name in working:
        assert found[name]["status"] == "ok", found[name]
    assert found[str(tmp_path / "cache")]["status"] == "ok"


@pytest.mark.parametrize(
    "versions,status,words",
    [
        ({CU12: "4.8.1", CU13: None}, "ok", ""),
        ({CU12: None, CU13: "4.8.1"}, "ok", ""),
        ({CU12: "4.8.1", CU13: "4.8.1"}, "warn", "one overwrites the other"),
        ({CU12: None, CU13: None}, "fail", "pip install"),
    ],
)
def test_dsl_libraries(versions, status, words):
    finding = diagnosis.libraries(versions)
    assert finding.status == status and words in finding.advice


def _alone(monkeypatch, *kept: str):
    """Leaves only the checks that a test is about."""
    for name in {"_packages", "_tools", "_compilers", "_devices", "_simulator", "_cache"} - set(kept):
        monkeypatch.setattr(diagnosis, name, lambda: ())


def test_broken_parts_are_reported_with_advice_and_exit_code_1(monkeypatch):
    _alone(monkeypatch, "_tools", "_compilers", "_simulator")

    def missing(name):
        raise CompileError(f"{name} was not found")

    def broken(arch):
        raise RuntimeError("the compiler exploded")

    monkeypatch.setattr(inspection, "find_tool", missing)
    monkeypatch.setattr(diagnosis, "_compile", broken)
    monkeypatch.setattr(diagnosis, "_simulate", broken)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert "nvdisasm was not found" in text and "pip install --force-reinstall nvidia-cuda-nvdisasm" in text
    assert "pip install 'cute_nvfp4[clock]'" in text
    assert "RuntimeError: the compiler exploded" in text and "Everything that is needed works" not in text


def test_a_simulator_that_gives_wrong_numbers_fails(monkeypatch):
    _alone(monkeypatch, "_simulator")
    monkeypatch.setattr("cute_nvfp4.ops.probe.probe", lambda x, backend="auto": x + (x < 3) * (backend == "auto"))
    assert {(f.status, f.found) for f in diagnosis.diagnose()} == {("fail", "3 wrong results")}


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    _alone(monkeypatch, "_cache")
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("CUTE_NVFP4_CACHE_DIR", str(blocked))
    (finding,) = diagnosis.diagnose()
    assert finding.status == "fail" and "CUTE_NVFP4_CACHE_DIR" in finding.advice
    monkeypatch.setenv("CUTE_NVFP4_CACHE", "0")
    (finding,) = diagnosis.diagnose()
    assert finding.status == "note"


def test_a_gpu_without_kernels_is_a_warning(monkeypatch):
    _alone(monkeypatch, "_devices")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: [(9, 0), (8, 0)][index])
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: f"device {index}")
    first, second = diagnosis.diagnose()
    assert (first.status, first.found) == ("ok", "device 0, capability 9.0: sm_90a")
    assert second.status == "warn" and "--backend sim" in second.advice
