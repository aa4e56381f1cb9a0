"""``cute-nvfp4 explain``: layers that belong together, costs that add up, and what a user can get wrong."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from clock_lab import needs_ptxas
from typer.testing import CliRunner

from cute_nvfp4.cli.main import app
from cute_nvfp4.sim.clock import tools
from cute_nvfp4.sim.errors import ClockError

PROGRAM = """
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def kernel(x: cute.Tensor, y: cute.Tensor, times: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    value = x[thread]
    for _ in cutlass.range(times):
        value = {inner}  # <& here>
    cute.arch.sync_threads()
    y[thread] = value


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, times: cutlass.Int32):
    kernel(x, y, times).launch(grid=(4, 1, 1), block=(128, 1, 1))


x, y = (torch.zeros(128, device="cuda") for _ in range(2))
for times in range({launches}):
    launch(from_dlpack(x), from_dlpack(y), 200)
"""
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""
ADD, ROOT = "value + 1.5", "cute.math.exp2(value, fastmath=True)"


def program(folder: Path, inner: str = ADD, launches: int = 1) -> Path:
    file = folder / "program.py"
    file.write_text(PROGRAM.format(inner=inner, launches=launches))
    return file


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def explained(*arguments: object) -> dict:
    """What ``--json`` writes."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def hottest(kernel: dict) -> dict:
    """The line that costs most, but for the decorators, which the DSL gives what belongs to no line."""
    costs = [row["cost"] for row in kernel["python"] if row["cost"]["text"][0] != "@"]
    return max(costs, key=lambda cost: cost["share"])


def share(rows: list[dict]) -> float:
    return sum(row["cost"]["share"] for row in rows)


@needs_ptxas
def test_layers_belong_together_and_add_up(tmp_path):
    """The loop's line costs most; every layer has all of the launch, and knows where it came from."""
    file, page = program(tmp_path, launches=2), tmp_path / "page.html"
    found = explained(file, "--arch", "sm_90a", "--html", page)
    (kernel,), lines = found["kernels"], file.read_text().split("\n")
    assert (found["schema"], found["launches"], kernel["clock"]) == (1, 2, "h200") and kernel["microseconds"] > 0
    python, ptx, sass = (kernel[layer] for layer in ("python", "ptx", "sass"))
    assert sum(row["cost"]["executed"] for row in ptx) == kernel["instructions"]
    below = {row["id"]: sum(p["cost"]["executed"] for p in ptx if p["of"] == row["id"]) for row in python}
    assert below == {row["id"]: row["cost"]["executed"] for row in python}
    assert share(sass) == pytest.approx(share(ptx), rel=1e-4) and 0.5 < share(ptx) < 1
    for row in python:
        mine = [p for p in ptx if p["of"] == row["id"]]
        names = {p["id"] for p in mine}
        assert share(mine) == pytest.approx(row["cost"]["share"], rel=1e-4)
        assert share([s for s in sass if s["of"] in names]) == pytest.approx(row["cost"]["share"], rel=1e-4)
        path, _, line = row["id"].rpartition(":")
        assert path == str(file) and row["cost"]["text"] == lines[int(line) - 1].strip()
    hot = hottest(kernel)
    assert hot["text"].startswith("value = value + 1.5") and hot["executed"] == 4 * 4 * 200
    (load,) = [row for row in python if row["cost"]["text"] == "value = x[thread]"]
    assert load["cost"]["bytes"] == 4 * 4 * 128
    assert any("BAR.SYNC" in row["cost"]["text"] for row in sass)
    _looks_right(page.read_text(), kernel)


