"""Decides which tests run, and where.

``--backend sim`` (the default) tests kernels in the simulator. ``--backend cuda`` runs only tests that launch kernels
of the package, marked ``kernels`` or ``gpu``, on the machine's GPU, and prints at the end why it skipped others.
Without ``-m slow`` the run samples sweeps (``support/sampling.py``) and leaves out ``slow`` tests.

This file also puts ``tests/`` on the path, for ``support``, which several folders of tests share.
"""

from __future__ import annotations

import os

# one thread: tests' matrices are small, so that a BLAS's threads would mostly wait for one another
os.environ.setdefault("OMP_NUM_THREADS", "1")
# inductor believes torch which vector instructions there are; its own trials compile half a dozen programs
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import gc
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import backends, cpu_times, forked, sampling, stored_kernels

from cute_nvfp4 import simulating
from cute_nvfp4.harness import process
from cute_nvfp4.runtime.cache import CompiledKernel
from cute_nvfp4.runtime.simulating import SimulatedLaunch

_SIMULATED = {"kernels", "simulator", "fuzz"}
"""Folders of tests that call kernels."""
_ON_A_GPU = ("pytest.mark.kernels", "pytest.mark.gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend", choices=backends.BACKENDS, default="sim", help="where kernels are tested (default: sim)"
    )
    parser.addoption("--note-kernels", type=Path, metavar="FOLDER", help="note the kernels that tests request")
    parser.addoption("--shuffle", metavar="SEED", help="run tests in an order that depends on this word")
    parser.addoption("--cpu-times", type=Path, metavar="FILE", help="add CPU seconds of each test to a file")


def pytest_configure(config: pytest.Config) -> None:
    backends.select(config.getoption("backend"))
    if path := config.getoption("--cpu-times"):
        config.pluginmanager.register(cpu_times.CpuTimes(path.resolve()))
    if backends.backend() == "cuda":
        if not torch.cuda.is_available():
            raise pytest.UsageError("--backend cuda: torch finds no CUDA device")
        # references need deterministic matrix products
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    else:
        stored_kernels.install()
        if folder := config.getoption("--note-kernels"):
            os.environ[stored_kernels.NOTE] = str(folder.resolve())
            stored_kernels.note(folder, os.environ.get("PYTEST_XDIST_WORKER", "main"))
    if "PYTEST_XDIST_WORKER" not in os.environ:
        # a cache of this run: another run's code may use other vector instructions (ATEN_CPU_CAPABILITY) and crash
        folder = tempfile.TemporaryDirectory(prefix="inductor-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """On a GPU, skips the import of files without tests for it: they may need packages that the machine lacks."""
    name = collection_path.name
    if backends.backend() == "cuda" and name.startswith("test_") and name.endswith(".py"):
        text = collection_path.read_text(encoding="utf-8")
        return None if any(mark in text for mark in _ON_A_GPU) else True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = _left_out(config, items)
    gone = set(left_out)
    config.stash[sampling.SWEEPS] = [(x, [i for i in x if i not in gone]) for x in sampling.sweeps(items)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in gone]
    # start with the longest file: at the end the other processes would wait for it
    items.sort(key=lambda item: "test_notebooks" not in item.nodeid)
    if seed := config.getoption("--shuffle"):
        items.sort(key=lambda item: sampling.rank(f"{seed} {item.nodeid}"))
    for item in items:
        reason = _why_skipped(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives each process consecutive tests, so that it computes once what a file's tests share; idle processes steal
    tests."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_finish() -> None:
    """Exempts modules and tests from the cyclic garbage collector, which then runs rarely: on the objects that tracing
    makes, it took an eighth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def _left_out(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests that this run leaves out."""
    found = []
    if backends.backend() == "cuda":
        found = [x for x in items if not (x.get_closest_marker("kernels") or x.get_closest_marker("gpu"))]
    if not re.search(r"(?<!not )\bslow\b", config.getoption("markexpr")):
        found += [item for item in items if item.get_closest_marker("slow")]
        # a test named on the command line runs, sampled or not
        if not config.getoption("keyword") and not any("::" in argument for argument in config.args):
            found += sampling.left_out(items)
    return found


def _why_skipped(item: pytest.Item) -> str:
    if backends.backend() == "sim":
        return "needs a GPU: run with --backend cuda" if item.get_closest_marker("gpu") else ""
    only = item.get_closest_marker("sim_only")
    if only:
        return f"only in the simulator: {only.args[0]}"
    kernels = item.get_closest_marker("kernels")
    return backends.why_skipped(kernels.args) if kernels else ""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how many tests were skipped on a GPU, for each reason."""
    if backends.backend() == "cuda":
        reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
        for reason, count in sorted(reasons.items()):
            terminalreporter.write_line(f"{count} {reason}")


def _refuse(kernel: CompiledKernel) -> CompiledKernel:
    raise AssertionError(f"{kernel.name} was called with tensors of the CPU, but --backend cuda tests kernels on a GPU")


@pytest.fixture(autouse=True)
def _simulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fixture: kernels that tests of these folders call run in the simulator; with ``--backend cuda`` none may."""
    if backends.backend() == "cuda":
        with simulating(kernel=_refuse):
            yield
    elif not _SIMULATED.isdisjoint(request.path.relative_to(Path(__file__).parent).parts):
        with simulating():
            yield
    else:
        yield


@pytest.fixture(autouse=True)
def _forked_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixture: the harness's workers are forked, which is faster than starting them."""
    if backends.backend() == "sim" and request.path.parent.name in ("harness", "cheats"):
        monkeypatch.setattr(process, "subprocess", forked.SUBPROCESS)


@pytest.fixture
def simulated() -> Iterator[list[SimulatedLaunch]]:
    """Fixture for tests outside these folders: kernels run in the simulator. Gives the list of launches."""
    with simulating() as runs:
        yield runs


@pytest.fixture
def device() -> torch.device:
    """Fixture: the device for a test's own tensors, the CPU or the GPU."""
    return backends.device()
