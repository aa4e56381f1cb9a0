"""Tensor copies: reads their operands and queues the copies (PTX ISA, "cp.async.bulk.tensor",
"cp.reduce.async.bulk.tensor", "cp.async.bulk.prefetch.tensor")."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.errors import Misaligned, OutOfBounds
from cute_nvfp4.sim.frontend.model import Address, Instruction, Vector
from cute_nvfp4.sim.frontend.opcodes import Mods, Op
from cute_nvfp4.sim.isa.bulk import offset_by, own_shared, pick, targets
from cute_nvfp4.sim.machine.engine import issue_rows
from cute_nvfp4.sim.machine.layout import WINDOW_MASK, WINDOW_SHIFT, WINDOWS
from cute_nvfp4.sim.tma import memory
from cute_nvfp4.sim.tma.descriptor import BYTES, InvalidTensorMap, TensorMap
from cute_nvfp4.sim.tma.reduce import TENSOR_TYPES
from cute_nvfp4.sim.tma.tensor_copy import TensorCopy, TensorLoad, TensorStore

MAP_ALIGN = 64


def tensor(i: Instruction, m: Mods, reduce: bool) -> Op:
    """Builds every instruction with ``bulk`` and ``tensor``; the modifiers up to ``bulk`` have been consumed."""
    prefetch = pick(m, "prefetch")
    pick(m, "tensor", required=True)
    rank = int(pick(m, "1d", "2d", "3d", "4d", "5d", required=True)[0])
    mode = pick(m, "tile", "im2col", "im2col_no_offs", "tile::gather4", "tile::scatter4") or "tile"
    hint = ("b64",) if pick(m, "L2::cache_hint") else ()
    if mode in ("tile::gather4", "tile::scatter4") and rank != 2:
        raise m.refuse(f".{mode} is for .2d")
    if mode.startswith("im2col") and rank < 3:
        raise m.refuse(f".{mode} needs .3d, .4d or .5d")
    coords = ("s32",) * (5 if mode.endswith("4") else rank)
    _split_coordinates(i, m)
    if prefetch:
        pick(m, "L2", required=True)
        pick(m, "global", required=True)
        info = (("b16",) * (rank - 2),) if mode == "im2col" else ()
        return Op(lambda g, mask, *rest: None, (), ("addr", coords, *info, *hint), "cache", context=True)
    if "mbarrier::complete_tx::bytes" in m.left:
        if reduce:
            raise m.refuse("a tensor reduction ends in a bulk group")
        return _load(i, m, rank, mode, coords, hint)
    return _store(i, m, rank, mode, coords, hint, reduce)


def _split_coordinates(i: Instruction, m: Mods) -> None:
    """Splits the operand ``[map, {x, y}]`` into two, ``[map]`` and ``{x, y}``."""
    out = []
    for o in i.operands:
        if isinstance(o, Address) and o.extra:
            if len(o.extra) != 1 or not isinstance(o.extra[0], Vector):
                raise m.refuse("[tensorMap, {coordinates}] is wanted")
            out += [Address(o.base, o.offset), o.extra[0]]
        else:
            out.append(o)
    i.operands = tuple(out)


def _load(i: Instruction, m: Mods, rank: int, mode: str, coords: tuple, hint: tuple) -> Op:
    if mode in ("im2col_no_offs", "tile::scatter4"):
        raise m.refuse(f".{mode} is for stores")
    _from_global(m)
    pick(m, "mbarrier::complete_tx::bytes", required=True)
    multicast = bool(pick(m, "multicast::cluster"))
    pair = pick(m, "cta_group::1", "cta_group::2") == "cta_group::2"
    if multicast and not m.cluster:
        raise m.refuse(".multicast::cluster needs a destination in .shared::cluster")
    info = (("b16",) * (rank - 2),) if mode == "im2col" else ()
    mask_type = ("b16",) if multicast else ()

    def fn(g, mask, dst, dst_off, desc, desc_off, at, bar, bar_off, *rest):
        rest = list(rest)
        steps = rest.pop(0) if info else ()
        chosen = (rest.pop(0),) if multicast else ()
        fixed = (offset_by(desc, desc_off), offset_by(dst, dst_off), offset_by(bar, bar_off))
        warps, lanes, values = issue_rows(g, mask, *fixed, *at, *steps, *chosen)
        maps, dst_, bar_, *more = values
        place = np.stack(more[: len(at)], axis=1).astype(np.int64)
        shift = np.stack(more[len(at) : len(at) + len(steps)], axis=1).astype(np.int64) if steps else None
        ctas = more[-1].astype(np.int64) if multicast else None
        for rows, tensor_map in read_maps(g.wave, i, warps, lanes, maps):
            copy = TensorLoad(i, g.wave, warps[rows], lanes[rows])
            _locate(copy, tensor_map, mode, rank, place[rows], None if shift is None else shift[rows])
            copy.aim(targets(copy, dst_[rows], bar_[rows], m.cluster, pair, None if ctas is None else ctas[rows]))
            g.wave.engines.submit(copy)

    return Op(fn, (), ("addr", "addr", coords, "addr", *info, *mask_type, *hint), "tensor copy", context=True)


def _from_global(m: Mods) -> None:
    """Consumes .dst.src, and sets ``m.cluster`` to whether the destination may be in another CTA."""
    if m.left.count("global") != 1:
        raise m.refuse("a tensor load reads .global")
    m.cluster = pick(m, "shared::cta", "shared::cluster", required=True) == "shared::cluster"
    pick(m, "global", required=True)


def _store(i: Instruction, m: Mods, rank: int, mode: str, coords: tuple, hint: tuple, reduce: bool) -> Op:
    if mode in ("im2col", "tile::gather4") or (reduce and mode == "tile::scatter4"):
        raise m.refuse(f".{mode} does not exist for this instruction")
    pick(m, "global", required=True)
    pick(m, "shared::cta", required=True)
    pick(m, "bulk_group", required=True)
    operation = pick(m, *TENSOR_TYPES, required=True) if reduce else ""

    def fn(g, mask, desc, desc_off, at, src, src_off, *_):
        fixed = (offset_by(desc, desc_off), offset_by(src, src_off))
        warps, lanes, values = issue_rows(g, mask, *fixed, *at, once=True)
        maps, source, *more = values
        place = np.stack(more, axis=1).astype(np.int64)
        for rows, tensor_map in read_maps(g.wave, i, warps, lanes, maps):
            copy = TensorStore(i, g.wave, warps[rows], lanes[rows])
            _locate(copy, tensor_map, mode, rank, place[rows], None)
            if operation and tensor_map.type not in TENSOR_TYPES[operation]:
                text = f".{operation} does not exist for elements of type {tensor_map.type}"
                raise InvalidTensorMap(copy.say(text, 0))
            copy.aim(own_shared(copy, source[rows]), operation)
            g.wave.engines.submit(copy)

    return Op(fn, (), ("addr", coords, "addr", *hint), "tensor copy", context=True)


def _locate(copy: TensorCopy, m: TensorMap, mode: str, rank: int, place: np.ndarray, shift: np.ndarray | None) -> None:
    """Sets the tensor map and coordinates of a copy. Raises ``InvalidTensorMap`` if the map does not fit."""
    if m.rank != rank:
        raise InvalidTensorMap(copy.say(f"the tensor map has {m.rank} dimensions, the instruction {rank}", 0))
    if mode.startswith("im2col") != (m.im2col is not None):
        kind = "im2col" if m.im2col else "tiled"
        raise InvalidTensorMap(copy.say(f"the tensor map is {kind}, the instruction .{mode}", 0))
    lines = None
    if mode.endswith("4"):
        if m.box[1] != 1:
            raise InvalidTensorMap(copy.say(f".{mode} wants a box of one row, the tensor map has {m.box[1]}", 0))
        place, lines = place[:, :1], place[:, 1:]
        place = np.concatenate([place, lines[:, :1]], axis=1)
    if mode == "im2col_no_offs":
        shift = np.zeros((len(place), rank - 2), np.int64)
    copy.locate(m, place, shift, lines)


def read_maps(wave, i: Instruction, warps: np.ndarray, lanes: np.ndarray, address: np.ndarray):
    """Returns [(rows, tensor map)] of the tensor maps at ``address`` (k,), which are read from memory now. Raises
    ``InvalidTensorMap``, ``Misaligned`` or ``OutOfBounds`` for an address without a valid tensor map."""
    address = address.astype(np.uint64)
    wave.events.map_used(i, warps, address)
    if len(address) == 1 or (address == address[0]).all():
        return [(np.arange(len(address)), _read_map(wave, i, int(warps[0]), int(lanes[0]), int(address[0])))]
    by_map: dict[TensorMap, list[int]] = {}
    for row, a in enumerate(address.tolist()):
        by_map.setdefault(_read_map(wave, i, int(warps[row]), int(lanes[row]), a), []).append(row)
    return [(np.array(rows), found) for found, rows in by_map.items()]


def _read_map(wave, i: Instruction, warp: int, lane: int, address: int) -> TensorMap:
    def say(what: str, row: int = 0) -> str:
        return f"{i.where()}: {what}; by {wave.thread(warp, lane)} in {wave.run.launch.title}"

    window, low = address >> WINDOW_SHIFT, address & WINDOW_MASK
    if low % MAP_ALIGN:
        raise Misaligned(say(f"the tensor map's address {low:#x} is not a multiple of {MAP_ALIGN}"))
    if window == WINDOWS["param"]:
        params = wave.run.params
        if low + BYTES > params.size:
            raise OutOfBounds(say(f"the tensor map is at byte {low} of {params.size} bytes of parameters"))
        raw = params.rows(1, 1)[1][low : low + BYTES]
    elif window:
        raise InvalidTensorMap(say("the tensor map is neither in global memory nor among the parameters"))
    else:
        raw = memory.bytes_at(wave.run.memory, low, BYTES, say)
    try:
        return TensorMap.decode(raw.tobytes())
    except InvalidTensorMap as error:
        raise InvalidTensorMap(say(str(error))) from None
