"""Fences (PTX ISA, "membar / fence", "fence.proxy"). Execution is sequentially consistent, so a fence changes no value;
it only informs the checks."""

from __future__ import annotations

from cute_nvfp4.sim.frontend.model import Imm, Instruction, Kernel
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, opcode

_SCOPES = ("cta", "cluster", "gpu", "sys")


@opcode("fence", "membar")
def _fence(i: Instruction, m: Mods, k: Kernel) -> Op:
    if m.flag("proxy"):
        return _proxy(i, m)
    if i.base == "membar":
        m.take("cta", "gl", "sys", required=True)
        return _plain(i)
    if m.flag("mbarrier_init"):
        m.words("release", "cluster")
        return _plain(i)
    order = m.take("sc", "acq_rel", "acquire", "release", default="acq_rel")
    if order == "acquire":
        m.flag("sync_restrict::shared::cluster")
    elif order == "release":
        m.flag("sync_restrict::shared::cta")
    m.take(*_SCOPES, required=True)
    return _plain(i)


def _proxy(i: Instruction, m: Mods) -> Op:
    kind = m.take("tensormap::generic", "async::generic", "alias", "async", required=True)
    if kind == "async":
        m.take("global", "shared::cta", "shared::cluster")
    elif kind == "async::generic":
        order = m.take("acquire", "release", required=True)
        m.take("sync_restrict::shared::cluster" if order == "acquire" else "sync_restrict::shared::cta", required=True)
        m.take("cluster", required=True)
    elif kind == "tensormap::generic":
        order = m.take("acquire", "release", required=True)
        m.take(*_SCOPES, required=True)
        if order == "acquire":
            size = i.operands[-1]
            if not isinstance(size, Imm) or size.value != 128:
                raise m.refuse("a tensor map has 128 bytes")
            return _plain(i, ("addr", "static"))
    return _plain(i)


def _plain(i: Instruction, src: tuple = ()) -> Op:
    def fn(g, mask, *address):
        g.wave.events.fenced(g, i, mask, *address)

    return Op(fn, (), src, "fence", context=True)
