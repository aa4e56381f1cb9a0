"""Records what ran: a line of JSON for each case."""

from __future__ import annotations

import json
import lzma
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Record:
    """The record of a case.

    outcome: passed, failed, crashed, hung, or gone with the case's kernel. runs: schedules done.
    kernels: fingerprints of the PTX that ran, in order. simulator, sources: of the simulator, and of the other code of
        the package that the case depends on (``depends``).
    smallest: the shrunk case of a failure. note: a remark about a case that passed.
    """

    family: str
    case: str
    arch: str
    outcome: str
    seconds: float
    day: str
    commit: str
    simulator: str
    runs: int = 0
    kernels: tuple[str, ...] = ()
    error: str = ""
    smallest: str = ""
    note: str = ""
    sources: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.family, self.case, self.arch

    @property
    def command(self) -> str:
        """The command that repeats the case."""
        return f"python -m tests.long --case {self.family} '{self.smallest or self.case}' --arch {self.arch}"


@dataclass
class Ledger:
    """The records of a file, the last record of each case. A file that ends in ``.xz`` is compressed and read-only."""

    path: Path
    records: dict[tuple[str, str, str], Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in self._text().splitlines():
            values = json.loads(line)
            record = Record(**values | {"kernels": tuple(values["kernels"])})
            self.records[record.key] = record

    def _text(self) -> str:
        if not self.path.exists():
            return ""
        data = self.path.read_bytes()
        return (lzma.decompress(data) if self.path.suffix == ".xz" else data).decode()

    def add(self, *records: Record) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            for record in records:
                self.records[record.key] = record
                file.write(_line(record))

    def merge(self, other: Ledger) -> int:
        """Adds the records of ``other`` that ran later; returns how many."""
        new = [record for key, record in other.records.items() if self.records.get(key) != record]
        self.add(*new)
        return len(new)

    def passed(self, key: tuple[str, str, str]) -> Record | None:
        """The record of a case that passed the last time."""
        found = self.records.get(key)
        return found if found is not None and found.outcome == "passed" else None


def keep(records: Iterable[Record], path: Path) -> None:
    """Writes records in the order of their keys, compressed."""
    lines = map(_line, sorted(records, key=lambda record: record.key))
    path.write_bytes(lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))


def _line(record: Record) -> str:
    return json.dumps({name: getattr(record, name) for name in Record.__dataclass_fields__}) + "\n"


@cache
def commit() -> str:
    """The commit that is checked out, with ``+`` if files differ from it; empty without git."""
    if not (ROOT / ".git").exists():
        return ""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout.strip()
    return head + ("+" if changed else "")
