"""``cute-nvfp4 doctor``: a healthy machine, and what it says of broken ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cute_nvfp4.cli import diagnosis
from cute_nvfp4.cli.diagnosis import PYTHON
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


def test_the_range_of_python_is_that_of_the_package():
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    (oldest, above), (first, newest) = re.search(r'requires-python = ">=(3\.\d+),<(3\.\d+)"', text).groups(), PYTHON
    assert oldest == f"{first[0]}.{first[1]}" and above == f"{newest[0]}.{newest[1] + 1}"
    listed = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', text)
    assert [int(minor) for minor in listed] == list(range(first[1], newest[1] + 1))


@pytest.mark.parametrize(
    "version,status", [((3, 9, 18), "fail"), ((3, 10, 0), "ok"), ((3, 14, 2), "ok"), ((3, 15, 0), "warn")]
)
def test_versions_of_python(version, status):
    finding = diagnosis.interpreter(version)
    assert finding.status == status and finding.found == ".".join(map(str, version))
    assert ("3.10 to 3.14" in finding.advice) == (status != "ok")


def test_builds_of_torch_and_triton():
    assert diagnosis.torch_build("2.13.0+cpu", None).found == "2.13.0+cpu, CPU build"
    assert diagnosis.torch_build("2.13.0+cu130", "13.0").found == "2.13.0+cu130, build for CUDA 13.0"
    assert diagnosis.triton("3.7.1").status == "ok"
    assert diagnosis.triton(None).status == "note" and "pip install triton" in diagnosis.triton(None).advice


@pytest.mark.parametrize(
    "version,built,status,advice",
    [
        ("13.0", "13.0", "ok", ""),
        ("13.0", None, "note", "a build of torch for CUDA"),
        ("", "13.0", "note", "docs/how-to/installation.md"),
        ("", None, "note", ""),
    ],
)
def test_a_driver_and_what_torch_makes_of_it(version, built, status, advice):
    finding = diagnosis.driver(version, built)
    assert finding.status == status and advice in finding.advice and bool(advice) == bool(finding.advice)
    assert ("simulator" in finding.found) == (version == "")


def test_the_version_of_a_driver(monkeypatch):
    class Library:
        def cuDriverGetVersion(self, number):  # the name of the CUDA driver API
            number._obj.value = 13010
            return 0

    monkeypatch.setattr(diagnosis.ctypes, "CDLL", lambda name: Library())
    assert diagnosis.driver_version() == "13.1"

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(diagnosis.ctypes, "CDLL", missing)
    assert diagnosis.driver_version() == ""


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
    _, first, second = diagnosis.diagnose()
    assert (first.status, first.found) == ("ok", "device 0, capability 9.0: sm_90a")
    assert second.status == "warn" and "--backend sim" in second.advice
