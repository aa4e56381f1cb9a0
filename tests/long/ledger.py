"""What was run: a line of JSON for each case, and the summary of all of them."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "checks.md"
BEGIN, END = "<!-- long run: begin -->", "<!-- long run: end -->"


@dataclass(frozen=True)
class Record:
    """``outcome``: passed, failed, crashed or hung. ``kernels``: fingerprints of the PTX that ran, in order;
    ``simulator``: of the sources that ran it; ``runs``: schedules done; ``smallest``: the shrunk case of a failure."""

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

    @property
    def key(self) -> tuple[str, str, str]:
        return self.family, self.case, self.arch

    @property
    def command(self) -> str:
        """What repeats it."""
        return f"python -m tests.long --case {self.family} '{self.smallest or self.case}' --arch {self.arch}"


@dataclass
class Ledger:
    """The records of a file, the last of each case."""

    path: Path
    records: dict[tuple[str, str, str], Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            values = json.loads(line)
            record = Record(**values | {"kernels": tuple(values["kernels"])})
            self.records[record.key] = record

    def add(self, record: Record) -> None:
        self.records[record.key] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")

    def passed(self, key: tuple[str, str, str]) -> Record | None:
        """The record of a case that passed the last time."""
        found = self.records.get(key)
        return found if found is not None and found.outcome == "passed" else None

    def summary(self) -> str:
        """A table of all records, family by family."""
        if not self.records:
            return "Nothing was run."
        every = list(self.records.values())
        days, commits = sorted({r.day for r in every}), {r.commit for r in every}
        lines = [
            f"{len(every):,} cases from {days[0]} to {days[-1]}, on {len(commits)} commit(s) and "
            f"{len({r.simulator for r in every})} version(s) of the simulator, "
            f"in {sum(r.seconds for r in every) / 3600:.2f} hours of one process.",
            "",
            "| cases of | run | schedules each | kernels | passed | failed | crashed | hung |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for family in sorted({r.family for r in every}):
            mine = [r for r in every if r.family == family]
            ended = Counter(r.outcome for r in mine)
            kernels = {kernel for r in mine for kernel in r.kernels}
            counts = [len(mine), max(r.runs for r in mine), len(kernels)]
            counts += [ended[name] for name in ("passed", "failed", "crashed", "hung")]
            lines.append(f"| {family} | " + " | ".join(f"{n:,}" for n in counts) + " |")
        return "\n".join(lines)

    def write(self, page: Path = PAGE) -> None:
        """Replaces the summary in the page."""
        text = page.read_text()
        before, _, rest = text.partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{self.summary()}\n{END}{rest.partition(END)[2]}")


@cache
def commit() -> str:
    """The commit that is checked out, with ``+`` where files differ from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout.strip()
    return (head or "unknown") + ("+" if changed else "")


@cache
def simulator() -> str:
    """A fingerprint of the simulator's sources."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "cute_nvfp4" / "sim").rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]
