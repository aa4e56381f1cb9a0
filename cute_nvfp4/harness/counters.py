"""What the simulator counted during a call, summed over its launches."""

from __future__ import annotations

import sys
from typing import Any


def _launchers() -> list[Any]:
    module = sys.modules.get("cute_nvfp4.runtime.launch")  # absent unless the submission ran one of our kernels
    return [] if module is None else [entry[1] for entry in module._launchers.values()]


def reset() -> None:
    """Forgets the results of earlier calls."""
    for launcher in _launchers():
        if hasattr(launcher, "last_results"):
            launcher.last_results = []


def collect() -> dict[str, int]:
    """Totals over the simulated launches since :func:`reset`; empty if nothing ran in the simulator.

    ``instructions`` are issued by warps; requests and sectors (32 bytes) are those of global memory, where the
    simulator was asked to count them.
    """
    totals: dict[str, int] = {}
    for launcher in _launchers():
        for result in getattr(launcher, "last_results", []):
            counted = {"launches": 1, "warps": result.warps, "instructions": result.instructions}
            for access in result.memory:
                if access.space == "global":
                    for name in ("requests", "sectors"):
                        key = f"{access.kind}_{name}"
                        counted[key] = counted.get(key, 0) + getattr(access, name)
            for name, value in counted.items():
                totals[name] = totals.get(name, 0) + int(value)
    return totals
