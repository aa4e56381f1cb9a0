"""Says whether an exercise of the course is solved: what the simulator found and counted decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOLVED, NOT_YET = "Solved", "Not yet"


def judge(
    run: Any = None,
    right: Callable[[], Any] | None = None,
    conflicts: int | None = None,
    useful: float | None = None,
    instructions: int | None = None,
) -> None:
    """Prints ``Solved`` or what is missing.

    run: of a ``%%cute`` cell: it must have no hazard. right: whether the numbers are right; it is asked only where the
    cell came to its end. conflicts, instructions: at most so many passes lost to bank conflicts, warp instructions.
    useful: the least share of the bytes of global sectors that lanes must have asked for.
    """
    missing = []
    if run is not None and run.hazards:
        missing.append(f"the simulator found {', '.join(run.hazards)}")
    elif right is not None and not right():
        missing.append("the result is not what it should be")
    if run is not None and not run.hazards:
        r = run.result
        plain = [m for m in r.memory if m.space == "global" and m.sectors]
        share = sum(m.bytes for m in plain) / (32 * sum(m.sectors for m in plain)) if plain else 1.0
        if conflicts is not None and r.bank_conflicts > conflicts:
            missing.append(f"{r.bank_conflicts} passes are lost to bank conflicts, {conflicts} would do")
        if useful is not None and share < useful:
            missing.append(f"{share:.0%} of the sectors' bytes are asked for, {useful:.0%} would do")
        if instructions is not None and r.instructions > instructions:
            missing.append(f"{r.instructions} warp instructions, {instructions} would do")
    print(f"{NOT_YET}: {'; '.join(missing)}." if missing else f"{SOLVED}.")
