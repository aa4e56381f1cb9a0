"""The tables of docs/checks.md, from verdicts of runs with ``--json``: ``python -m tests.sim.mutation.table FILE``."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "checks.md"
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"
_LAST = ("harmless", "known to pass", "NOT NOTICED")
_SAID = {
    "harmless": "*not noticed, proved harmless*",
    "known to pass": "*not noticed, known to pass*",
    "NOT NOTICED": "*not noticed, unexplained*",
}


def tally(kernel: dict) -> Counter[str]:
    """How many mutants each verdict has."""
    return Counter(v["by"] or v["survives"] or "NOT NOTICED" for v in kernel["verdicts"])


def table(kernels: dict[str, dict]) -> list[str]:
    """A column a kernel, a row a verdict."""
    found = {name: tally(kernel) for name, kernel in kernels.items()}
    everything = sum(found.values(), Counter())
    rows = sorted(set(everything) - set(_LAST), key=lambda what: (what.islower(), -everything[what], what))
    lines = [["noticed as", *kernels], ["---"] * (len(kernels) + 1)]
    lines += [["mutants there are", *(str(k["mutants"]) for k in kernels.values())]]
    lines += [["**mutants run**", *(str(len(k["verdicts"])) for k in kernels.values())]]
    for what in (*rows, *_LAST):
        name = _SAID.get(what) or (f"`{what}`" if what[0].isupper() else what)
        lines.append([name, *(str(tallied[what]) for tallied in found.values())])
    return ["| " + " | ".join(line) + " |" for line in lines]


def section(found: dict[str, dict]) -> str:
    """Both tables, and what was run, when, and for how long."""
    shared = [name for name in found if not name.startswith("gemm ")]
    parts = [
        table({name: found[name] for name in names})
        for names in (shared, [n for n in found if n not in shared])
        if names
    ]
    verdicts = [v for kernel in found.values() for v in kernel["verdicts"]]
    days = sorted({kernel["day"] for kernel in found.values()})
    said = (
        f"Run on {days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}: "
        f"{len(verdicts)} of {sum(kernel['mutants'] for kernel in found.values())}."
    )
    return "\n\n".join([said, *("\n".join(lines) for lines in parts)])


def write(file: Path, page: Path = PAGE) -> None:
    """Replaces the tables of the page by those of the verdicts in ``file``."""
    text = page.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    made = f"{BEGIN}\n{section(json.loads(file.read_text()))}\n{END}"
    page.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: made, text, flags=re.DOTALL))


def main(arguments: Sequence[str]) -> int:
    write(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