class _Rows(HTMLParser):
    """Lines that can be clicked, by layer: (line of Python, PTX instruction), and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[tuple[str, str]]] = {}
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list) -> None:
        given = dict(attrs)
        if "data-layer" in given:
            self.layer = self.found.setdefault(given["data-layer"], [])
        if "data-ptx" in given:
            self.layer.append((given["data-python"], given["data-ptx"]))

    def handle_data(self, data: str) -> None:
        self.text += data


def _looks_right(page: str, kernel: dict) -> None:
    """A line of the page for each row, which names the same lines of Python and PTX."""
    rows = _Rows()
    rows.feed(page)
    of = {row["id"]: row["of"] for row in kernel["ptx"]}
    assert rows.found["python"] == [(row["id"], "") for row in kernel["python"]]
    assert rows.found["ptx"] == [(row["of"], row["id"]) for row in kernel["ptx"]]
    assert rows.found["sass"] == [(of.get(row["of"], ""), row["of"]) for row in kernel["sass"]]
    assert "# <& here>" in rows.text and "<& here>" not in page and "from cutlass" not in rows.text


@pytest.mark.slow
@needs_ptxas
@pytest.mark.skipif(not BROWSER, reason="no chromium: apt-get install chromium")
def test_a_click_in_a_browser(tmp_path):
    """A click on a line of Python marks its PTX and SASS, and nothing else."""
    page = tmp_path / "page.html"
    (kernel,) = explained(program(tmp_path), "--arch", "sm_90a", "--html", page)["kernels"]
    number, line = next((n, r) for n, r in enumerate(kernel["python"]) if r["cost"]["text"].startswith("value = value"))
    script = f"""<script>
    document.querySelectorAll("[data-layer=python] .row.live")[{number}].click();
    document.body.dataset.told = JSON.stringify([...document.querySelectorAll(".row.on")].map(r => r.dataset.ptx));
    </script></body>"""
    page.write_text(page.read_text().replace("</body>", script))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=300, check=True)
    told = json.loads(html.unescape(re.search(r'data-told="([^"]*)"', done.stdout)[1]))
    mine = [row["id"] for row in kernel["ptx"] if row["of"] == line["id"]]
    assert told == ["", *mine, *(row["of"] for row in kernel["sass"] if row["of"] in mine)] and len(mine) > 1


@needs_ptxas
def test_a_changed_line_costs_something_else(tmp_path):
    """The same line by a slower pipe: it takes more of the time, and waits for that pipe."""
    costs = []
    for inner in (ADD, ROOT):
        (kernel,) = explained(program(tmp_path, inner), "--arch", "sm_90a")["kernels"]
        hot = hottest(kernel)
        assert hot["text"].startswith(f"value = {inner}")
        costs.append((kernel["microseconds"], hot))
    (fast, added), (slow, root) = costs
    assert slow > fast and "xu" not in added["reasons"]
    assert root["reasons"]["xu"] > 0.2 and root["share"] > added["share"]


def test_without_tools_there_is_ptx_alone(tmp_path, monkeypatch):
    def missing(name: str) -> str:
        raise ClockError.of("the clock", got=f"no {name}", expected="one of CUDA 13")

    monkeypatch.setattr(tools, "tool", missing)
    (kernel,) = explained(program(tmp_path, "value + 2.5"), "--arch", "sm_90a")["kernels"]
    assert not kernel["sass"] and kernel["microseconds"] is None and not kernel["clock"]
    assert any("PTX alone, no SASS" in note and "no ptxas" in note for note in kernel["notes"])
    assert share(kernel["ptx"]) == pytest.approx(1, rel=1e-4)  # of numbers with six digits


@needs_ptxas
def test_a_gpu_without_a_clock_has_sass_and_no_times(tmp_path):
    """What is printed for sm_120a: counted shares, and the machine code without any."""
    result = invoke(program(tmp_path), "--arch", "sm_120a", "--all", "--report", tmp_path / "details.json")
    assert result.exit_code == 0, result.output
    (page,) = json.loads((tmp_path / "details.json").read_text())["profiles"]
    told = {metric["name"]: metric for section in page["sections"] for metric in section["metrics"]}
    assert told["Duration"]["source"] == "not modelled" and told["Global Load Bytes Per Sector"]["value"] == 32
    assert f"{told['Executed PTX Instructions']['value']:,} PTX instructions of warps" in result.output
    assert "share of the executed instructions (counted)" in result.output and "modelled on" not in result.output
    assert "value = value + 1.5" in result.output and "FADD" in result.output


@pytest.mark.sim_only("models times")
@needs_ptxas
def test_an_operation_by_its_name():
    """Lines of the package's own kernels, whatever was compiled before in this process."""
    found = explained("quantize", "--arch", "sm_90a", "--m", 16, "--k", 64)
    kernel = found["kernels"][-1]
    assert found["launches"] == len(found["kernels"]) and "quantize" in kernel["kernel"]
    assert any("kernels/quantize/" in row["id"] for row in kernel["python"])
    assert share(kernel["python"]) > 0.8


@needs_ptxas
def test_a_submission_to_a_folder():
    """The folder's reference.py draws the data, and is forgotten afterwards; only the submission's launch is told."""
    folder = Path(__file__).parents[1] / "harness" / "folders" / "rowsum"
    found = explained(folder / "submission.py", "--task", folder / "task.yml", "--case", 1, "--arch", "sm_90a")
    (kernel,) = found["kernels"]
    assert kernel["grid"] == [7, 1, 1] and "reference" not in sys.modules
    assert all(row["id"].startswith(str(folder / "submission.py")) for row in kernel["python"])


@needs_ptxas
def test_cases_of_a_file_of_shapes():
    """A file with shapes alone has cases for one of our problems, and for no other."""
    tests = Path(__file__).parents[1]
    kernel, shapes = tests / "harness" / "own_kernels" / "gemv_shared.py", tests / "cheats" / "tiny.yml"
    (first, second) = (
        explained(kernel, "--task", shapes, "--case", case, "--arch", "sm_90a")["kernels"][0]["grid"] for case in (0, 1)
    )
    assert first != second
    result = invoke(kernel, "--problem", "nvfp4_gemm", "--task", shapes)
    assert "got cases of 'nvfp4_gemv', expected of 'nvfp4_gemm'" in " ".join(result.output.split())


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["nowhere.py"], "what to explain: got 'nowhere.py', expected a Python file, or one of gemv, gemm"),
        (["gemv", "--arch", "sm_80"], "sm_80"),
        (["{submission}"], "got no problem, expected --problem nvfp4_gemv"),
        (["{submission}", "--problem", "nvfp4_gemx"], "unknown problem 'nvfp4_gemx'"),
        (["{submission}", "--problem", "nvfp4_gemv", "--case", "99"], "the case: got 99, expected 0 to"),
        (["{submission}", "--task", "nowhere.yml"], "task file nowhere.yml does not exist"),
        (["{nothing}"], "launched no kernel"),
        (["{program}", "--launch", "7"], "launch 7 does not exist: 1 launches, numbered from 0"),
        (["gemv", "--html", "/nowhere/page.html"], "--html: cannot write /nowhere/page.html"),
        (["gemv", "--report", "page.pdf"], "--report page.pdf: expected a name that ends in .txt, .csv, .json"),
    ],
)
def test_what_a_user_can_get_wrong(arguments, message, tmp_path):
    files = {"submission": "def custom_kernel(data):\n    return data[-1]\n", "nothing": "print(1)\n"}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    places = {name: tmp_path / f"{name}.py" for name in files} | {"program": program(tmp_path)}
    result = invoke(*(word.format(**places) for word in arguments))
    assert result.exit_code == (113 if "--task" in arguments else 2) and message in " ".join(result.output.split())
