"""A family is a kind of cases: how to make them, and how to run one. A case is a record; a case that raises has
failed."""

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
"""Runs and checks a case once; may return a note."""


class Gone(Exception):
    """The kernel of the case has changed, so that the case no longer exists."""


@dataclass(frozen=True)
class Family:
    """Random cases, ``draw(generator, architecture)``, of which ``goal`` are enough; or a full list,
    ``every(architecture, part)``.

    prepare: makes the operands of a case. weight: how often the family comes. schedules: how many each case runs under.
    parts: the parts in which an architecture's cases are listed.
    identity: what a case stands for; of two cases that stand for the same, one is enough.
    ptx: for a case that changes PTX, the PTX before the change.
    rooms: of kernels that its cases execute, below ``kernels``; or a file.
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
        """Fingerprints of what a case depends on: of the simulator, and of the other code of the package that it
        executes."""
        return depends.simulator(), depends.sources(self.rooms, arch)

    def parse(self, text: str) -> Any:
        return _adapter(self.case).validate_json(text)

    @staticmethod
    def text(case: Any) -> str:
        """The case as one line of JSON, without fields that have their defaults."""
        return json.dumps(_changed(case), separators=(",", ":"))

    def part_of(self, text: str) -> str:
        """The part of a case, if the family has parts: the case's first field."""
        return str(next(iter(json.loads(text).values())))

    def stands_for(self, text: str) -> str:
        """What a case stands for; of two cases that stand for the same, one is enough."""
        return text if self.identity is None else self.identity(self.parse(text))


@cache
def _adapter(case: type) -> TypeAdapter:
    """The reader of cases; cached, because making one takes far longer than reading with it."""
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
