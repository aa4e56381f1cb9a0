"""Python processes that a program in a session starts (pools by spawn or fork-server, subprocesses) are in one too.

The environment says so: ``CUTE_NVFP4_SESSION`` describes the session, and the folder ``child`` is first on
``PYTHONPATH``, whose ``sitecustomize`` Python loads when it starts. A forked process needs none of it: it has the
session's memory. Launches of a child stay its own; a hazard is an error there.
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
    """Tells the children to come: ``opener`` is the module whose ``simulated_gpu`` opens their session."""
    here = Path(__file__).resolve().parent
    paths = [str(here / "child"), str(here.parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    told = {"module": opener, "arch": arch, "schedule": str(options.get("schedule") or "")}
    told |= {name: options[name] for name in _INHERITED if name in options}
    patches.item(os.environ, "PYTHONPATH", os.pathsep.join(dict.fromkeys(filter(None, paths))))
    patches.item(os.environ, VARIABLE, json.dumps(told))


def enter() -> None:
    """Opens the session that the environment describes, for the life of this process."""
    told = json.loads(os.environ[VARIABLE])
    opener = importlib.import_module(told.pop("module"))
    session = opener.simulated_gpu(told.pop("arch"), schedule=Schedule.parse(told.pop("schedule")), **told)
    _entered.append(session)  # it would end with its context manager
    session.__enter__()
