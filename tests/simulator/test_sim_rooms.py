"""The rooms of the simulator: imports run one way, and none leaves it but for the errors of the package."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import cute_nvfp4.sim

PACKAGE = "cute_nvfp4"
HERE = Path(cute_nvfp4.sim.__file__).parent
ORDER = (
    *("errors", "numerics", "frontend", "machine", "tma", "tcgen05", "wgmma", "isa", "program", "host"),
    *("checks", "observe", "equivalence", "clock", "profile", "runner", "execution", "outcome", "session"),
)
"""Rooms and files at the top, each above all that stand before it."""


def modules() -> dict[str, Path]:
    """Name inside ``sim`` to file; a package is named like its folder."""
    out = {}
    for path in HERE.rglob("*.py"):
        parts = path.relative_to(HERE).with_suffix("").parts
        out[".".join(p for p in parts if p != "__init__")] = path
    return out


def imports(path: Path) -> list[str]:
    """Full names of what a file imports from this package, inside functions and type checks too."""
    out = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out += [alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            if node.module.split(".")[0] == PACKAGE:
                out += [f"{node.module}.{alias.name}" for alias in node.names]
    return out


def inside() -> dict[str, set[str]]:
    """Module to the modules of ``sim`` that it imports."""
    known, prefix = modules(), f"{PACKAGE}.sim."
    out: dict[str, set[str]] = {name: set() for name in known if name}
    for name in out:
        for full in imports(known[name]):
            if full.startswith(prefix):
                short = full.removeprefix(prefix)
                out[name].add(short if short in known else short.rpartition(".")[0])
    return out


def test_nothing_of_the_package_but_errors() -> None:
    outside = [
        f"{name}: {full}"
        for name, path in modules().items()
        for full in imports(path)
        if not full.startswith((f"{PACKAGE}.sim.", f"{PACKAGE}.errors.", f"{PACKAGE}.dsl_version."))
    ]
    assert not outside


def test_imports_run_one_way() -> None:
    rank = {room: k for k, room in enumerate(ORDER)}
    upward = [
        f"{name} imports {other}"
        for name, others in inside().items()
        for other in others
        if rank[other.split(".")[0]] > rank[name.split(".")[0]]
    ]
    assert not upward


def test_no_circles() -> None:
    graph = inside()
    # A package imports its modules; that they lie in it is no import.
    TopologicalSorter({name: others - {name} for name, others in graph.items()}).prepare()


def test_the_figures_of_gpus_agree() -> None:
    from cute_nvfp4.sim.host.device import DEFAULT_ARCH, DEVICES
    from cute_nvfp4.target import ARCHITECTURES
    from cute_nvfp4.target import DEFAULT_ARCH as PACKAGE_DEFAULT

    assert DEFAULT_ARCH == PACKAGE_DEFAULT
    for arch, device in DEVICES.items():
        other = ARCHITECTURES[arch]
        assert (device.capability, device.sm_count) == (other.capability, other.sm_count)
        assert device.shared_bytes == other.shared_bytes and device.model in other.example.split("/")
