"""A simulated GPU for whole programs: it serves torch's device "cuda", the CUDA bindings, and launches of the CuTe DSL.

``with simulated_gpu("sm_100a") as session: …`` opens one for a block, ``cute-nvfp4 sim SCRIPT`` for a script.
"""

from __future__ import annotations

from cute_nvfp4.sim.outcome import outcome_of
from cute_nvfp4.sim.session.memory import Part
from cute_nvfp4.sim.session.session import LaunchRecord, Session, current_session, simulated_gpu

__all__ = ["LaunchRecord", "Part", "Session", "current_session", "outcome_of", "simulated_gpu"]
