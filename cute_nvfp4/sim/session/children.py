"""Opens a session in every Python process that a program in a session starts: a pool's worker, or a subprocess.

Two environment variables tell the child. ``CUTE_NVFP4_SESSION`` describes the parent's session, and ``PYTHONPATH``
begins with the folder ``child``, whose ``sitecustomize`` Python loads at startup. A forked process does not need them,
because it has the parent's memory. The parent does not see the launches of a child, and a hazard is an error there.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

from cute_nvfp4.sim.machine.schedule import Schedule
from cute_nvfp4.sim.session.patches import Patches

VARIABLE = "CUTE_NVFP4_SESSION"
_INHERITED = ("checks", "step_limit", "allow")
_entered: list[Any] = []


def install(patches: Patches, opener: str, arch: str, options: dict[str, Any]) -> None:
    """Describes the session in the environment; ``opener`` is the module whose ``simulated_gpu`` opens the child's."""
    here = Path(__file__).resolve().parent
    paths = [str(here / "child"), str(here.parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    told = {"module": opener, "arch": arch, "schedule": str(options.get("schedule") or "")}
    told |= {name: options[name] for name in _INHERITED if name in options}
    patches.item(os.environ, "PYTHONPATH", os.pathsep.join(dict.fromkeys(filter(None, paths))))
    patches.item(os.environ, VARIABLE, json.dumps(told))


def enter() -> None:
    """Opens the session that the environment describes; it lasts as long as this process."""
    told = json.loads(os.environ[VARIABLE])
    opener = importlib.import_module(told.pop("module"))
    session = opener.simulated_gpu(told.pop("arch"), schedule=Schedule.parse(told.pop("schedule")), **told)
    _entered.append(session)  # a session ends when its context manager is collected
    session.__enter__()
