"""What the clock knows of a GPU: one file a GPU (``machines/*.yml``), each figure with its source."""

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
"""The source of a figure that is not the file's."""
FOLDER = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Machine:
    """One GPU. Times are cycles of an SM, rates bytes a cycle; ``figures`` has every number by its name in the file,
    ``sources`` where it comes from."""

    name: str
    arch: str
    figures: Mapping[str, float]
    sources: Mapping[str, str] = field(repr=False)

    def __getitem__(self, name: str) -> float:
        if name not in self.figures:
            raise ClockError.of(f"the machine {self.name}", got="no figure", expected=name, hint="measure it first")
        return self.figures[name]

    def first(self, *names: str) -> float:
        """The first of these figures that the file has."""
        return self[next((name for name in names if name in self.figures), names[-1])]

    @property
    def sms(self) -> int:
        return int(self["sms"])

    def microseconds(self, cycles: float) -> float:
        return cycles / self["clock_mhz"]

    def changed(self, **figures: float) -> Machine:
        """This machine with other figures; dots in names are written as two underscores."""
        new = {name.replace("__", "."): value for name, value in figures.items()}
        return self.with_figures(new)

    def with_figures(self, new: Mapping[str, float]) -> Machine:
        """This machine with other figures, by their names in the file."""
        unknown = set(new) - set(self.figures)
        if unknown:
            raise ClockError.of("the figures", got=sorted(unknown), expected=f"figures of {self.name}")
        sources = {**self.sources, **dict.fromkeys(new, GIVEN)}
        return replace(self, figures={**self.figures, **new}, sources=sources)


@functools.cache
def machine(name: str) -> Machine:
    """The machine of a file; raises ``ClockError`` for a name that has none, or a figure without a source."""
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
    """The machine that stands for each PTX target, of those that have one."""
    return {machine(p.stem).arch: p.stem for p in sorted(FOLDER.glob("*.yml"))}


def clock_of(arch: str) -> str:
    """The machine that stands for a PTX target; raises ``ClockError`` where there is none."""
    known = clocks()
    if arch not in known:
        raise ClockError.of("the clock", got=f"PTX for {arch}", expected=f"one of {', '.join(known)}")
    return known[arch]
