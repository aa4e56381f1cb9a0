"""What a kind of cases is: how its cases are made, and how one is run. A case is a record; what raises is a failure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from tests.long import depends

Once = Callable[[], str | None]
"""Runs a case once, judges it, and may say what there is to note."""


class Gone(Exception):
    """The case is one of a kernel that has changed: it is no more."""


@dataclass(frozen=True)
class Family:
    """Cases at random, ``draw(generator, architecture)``, of which ``goal`` are enough; or all there are,
    ``every(architecture, part)``.

    prepare: makes the operands of a case. weight: how often it comes. schedules: how many each case runs under. parts:
    in which an architecture's cases are listed. identity: what a case stands for, where two may stand for the same.
    ptx: of a case that changes it, before the change. rooms: of kernels that its cases execute, below ``kernels``; or a
    file.
    """

    name: str
    case: type
    prepare: Callable[[Any], Once]
    draw: Callable[[np.random.Generator, str], Any] | None = None
    every: Callable[[str, str], Sequence[Any]] | None = None
    archs: Sequence[str] = ("sm_100a",)
    weight: int = 1
    schedules: int = 1
    goal: int = 0
    parts: Callable[[str], Sequence[str]] = lambda arch: ("",)
    identity: Callable[[Any], str] | None = None
    ptx: Callable[[Any], str] | None = None
    rooms: tuple[str, ...] = ()

    def state(self, arch: str) -> tuple[str, str]:
        """Fingerprints of what a case depends on: of the simulator, and of what else of the package it executes."""
        return depends.simulator(), depends.sources(self.rooms, arch)

    def parse(self, text: str) -> Any:
        return _adapter(self.case).validate_json(text)

    @staticmethod
    def text(case: Any) -> str:
        """The case as one line of JSON, without what is as it is by default."""
        return json.dumps(_changed(case), separators=(",", ":"))

    def part_of(self, text: str) -> str:
        """The part of a case of a family that has some: its first field."""
        return str(next(iter(json.loads(text).values())))

    def stands_for(self, text: str) -> str:
        """What a case is one of: the same for two cases of which one is enough."""
        return text if self.identity is None else self.identity(self.parse(text))


@cache
def _adapter(case: type) -> TypeAdapter:
    """What reads cases: making one takes far longer than to read with it."""
    return TypeAdapter(case)


def _changed(case: Any) -> Any:
    made = asdict(case)
    for name, field in type(case).__dataclass_fields__.items():
        value = getattr(case, name)
        if hasattr(value, "__dataclass_fields__"):
            made[name] = _changed(value)
        elif value == field.default:
            del made[name]
    return made
