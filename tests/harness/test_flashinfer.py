"""FlashInfer-Bench: a Definition and a Solution go in, Traces come out, with its names for what happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cute_nvfp4.harness.errors import HarnessError, SubmissionError, TaskFileError
from cute_nvfp4.harness.evaluation import Options
from cute_nvfp4.harness.flashinfer.evaluation import BenchEvaluation
from cute_nvfp4.harness.flashinfer.task import read_definition, read_solution
from cute_nvfp4.sim.clock.tools import found

DATA = Path(__file__).parents[1] / "data" / "flashinfer"
TORCH = """
import torch

def run(x, weight, *out):
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    return {returned}
"""


def solution(to: Path, fault: str = "", returned: str = "", **changes) -> Path:
    """The recorded solution with a fault; or one of torch that returns an expression."""
    content = json.loads((DATA / "solution.json").read_text())
    if returned:
        content["spec"]["destination_passing_style"] = False
        content["sources"] = [{"path": "main.py", "content": TORCH.format(returned=returned)}]
    else:
        content["sources"][1]["content"] = f'FAULT = "{fault}"\n'
    content["spec"] |= changes.pop("spec", {})
    path = to / "solution.json"
    path.write_text(json.dumps(content | changes))
    return path


def judged(path: Path, definition: Path = DATA / "definition.json", workloads: Path | None = None, **options) -> list:
    """The traces that are written, after a look at which figures each may have."""
    written = path.with_name("traces.jsonl")
    options = Options("", **{"backend": "reference", "submission": path} | options)
    try:
        BenchEvaluation(options, definition, workloads or DATA / "workloads.jsonl", written).run()
    except SubmissionError:
        pass
    traces = [json.loads(line) for line in written.read_text().splitlines()]
    for trace in traces:
        told = trace["evaluation"]
        assert (told["performance"] is not None) == (told["status"] == "PASSED")
        assert (told["correctness"] is not None) == (told["status"] in ("PASSED", "INCORRECT_NUMERICAL"))
    return traces


@pytest.mark.parametrize(
    "fault,status,log",
    [
        ("", "PASSED", ""),
        ("wrong", "INCORRECT_NUMERICAL", "elements of output are wrong"),
        ("race", "RUNTIME_ERROR", "hazard: Race"),
    ],
)
def test_a_kernel_in_the_simulated_gpu(fault, status, log, tmp_path):
    mode = "test" if fault else "benchmark"
    (trace,) = judged(solution(tmp_path, fault), backend="sim", case=0, mode=mode)
    told = trace["evaluation"]
    assert told["status"] == status and log in told["log"]
    assert told["environment"]["hardware"] == "NVIDIA_B200 (simulated)"
    if status == "PASSED":
        assert told["correctness"]["max_absolute_error"] < 0.01
        assert (told["performance"]["latency_ms"] > 0) == bool(found("ptxas") and found("nvdisasm"))
        assert "not measured" in told["environment"]["libs"]["times"] or not found("ptxas")
    if status == "INCORRECT_NUMERICAL":
        assert told["correctness"]["max_relative_error"] > 0.49


def test_a_right_answer_that_no_launch_has_made_is_no_pass_in_the_simulated_gpu(tmp_path):
    (trace,) = judged(solution(tmp_path, returned="y.half()"), backend="sim", case=0)
    assert trace["evaluation"]["status"] == "RUNTIME_ERROR"
    assert trace["evaluation"]["log"].startswith("launched-nothing: right, but no kernel was launched")


@pytest.mark.parametrize(
    "returned,status,log",
    [
        ("y.half()", "PASSED", ""),
        ("{'output': y.half()}", "PASSED", ""),
        ("y.half()[:, 1:]", "INCORRECT_SHAPE", "output is"),
        ("y", "INCORRECT_DTYPE", "output is torch.float32, expected torch.float16"),
        ("(y.half(), y)", "INCORRECT_SHAPE", "expected 1 outputs: output"),
        ("torch.full_like(y, float('inf')).half()", "INCORRECT_NUMERICAL", "got inf"),
        ("y.half() + 1", "INCORRECT_NUMERICAL", "elements of output are wrong"),
        ("y.no_such_thing", "RUNTIME_ERROR", "no_such_thing"),
        ("__import__('time').sleep(60)", "TIMEOUT", "timed out"),
    ],
)
def test_statuses_have_their_names(returned, status, log, tmp_path):
    traces = judged(solution(tmp_path, returned=returned), timeout=1.0 if status == "TIMEOUT" else None, case=1)
    assert [trace["evaluation"]["status"] for trace in traces] == [status]
    assert log in traces[0]["evaluation"]["log"]
    assert traces[0]["evaluation"]["environment"]["hardware"] == "CPU (reference backend, no GPU)"


def test_workloads_are_written_as_they_were_read(tmp_path):
    read = [json.loads(line) for line in (DATA / "workloads.jsonl").read_text().splitlines()]
    traces = judged(solution(tmp_path, returned="y.half()"))
    assert [trace["workload"] for trace in traces] == [one.get("workload", one) for one in read]
    assert {(t["definition"], t["solution"]) for t in traces} == {("rmsnorm_h64", "rmsnorm_cute")}


def test_outputs_that_nobody_writes_are_wrong(tmp_path):
    path = solution(tmp_path)
    content = json.loads(path.read_text())
    content["sources"] = [{"path": "main.py", "content": "def run(x, weight, output):\n    pass\n"}]
    path.write_text(json.dumps(content))
    (trace,) = judged(path, case=0)
    assert trace["evaluation"]["status"] == "INCORRECT_NUMERICAL" and "got nan" in trace["evaluation"]["log"]
    assert trace["evaluation"]["correctness"]["max_absolute_error"] == "Infinity"


@pytest.mark.parametrize("source", ["def run(:\n", "import nowhere\n", "def walk():\n    pass\n"])
def test_what_cannot_be_loaded_is_a_compile_error(source, tmp_path):
    path = solution(tmp_path)
    content = json.loads(path.read_text())
    content["sources"][0]["content"] = source
    path.write_text(json.dumps(content))
    traces = judged(path)
    assert [trace["evaluation"]["status"] for trace in traces] == ["COMPILE_ERROR"] * 2
    assert traces[0]["evaluation"]["log"]


@pytest.mark.parametrize("language", ["triton", "cuda", "cpp", "tilelang", "fortran"])
def test_other_languages_are_refused_by_name(language, tmp_path):
    path = solution(tmp_path, spec={"language": language})
    with pytest.raises(HarnessError, match=f"is written in {language}: .* Write it in Python with the CuTe DSL"):
        read_solution(path, "rmsnorm_h64")


def test_a_solution_to_another_definition_or_of_another_form(tmp_path):
    with pytest.raises(HarnessError, match="a solution for 'rmsnorm_h64', not 'gemm'"):
        read_solution(solution(tmp_path), "gemm")
    with pytest.raises(SubmissionError, match=r"entry_point is 'main.py', expected FILE.py::FUNCTION"):
        read_solution(solution(tmp_path, spec={"entry_point": "main.py"}), "rmsnorm_h64")
    with pytest.raises(SubmissionError, match="sources"):
        read_solution(solution(tmp_path, sources=[]), "rmsnorm_h64")


SCALED = """
import torch

