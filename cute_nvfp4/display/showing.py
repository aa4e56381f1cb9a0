"""``show``: draws an object of the package or of CuTe; and the tables of the classes that it can draw."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import OperandTypeError
from .svg import Page, Picture

ROOT = __name__.partition(".")[0]
SHOWN = {
    "sim.observe.result.Result": "counters.result",
    "sim.observe.timing.Timing": "times.timing",
    "sim.observe.trace.Trace": "timelines.of_trace",
    "sim.observe.barriers.Barriers": "pipelines.of_barriers",
    "sim.checks.findings.Finding": "hazards.finding",
    "errors.SimError": "hazards.error",
    "runtime.cache.CompiledKernel": "kernels.compiled",
    "runtime.simulating.SimulatedLaunch": "kernels.launch",
    "planning.gemm_problem.Plan": "kernels.plan",
    "planning.packed_problem.PackedPlan": "kernels.plan",
    "kernels.gemm.config.GemmConfig": "kernels.plan",
    "kernels.gemm.sm90.config.WgmmaConfig": "kernels.plan",
    "kernels.gemm.packed.stream_config.StreamConfig": "kernels.plan",
    "display.notation.StaticLayout": "layouts.layout",
    "display.magic.CellRun": "magic.cell",
}
"""Maps classes of this package to the functions of ``display`` that draw their objects."""
SEVERAL = {
    "sim.observe.timing.Timing": "times.rooflines",
    "kernels.gemm.config.GemmConfig": "memory.shared_memory",
}
"""Maps classes to the functions that draw a dict of several objects, by their names, together."""


def show(thing: Any, **options: Any) -> Picture | Page:
    """Returns the picture of ``thing``, which notebooks display and ``.write(path)`` writes as SVG or HTML.

    thing: a CuTe layout (its text, or a function that makes one: ``show(lambda: cute.make_layout((8, 4)))``); a
        ``Result``, ``Timing``, ``Trace`` or ``Barriers`` of a simulated launch; a launch of ``simulating``; the run of
        a ``%%cute`` cell; a hazard that stopped one; a compiled kernel; a plan; a tuple of pipeline edges; a dict of
        timings by name (for their rooflines) or of GEMM configurations (for their shared memory).
    options: arguments of the function that draws it, such as ``title``; for a layout ``element_bytes`` (colours are
        banks) and ``tile`` (a thread-value layout); for a trace ``cta``, ``begin`` and ``end``.

    Raises:
        OperandTypeError: no function draws objects of that type.
        OperandError: a layout is not static, or a trace is empty.
    """
    if isinstance(thing, (Picture, Page)):
        return thing
    drawer = _drawer(thing)
    if drawer is None:
        got = type(thing).__name__
        known = ", ".join(sorted({name.rpartition(".")[2] for name in SHOWN}))
        raise OperandTypeError.of("show", got=got, expected=f"a CuTe layout, or one of {known}")
    module, _, function = drawer.rpartition(".")
    return getattr(importlib.import_module(f".{module}", __package__), function)(thing, **options)


def _drawer(thing: Any) -> str | None:
    """Returns the module and function that draw ``thing``, or None."""
    if isinstance(thing, dict) and thing:
        return _of_class(SEVERAL, next(iter(thing.values())))
    if isinstance(thing, (tuple, list)) and thing and all(type(x).__name__ == "Edge" for x in thing):
        return "pipelines.of_plan"
    found = _of_class(SHOWN, thing)
    if found is None and (isinstance(thing, str) or callable(thing) or type(thing).__module__.startswith("cutlass")):
        return "layouts.layout"
    return found


def _of_class(table: dict[str, str], thing: Any) -> str | None:
    names = (f"{cls.__module__}.{cls.__qualname__}".removeprefix(f"{ROOT}.") for cls in type(thing).__mro__)
    return next((table[name] for name in names if name in table), None)
