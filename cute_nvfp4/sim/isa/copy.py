"""cp.async of the non-bulk kind (PTX ISA, "cp.async").

The copy is done at once, so commit and wait groups have nothing to do: a kernel that forgets to wait is not caught by
this half of the simulator.
"""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim import access
from cute_nvfp4.sim.access import Access
from cute_nvfp4.sim.isa.table import Mods, Op, opcode
from cute_nvfp4.sim.model import Imm, Instruction, Kernel


@opcode("cp")
def _cp(i: Instruction, m: Mods, k: Kernel) -> Op:
    m.take("async", required=True)
    what = m.take("commit_group", "wait_group", "wait_all")
    if what:
        src = ("u32",) if what == "wait_group" else ()
        return Op(lambda g, mask, *n: None, (), src, "copy", context=True)
    cache = m.take("ca", "cg")
    if not cache:
        raise m.refuse("only cp.async.ca and .cg are modelled; bulk and tensor copies belong to the asynchronous half")
    m.take("shared", "shared::cta", required=True)
    m.take("global", required=True)
    hint = m.flag("L2::cache_hint")
    m.take("L2::64B", "L2::128B", "L2::256B")
    size = i.operands[2] if len(i.operands) > 2 else None
    if not isinstance(size, Imm) or size.value not in (4, 8, 16) or (cache == "cg" and size.value != 16):
        raise m.refuse("cp-size must be 4, 8 or 16 (16 for .cg)")
    words = size.value // 4
    source = Access(i, "global", 4, words, "load", (cache,))
    target = Access(i, "shared", 4, words, "store")
    partial = len(i.operands) == 4 + hint

    def fn(g, mask, dst, dst_off, src, src_off, *rest):
        if not partial:
            data = access.load(g, source, mask, src, src_off)
            data = data if words > 1 else (data,)
        else:
            data = _partial(g, mask, src, src_off, rest[0])
        access.store(g, target, mask, dst, dst_off, data)

    def _partial(g, mask, src, src_off, count):
        """Reads only the first ``count`` bytes of each lane; the rest are zeros."""
        lanes = g.lanes() if mask is None else np.broadcast_to(mask, (g.n, 32))
        count = np.broadcast_to(count, (g.n, 32))
        byte = Access(i, "global", 1, 1, "load", (cache,))
        out = [np.zeros((g.n, 32), "u4") for _ in range(words)]
        for b in range(4 * words):
            wanted = lanes & (count > b)
            if wanted.any():
                got = np.broadcast_to(access.load(g, byte, wanted, src, src_off + b), (g.n, 32))
                out[b // 4] |= np.where(wanted, got, 0).astype("u4") << np.uint32(8 * (b % 4))
        return tuple(out)

    src = ("addr", "addr", "static", *(("u32",) if partial else ()), *(("b64",) if hint else ()))
    return Op(fn, (), src, "copy", context=True)
