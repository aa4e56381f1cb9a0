"""Pictures of launches, plans and hazards: what they say is what the objects say, and every one is well-formed SVG."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

import cute_nvfp4
from cute_nvfp4 import gemm, quantize, show, simulating
from cute_nvfp4.display import hazards, memory, showing, svg, timelines, times
from cute_nvfp4.errors import OperandError, OperandTypeError, SimError
from cute_nvfp4.kernels.gemm.sm100.memory_plan import Tcgen05SharedPlan, TensorPlan, pipelines
from cute_nvfp4.planning.gemm import GemmProblem, choose
from cute_nvfp4.planning.packed import PackedProblem
from cute_nvfp4.planning.packed import choose as choose_packed
from cute_nvfp4.sim.checks.findings import Finding
from cute_nvfp4.sim.clock.tools import found
from cute_nvfp4.sim.observe.barriers import Barriers
from cute_nvfp4.target import architecture

ARCH = architecture("sm_100a")


@pytest.fixture(scope="module")
def launch() -> SimpleNamespace:
    """A GEMM of four k-tiles with everything that a launch can have."""
    generator = torch.Generator().manual_seed(0)
    a, b = (quantize(torch.randn(rows, 1024, generator=generator)) for rows in (128, 64))
    seen, clock = Barriers(), "b200" if found("ptxas") and found("nvdisasm") else None
    with simulating("sm_100a", counters=True, trace=True, others=(seen,), clock=clock) as runs:
        gemm(a, b)
    config = choose(GemmProblem(128, 64, 1024), ARCH, ARCH.sm_count).config
    return SimpleNamespace(run=runs[0], barriers=seen, config=config)


def parsed(picture: svg.Picture) -> ElementTree.Element:
    return ElementTree.fromstring(picture.svg)


def test_barriers_of_a_launch_are_those_of_its_plan(launch: SimpleNamespace) -> None:
    want = [
        (edge.stages, arrivals.count, arrivals.tx_bytes)
        for edge in pipelines(launch.config)
        for arrivals in edge.arrivals.values()
    ]
    assert [(r.stages, r.count, r.tx_bytes) for r in launch.barriers.rings()] == want
    full, empty, acc_full, acc_empty = launch.barriers.rings()
    assert full.arrive == empty.wait == ("warp 5",) and full.wait == ("warp 4",)  # loader and MMA
    assert acc_full.arrive == ("tensor core, for warp 4",) and acc_full.wait == acc_empty.arrive == ("warps 0 to 3",)
    assert full.phases == 4 and not any(r.pending for r in launch.barriers.rings())
    picture = show(launch.barriers)
    assert f"count 1 + {full.tx_bytes} bytes, 4 phases" in picture.words and parsed(picture) is not None


def test_the_plan_is_drawn_with_its_counts(launch: SimpleNamespace) -> None:
    edges = pipelines(launch.config)
    picture = show(edges)
    for edge in edges:
        for kind, arrivals in edge.arrivals.items():
            assert f"{edge.name} {kind} ({edge.stages})" in picture.words and str(arrivals) in picture.words
    words = show(launch.config).words
    assert f"= {Tcgen05SharedPlan(launch.config).bytes / 1024:g}" in words
    assert f"= {TensorPlan(launch.config).allocated}" in words


def test_memory_is_to_scale(launch: SimpleNamespace) -> None:
    for picture, limit in (
        (memory.shared_memory({"a": launch.config}), ARCH.shared_bytes / 1024),
        (memory.tensor_memory({"a": launch.config}), 512),
        (memory.bars({"mine": [("x", 10), ("y", 30)]}, 100, "KiB"), 100),
    ):
        root = parsed(picture)
        bars = [r for r in root.findall("{*}rect") if r.find("{*}title") is not None]
        for bar in bars:
            size = float(bar.find("{*}title").text.rpartition(": ")[2].split()[0])
            assert float(bar.get("width")) == pytest.approx(memory.PLOT * size / limit, abs=0.02)
        assert sum(float(b.get("width")) for b in bars) == pytest.approx(memory.PLOT, abs=0.2)
    with pytest.raises(OperandError, match="got 101 KiB, expected at most 100"):
        memory.bars({"mine": [("x", 101)]}, 100, "KiB")


def test_plans_of_packed_weights_are_drawn() -> None:
    target = architecture("sm_90a")
    for m in (4, 256):
        plan = choose_packed(PackedProblem(m=m, n=512, k=1024), target, target.sm_count)
        assert f"stage {plan.config.stage_bytes * plan.config.ring_stages / 1024:g}" in show(plan).words


def test_a_trace_has_every_bar_of_its_cta(launch: SimpleNamespace) -> None:
    rows = [r for r in launch.run.trace.rows() if r.cta == launch.run.trace.rows()[0].cta]
    picture = show(launch.run.trace)
    plot = parsed(picture).find("{*}svg")
    boxes = plot.findall("{*}g/{*}rect")
    assert len(boxes) == len(rows) and picture.zooms
    whole = max(r.end for r in rows)
    want = sorted(round(timelines.PLOT * (r.end - r.begin) / whole, 2) for r in rows)
    assert sorted(float(b.get("width")) for b in boxes) == pytest.approx(want, abs=0.02)
    later = show(launch.run.trace, begin=whole // 2)
    assert not later.zooms and len(parsed(later).findall("{*}svg/{*}g/{*}rect")) < len(rows)
    with pytest.raises(OperandError, match=r"expected one of CTA \(0, 0, 0\)"):
        show(launch.run.trace, cta="CTA (9, 9, 9)")


def test_of_too_many_bars_the_shortest_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MOST_BARS", 3)
    bars = [timelines.Bar(i, i + 1 + i % 2, "x", "#000000") for i in range(0, 10, 2)]
    long = [timelines.Bar(20, 30, "y", "#111111")]
    picture = timelines.drawn({"a": bars, "b": long}, "steps", "t", 0)
    assert "left out: 3 of the shortest bars" in picture.words and "y: 20 to 30" in picture.svg


def test_modelled_times_are_drawn(launch: SimpleNamespace) -> None:
    timing = launch.run.result.timing
    if timing is None:
        pytest.skip("ptxas and nvdisasm: pip install cute_nvfp4[clock]")
    words = show(timing).words
    assert f"{timing.microseconds:.2f} µs on B200" in words and "modelled, not measured" in words
    both = show({"one": timing, "two": timing})
    bars = [r for r in parsed(both).findall("{*}rect") if r.find("{*}title") is not None]
    widths = {r.find("{*}title").text: float(r.get("width")) for r in bars}
    took = timing.microseconds - timing.launch_us
    for bound, us in timing.bounds_us.items():
        assert widths[f"{bound} at full rate"] == pytest.approx(max(1, widths["modelled"] * us / took), abs=0.02)


def test_phases_are_all_of_the_warps_time(launch: SimpleNamespace) -> None:
    timing = launch.run.result.timing
    if timing is None:
        pytest.skip("ptxas and nvdisasm: pip install cute_nvfp4[clock]")
    parts = times.shares(timing)
    assert sum(parts.values()) == pytest.approx(1.0) and min(part.min() for part in parts.values()) > -1e-9
    waits = sum(w.end - w.begin for _, _, w in timing.waits if w.reason == "mbarrier")
    whole = len(timing.warps) * timing.cycles
    assert parts["mbarrier"].mean() == pytest.approx(waits / whole)
    picture = times.phases({"gemm": timing})
    assert timing.phases()[0].bound_by in picture.words and len(parsed(picture).findall("{*}path")) == len(parts)


def test_results_and_kernels_are_tables(launch: SimpleNamespace) -> None:
    result = launch.run.result
    page = show(result)
    assert f"{result.instructions} (" in page.words and f"{result.mma[0].operations} operations" in page.words
    loaded = sum(e.global_read + e.global_written for e in result.engines if "tensor.4d" in e.instruction)
    assert any(line.startswith("cp.async.bulk.tensor.4d") and str(loaded) in line for line in page.words.splitlines())
    assert "registers a thread" in show(launch.run.kernel).words
    assert page.words.splitlines()[2] in show(launch.run).words
    ElementTree.fromstring(f"<div>{show(launch.run.kernel).html}</div>")  # well-formed


def test_a_hazard_has_the_lines_that_it_names(tmp_path) -> None:
    source = tmp_path / "mine.py"
    source.write_text("first\nsecond <here>\nthird\n")
    text = f"kernel_cutlass_ring_object_at…: byte 4\n  is written at `st.shared` (PTX line 4, {source}:2) [race]"
    stopped = SimError(text)
    stopped.findings = (Finding("warning", "proxy-fence", "k", "ld", 3, "", f"it is odd ({source}:3)", 7),)
    page = show(stopped)
    assert "mine.py:2: second <here>" in page.words and "ring: byte 4" in page.words and str(tmp_path) not in page.words
    assert "warning: proxy-fence (7 times)" in page.words and "mine.py:3: third" in page.words
    assert "second &lt;here&gt;" in page.html and "<here>" not in page.html
    assert hazards.source_lines(f"{source}:9, {tmp_path}/gone.py:1") == []  # what cannot be read is not shown


def test_every_class_that_is_shown_exists() -> None:
    for table in (showing.SHOWN, showing.SEVERAL):
        for name, drawer in table.items():
            module, _, cls = name.rpartition(".")
            assert isinstance(getattr(importlib.import_module(f"cute_nvfp4.{module}"), cls), type)
            module, _, function = drawer.rpartition(".")
            assert callable(getattr(importlib.import_module(f"cute_nvfp4.display.{module}"), function))


def test_what_has_no_picture_is_refused() -> None:
    with pytest.raises(OperandTypeError, match=r"show: got int, expected a CuTe layout, or one of .*Timing"):
        show(3)


def test_pictures_begin_as_images_and_files_are_written(tmp_path) -> None:
    picture = show("(2,2):(2,1)")
    assert picture._repr_mimebundle_() == {"image/svg+xml": picture.svg, "text/plain": picture.words}
    picture.write(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == picture.svg
    zooms = timelines.drawn({"a": [timelines.Bar(0, 1, "x", "#000000")]}, "steps", "t", 0)
    bundle = zooms._repr_mimebundle_()
    assert bundle["text/html"].index("<img ") < bundle["text/html"].index("<script>")
    zooms.write(tmp_path / "a.html")
    assert "<script>" in (tmp_path / "a.html").read_text()


def test_importing_the_package_imports_no_picture() -> None:
    code = "import sys, cute_nvfp4; print([m for m in sys.modules if 'display' in m or m == 'numpy'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert "show" in cute_nvfp4.__all__
