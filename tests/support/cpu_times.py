"""Measures CPU times of tests: ``pytest --cpu-times FILE`` adds a line for each test to ``FILE``.

A time is the user and system seconds of a test's process and of all that it started, including those that still run.
``python -m tests.support.cpu_times FILE`` prints the sum, and the most expensive files and tests.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

COLLECTION = "collection of tests, and imports"
_TICK = os.sysconf("SC_CLK_TCK")


def spent() -> float:
    """CPU seconds of this process and of its descendants, once they are waited for or while they run."""
    used = os.times()
    return sum(used[:4]) + sum(_of(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(x) for x in path.read_text().split()]
        except OSError:
            continue
        for child in children:
            yield child
            yield from _descendants(child)


def _of(pid: int) -> float:
    """CPU seconds of a running process and of the children that it has waited for; 0 if it has just ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICK


class CpuTimes:
    """The pytest plugin that writes the lines."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _note(self, seconds: float, what: str) -> None:
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(f"{max(seconds, 0.0):.3f}\t{what}\n")

    def pytest_collection_finish(self) -> None:
        """Writes the time of collection, before the first test."""
        self._note(spent(), COLLECTION)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measures a test with its fixtures."""
        before = spent()
        result = yield
        self._note(spent() - before, item.nodeid)
        return result


def report(lines: list[str], most: int = 25) -> str:
    """The sum, and the most expensive files and tests."""
    tests = Counter[str]()
    for line in lines:
        seconds, _, what = line.rstrip("\n").partition("\t")
        tests[what] += float(seconds)
    files = Counter[str]()
    for what, seconds in tests.items():
        files[what.split("::")[0]] += seconds
    shown = [f"{sum(tests.values()) / 60:.1f} CPU minutes in {len(tests)} rows"]
    for found in (files, tests):
        shown += ["", *(f"{seconds:8.1f} s  {what}" for what, seconds in found.most_common(most))]
    return "\n".join(shown)


if __name__ == "__main__":
    print(report(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()))
