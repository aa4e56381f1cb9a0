"""Scopes: which threads an operation is strong for (PTX ISA, "Scope", "Morally Strong Operations").

Two operations are morally strong only if "each operation specifies a scope that includes the thread executing the
other operation"; releases and acquires synchronise, and strong accesses do not race, only where they are.
"""

from __future__ import annotations

from cute_nvfp4.sim.frontend.model import Instruction

CTA, CLUSTER, GPU = 1, 2, 3
"""Each includes those before. ``.sys`` is ``GPU`` here, for a launch has one."""
_OF = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "gl": GPU, "sys": GPU, "volatile": GPU, "mmio": GPU}


def written_scope(i: Instruction) -> int:
    """The scope as written, 0 for none. ``.volatile`` and ``.mmio`` are ``.sys`` (PTX ISA, "ld", "st")."""
    return next((_OF[m] for m in i.mods if m in _OF), 0)


def scope_of(i: Instruction) -> int:
    """The scope of a load, a store, an atomic or a fence; atomics without one have ``.gpu`` (PTX ISA, "atom")."""
    return written_scope(i) or GPU
