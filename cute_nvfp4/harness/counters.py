"""What the simulator counted during a call, summed over its launches."""

from __future__ import annotations

from collections.abc import Iterable

from ..runtime.simulating import SimulatedLaunch


def totals(runs: Iterable[SimulatedLaunch]) -> dict[str, int]:
    """Totals over simulated launches; empty if nothing ran in the simulator.

    ``instructions`` are issued by warps; requests and sectors (32 bytes) are those of global memory, where the
    simulator was asked to count them.
    """
    found: dict[str, int] = {}
    for run in runs:
        result = run.result
        counted = {"launches": 1, "warps": result.warps, "instructions": result.instructions}
        for access in result.memory:
            if access.space == "global":
                for name in ("requests", "sectors"):
                    key = f"{access.kind}_{name}"
                    counted[key] = counted.get(key, 0) + getattr(access, name)
        for name, value in counted.items():
            found[name] = found.get(name, 0) + int(value)
    return found
