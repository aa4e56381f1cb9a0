"""Changes of tensor maps by the device (PTX ISA, "tensormap.replace", "tensormap.cp_fenceproxy")."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.frontend.model import Imm, Instruction, Kernel
from cute_nvfp4.sim.frontend.opcodes import Mods, Op, opcode
from cute_nvfp4.sim.machine import access
from cute_nvfp4.sim.machine.access import Access
from cute_nvfp4.sim.tma.descriptor import ELEMTYPES, code_of

#: The parts of each field without an ordinal: (64-bit word of the map, first bit, width, first bit of the value).
_SCALAR = {
    "global_address": ((0, 0, 64, 0),),
    "rank": ((1, 4, 3, 0),),
    "interleave_layout": ((1, 11, 2, 0),),
    "swizzle_mode": ((1, 13, 2, 0),),
    "swizzle_atomicity": ((1, 19, 2, 0),),
    "fill_mode": ((1, 15, 1, 0),),
}
_CONSTANT = {"elemtype": len(ELEMTYPES), "interleave_layout": 3, "fill_mode": 2}
_CONSTANT |= dict.fromkeys(("swizzle_mode", "swizzle_atomicity"), 4)
_SPACES = {"shared::cta": "shared", "global": "global"}


def _dimension(field: str, ord_: int) -> tuple[tuple[int, int, int, int], ...]:
    """Returns the parts, as in ``_SCALAR``, that hold the value of ``field`` for dimension ``ord_``."""
    if field == "box_dim":
        return ((6, 56, 8, 0),) if ord_ == 0 else ((7, 8 * (ord_ - 1), 8, 0),)
    if field == "global_dim":
        return ((4 + ord_ // 2, 32 * (ord_ % 2), 32, 0),)
    if field == "element_stride":
        return ((6, 32 + 3 * ord_, 3, 0),)
    word, bit = ((1, 32), (2, 0), (2, 32), (3, 0))[ord_]
    return ((word, bit, 32, 4), (3, 32 + 4 * ord_, 4, 36))


@opcode("tensormap")
def _tensormap(i: Instruction, m: Mods, k: Kernel) -> Op:
    if m.take("cp_fenceproxy"):
        return _copy(i, m)
    m.words("replace", "tile")
    field = m.take(*_SCALAR, "elemtype", "box_dim", "global_dim", "element_stride", "global_stride", required=True)
    space = _SPACES.get(m.take(*_SPACES), "generic")
    m.take("b1024", required=True)
    wide = field in ("global_address", "global_stride")
    t = m.type("b64" if wide else "b32")
    by_ordinal = field in ("box_dim", "global_dim", "element_stride", "global_stride")
    parts, less = _SCALAR.get(field, ()), 0
    if by_ordinal:
        ord_ = i.operands[1] if len(i.operands) == 3 else None
        if not isinstance(ord_, Imm) or not 0 <= ord_.value < (4 if field == "global_stride" else 5):
            raise m.refuse(f"the ordinal of .{field} must be a constant in range")
        # The map holds sizes and element strides minus 1.
        parts, less = _dimension(field, ord_.value), int(field != "global_stride")
    value = i.operands[-1]
    if field in _CONSTANT and (not isinstance(value, Imm) or not 0 <= value.value < _CONSTANT[field]):
        raise m.refuse(f".{field} takes a constant below {_CONSTANT[field]} that is known here")
    change = _element_type(value.value) if field == "elemtype" else None
    read, write = (Access(i, space, 8, 1, kind) for kind in ("load", "store"))
    align = Access(i, space, 128, 1, "store")

    def fn(g, mask, addr, off, *given):
        if space != "generic":
            access.locate(g, align, space, mask, addr, off)
        lanes = g.lanes(mask)
        if not change:
            new = np.broadcast_to(given[-1], (g.n, 32)).astype(np.uint64) - np.uint64(less)
        fields = change or [(word, bit, width, new >> np.uint64(first)) for word, bit, width, first in parts]
        for word, bit, width, bits_ in fields:
            old = access.load(g, read, lanes, addr, off + 8 * word)
            kept = np.uint64(((1 << width) - 1) << bit)
            put = np.asarray(bits_, np.uint64) << np.uint64(bit) & kept
            access.store(g, write, lanes, addr, off + 8 * word, (old & ~kept | put,))

    src = ("addr", *(("static",) if by_ordinal else ()), "static" if field in _CONSTANT and change else t)
    return Op(fn, (), src, "tensormap", context=True)


def _element_type(index: int) -> list[tuple[int, int, int, int]]:
    code = code_of(ELEMTYPES[index])
    return [(1, 7, 4, code & 15), (1, 16, 1, code >> 4)]


def _copy(i: Instruction, m: Mods) -> Op:
    """Builds tensormap.cp_fenceproxy, which copies 128 bytes from shared to global memory and makes them visible to the
    tensormap proxy."""
    m.words("global", "shared::cta", "tensormap::generic")
    m.take("release", required=True)
    m.take("cta", "cluster", "gpu", "sys", required=True)
    m.words("sync", "aligned")
    size = i.operands[2] if len(i.operands) > 2 else None
    if not isinstance(size, Imm) or size.value != 128:
        raise m.refuse("the size must be 128")
    read, write = Access(i, "shared", 8, 16, "load"), Access(i, "global", 8, 16, "store")

    def fn(g, mask, dst, dst_off, src, src_off):
        # The warp makes one copy. Any lane may read, so all lanes do; the first lane writes for the warp.
        lanes = g.lanes()
        first = np.zeros((g.n, 32), bool)
        first[np.arange(g.n), lanes.argmax(axis=1)] = True
        access.store(g, write, first, dst, dst_off, access.load(g, read, lanes, src, src_off))
        # No lane continues before all lanes have executed the instruction (.sync).
        g.wave.events.warp_synced(g, None, None)

    return Op(fn, (), ("addr", "addr", "static"), "tensormap", context=True, converge=-1)