def run(x, factor, table):
    return x * factor + table, (x > 0)
"""


def scaled(to: Path, **changes) -> tuple[Path, Path]:
    """A definition with a scalar and a tensor of a file, and its workload."""
    tensors = {"x": (["n", "m"], "float32"), "factor": (None, "float32"), "table": (["m"], "float32")}
    content = {
        "name": "scaled",
        "op_type": "test",
        "axes": {"n": {"type": "var"}, "m": {"type": "const", "value": 4}},
        "inputs": {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in tensors.items()},
        "outputs": {"y": {"shape": ["n", "m"], "dtype": "float32"}, "sign": {"shape": ["n", "m"], "dtype": "bool"}},
        "reference": SCALED,
    }
    inputs = {
        "x": {"type": "random"},
        "factor": {"type": "scalar", "value": 2.5},
        "table": {"type": "safetensors", "path": "blobs/t.safetensors", "tensor_key": "rows"},
    }
    (to / "blobs").mkdir()
    (to / "workloads").mkdir()
    save_file({"rows": torch.arange(4.0)}, to / "blobs" / "t.safetensors")
    definition, workloads = to / "definition.json", to / "workloads" / "w.jsonl"
    definition.write_text(json.dumps(content | changes))
    workloads.write_text(json.dumps({"uuid": "u", "axes": {"n": 3}, "inputs": inputs}))
    return definition, workloads


@pytest.mark.parametrize("factor,status", [("factor", "PASSED"), ("2", "INCORRECT_NUMERICAL")])
def test_scalars_and_tensors_of_files_arrive_in_order(factor, status, tmp_path):
    definition, workloads = scaled(tmp_path)
    body = f"    y.copy_(x * {factor} + table)\n    sign.copy_(x > 0)\n    assert table.tolist() == [0, 1, 2, 3]\n"
    source = {"path": "main.py", "content": "def run(x, factor, table, y, sign):\n" + body}
    (trace,) = judged(solution(tmp_path, definition="scaled", sources=[source]), definition, workloads)
    assert trace["evaluation"]["status"] == status, trace["evaluation"]["log"]
    assert trace["workload"]["inputs"]["table"]["path"] == "blobs/t.safetensors"


def test_bad_definitions_and_workloads_are_named(tmp_path):
    definition, workloads = scaled(tmp_path)
    with pytest.raises(TaskFileError, match="constraints or scalars"):
        read_definition(definition, None)
    assert read_definition(DATA / "definition.json", None).task.tests == [
        {"batch_size": 16, "workload": "random", "seed": 0}
    ]
    workloads.write_text(workloads.read_text().replace('"n"', '"k"'))
    with pytest.raises(TaskFileError, match=r"workload 1: expected axes \['n'\]"):
        read_definition(definition, workloads)
    workloads.write_text("[]\n")
    with pytest.raises(TaskFileError, match="workload 1 is not valid"):
        read_definition(definition, workloads)
    definition.write_text(definition.read_text().replace('"float32"', '"float3"'))
    with pytest.raises(TaskFileError, match="x has dtype float3"):
        read_definition(definition, workloads)
    with pytest.raises(TaskFileError, match="cannot be read: No such file"):
        read_definition(tmp_path / "none.json", None)
