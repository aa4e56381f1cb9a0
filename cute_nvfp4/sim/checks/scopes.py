"""Scopes: the threads for which an operation is strong (PTX ISA, "Scope", "Morally Strong Operations").

Two operations are morally strong only if "each operation specifies a scope that includes the thread executing the
other operation". Only then do a release and an acquire synchronise, and only then do strong accesses not race.
"""

from __future__ import annotations

from cute_nvfp4.sim.frontend.model import Instruction

CTA, CLUSTER, GPU = 1, 2, 3
"""The scopes, each wider than the one before. ``.sys`` counts as ``GPU``, because a launch runs on one GPU."""
_OF = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "gl": GPU, "sys": GPU, "volatile": GPU, "mmio": GPU}


def written_scope(i: Instruction) -> int:
    """Returns the written scope, 0 for none. ``.volatile`` and ``.mmio`` mean ``.sys`` (PTX ISA, "ld", "st")."""
    return next((_OF[m] for m in i.mods if m in _OF), 0)


def scope_of(i: Instruction) -> int:
    """Returns the scope of a load, store, atomic or fence: ``.gpu`` if none is written (PTX ISA, "atom")."""
    return written_scope(i) or GPU
