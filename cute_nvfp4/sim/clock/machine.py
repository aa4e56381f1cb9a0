"""The clock's figures of each GPU, from a file for each (``machines/*.yml``). Each figure has a source."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from cute_nvfp4.sim.errors import ClockError

GIVEN = "given by the caller"
"""The source of a figure that the caller has changed."""
FOLDER = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Machine:
    """The figures of one GPU. Times are in cycles of an SM, rates in bytes a cycle. ``figures`` has their values, and
    ``sources`` where they come from, by name: "section.key" of the file, or "key" alone for the section "gpu"."""

    name: str
    arch: str
    figures: Mapping[str, float]
    sources: Mapping[str, str] = field(repr=False)

    def __getitem__(self, name: str) -> float:
        if name not in self.figures:
            raise ClockError.of(f"the machine {self.name}", got="no figure", expected=name, hint="measure it first")
        return self.figures[name]

    def first(self, *names: str) -> float:
        """Returns the first of these figures that the machine has. Raises ``ClockError`` if it has none of them."""
        return self[next((name for name in names if name in self.figures), names[-1])]

    @property
    def sms(self) -> int:
        return int(self["sms"])

    def microseconds(self, cycles: float) -> float:
        return cycles / self["clock_mhz"]

    def changed(self, **figures: float) -> Machine:
        """Returns this machine with other figures. Names have two underscores for a dot: ``launch__empty_us=4.7``."""
        new = {name.replace("__", "."): value for name, value in figures.items()}
        return self.with_figures(new)

    def with_figures(self, new: Mapping[str, float]) -> Machine:
        """Returns this machine with other figures, by name. Raises ``ClockError`` for figures that it does not have."""
        unknown = set(new) - set(self.figures)
        if unknown:
            raise ClockError.of("the figures", got=sorted(unknown), expected=f"figures of {self.name}")
        sources = {**self.sources, **dict.fromkeys(new, GIVEN)}
        return replace(self, figures={**self.figures, **new}, sources=sources)


@functools.cache
def machine(name: str) -> Machine:
    """Returns the machine whose file is called ``name``. Raises ``ClockError`` if there is no such file, or if a figure
    names a source that the file does not list."""
    path = FOLDER / f"{name}.yml"
    if not re.fullmatch(r"\w+", name) or not path.exists():
        known = sorted(p.stem for p in FOLDER.glob("*.yml"))
        raise ClockError.of("the clock", got=repr(name), expected=f"one of {', '.join(known)}")
    data: dict[str, Any] = yaml.safe_load(path.read_text())
    figures, sources = {}, {}
    for section, entries in data["figures"].items():
        for key, (value, source) in entries.items():
            if source not in data["sources"]:
                raise ClockError.of(f"{path.name}: {key}", got=f"source {source!r}", expected="one of the sources")
            full = key if section == "gpu" else f"{section}.{key}"
            figures[full], sources[full] = float(value), data["sources"][source]
    return Machine(name, data["arch"], figures, sources)


def clocks() -> dict[str, str]:
    """Returns the machine's name for each PTX target that has one."""
    return {machine(p.stem).arch: p.stem for p in sorted(FOLDER.glob("*.yml"))}


def clock_of(arch: str) -> str:
    """Returns the machine's name for a PTX target. Raises ``ClockError`` if there is none."""
    known = clocks()
    if arch not in known:
        raise ClockError.of("the clock", got=f"PTX for {arch}", expected=f"one of {', '.join(known)}")
    return known[arch]
