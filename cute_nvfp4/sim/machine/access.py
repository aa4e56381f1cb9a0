"""Loads and stores of a group of warps, as gathers and scatters on host memory.

Every access is checked for bounds and alignment. Lanes are served in the order (warp, lane), so of several stores to
one address the last lane's remains; the ISA leaves the winner open.

Common arguments: ``g`` is the group, ``a`` the access, ``mask`` the active lanes (booleans that broadcast to (n, 32),
or None for all lanes of the group), ``addr`` their addresses (broadcast to (n, 32)), ``off`` a byte offset to add.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_nvfp4.sim.errors import LaunchError, Misaligned, OutOfBounds, ReadOnlyWrite
from cute_nvfp4.sim.machine.cluster import OFFSET_MASK, RANK_SHIFT
from cute_nvfp4.sim.machine.global_memory import Region
from cute_nvfp4.sim.machine.launched import Run
from cute_nvfp4.sim.machine.layout import SHARED_BASE, WINDOW_MASK, WINDOW_SHIFT, WINDOWS
from cute_nvfp4.sim.machine.requests import Access
from cute_nvfp4.sim.machine.wave import Group

_SPACES = {0: "global", WINDOWS["shared"]: "cluster", WINDOWS["local"]: "local", WINDOWS["param"]: "param"}


def split_generic(g: Group, a: Access, mask, addr: np.ndarray, off: int):
    """Yields (space, mask, address in the space, offset) for each address window that a generic access touches.
    Raises ``OutOfBounds`` for an address in no window."""
    window = addr >> np.uint64(WINDOW_SHIFT)
    found = np.unique(window if mask is None else np.broadcast_to(window, (g.n, 32))[mask])
    for w in found.tolist():
        space = _SPACES.get(w)
        if space is None:
            raise OutOfBounds(f"{a.instruction.where()}: generic address {int(addr.flat[0]):#x} is in no window")
        if len(found) == 1:
            part = mask
        else:
            part = np.broadcast_to(window == np.uint64(w), (g.n, 32)) & g.lanes()
            part = part if mask is None else part & mask
        yield space, part, addr & np.uint64(WINDOW_MASK), off


def locate(g: Group, a: Access, space: str, mask, addr: np.ndarray, off: int):
    """Returns (host addresses, mask of the same shape or None for all, the region that holds all of them or None).

    Raises ``Misaligned``, ``OutOfBounds`` or ``ReadOnlyWrite``, but checks global addresses for bounds and writability
    only where one region holds them all: ``located`` checks the others.
    """
    if space in ("shared", "cluster"):
        host, inside = _shared(g, a, space, mask, addr, off)
    elif space == "param":
        host = g.wave.run.params.base + (addr.astype(np.int64) + off)
    elif space == "local":
        host = g.local_rows() + (addr.astype(np.int64) + off)
    else:
        host = addr.view(np.int64) if addr.dtype.itemsize == 8 else addr.astype(np.int64)
        host = host + off if off else host
    mask = reduce_mask(mask, host.shape)
    flat = host if mask is None else host[mask]
    total = a.total
    if total > 1 and int(np.bitwise_or.reduce(flat, axis=None)) & (total - 1):
        _misaligned(g, a, space, host, mask)
    if space in ("shared", "cluster"):
        _window_bounds(g, a, inside, 0, mask, g.wave.shared_bytes, SHARED_BASE, "shared memory")
        return host, mask, g.wave.shared
    if space == "param":
        _window_bounds(g, a, addr, off, mask, g.wave.run.params.size, 0, "the kernel's parameters")
        return host, mask, g.wave.run.params
    if space == "local":
        _window_bounds(g, a, addr, off, mask, g.wave.local_bytes, 0, "local memory")
        return host, mask, g.wave.local
    low, high = int(flat.min()), int(flat.max())
    region = g.wave.run.memory.find(low)
    if region is not None and high + total <= region.end:
        if a.kind != "load" and not region.writable:
            _read_only(g, a, region, host, mask)
        return host, mask, region
    return host, mask, None


def located(g: Group, a: Access, space: str, mask, addr: np.ndarray, off: int):
    """Returns what ``locate`` does, after the checks of bounds where no single region holds all addresses."""
    host, found, region = locate(g, a, space, mask, addr, off)
    if region is None:
        for _ in by_region(g, a, host, found, host.ravel() if found is None else host[found]):
            pass
    return host, found, region


def _shared(g: Group, a: Access, space: str, mask, addr: np.ndarray, off: int):
    """Returns (host addresses, offsets in the shared memory of the addressed CTA). Raises ``OutOfBounds`` for the rank
    of another CTA in a .shared::cta address, a rank beyond the cluster, or a CTA that has exited."""
    wave = g.wave
    address = addr.astype(np.int64) + off
    if wave.cluster_size == 1:
        return g.shared_rows() + address, address
    rank, offset = address >> RANK_SHIFT, address & OFFSET_MASK
    own = wave.rank_of_warp[g.warps][:, None]
    if (rank == own).all():
        return g.shared_rows() + offset, offset
    lanes = g.lanes() if mask is None else g.lanes() & np.broadcast_to(mask, (g.n, 32))
    limit = 0 if space == "shared" else wave.cluster_size
    bad = np.broadcast_to((rank != own) & ((rank >= limit) | (rank < 0)), (g.n, 32)) & lanes
    if bad.any():
        what = f"the address belongs to CTA rank {int(np.broadcast_to(rank, bad.shape)[bad][0])} of the cluster"
        hint = "use .shared::cluster to reach it" if space == "shared" else f"which has {wave.cluster_size} CTAs"
        raise OutOfBounds(_say(g, a, bad, f"{what}, {hint}"))
    first = (wave.cluster_of_cta[wave.cta_of_warp[g.warps]] * wave.cluster_size)[:, None]
    cta = np.where(lanes, first + rank, first + own)
    dead = lanes & ~wave.cta_alive[cta]
    if dead.any():
        gone = wave.cta_name(int(cta[dead][0]))
        raise OutOfBounds(_say(g, a, dead, f"shared memory of {gone}, which has exited"))
    return wave.shared.base - SHARED_BASE + cta * wave.shared_stride + offset, offset


def reduce_mask(mask, shape: tuple[int, ...]):
    """Reduces a mask to the ``shape`` of values that broadcast to it: a value is needed if any of its lanes is active.
    Returns None if all values are."""
    if mask is None or mask.shape == shape:
        return mask
    if mask.size == 1 or (len(shape) == 2 and shape == (1, 1)):
        return None
    out = mask
    for axis in (0, 1):
        if shape[axis] == 1 and out.shape[axis] > 1:
            out = out.any(axis=axis, keepdims=True)
    out = np.broadcast_to(out, shape)
    return None if out.all() else out


def load(g: Group, a: Access, mask, addr: np.ndarray, off: int) -> Any:
    """Loads; returns an array of unsigned integers of ``a.element`` bytes, or a tuple of ``a.count`` such arrays."""
    if a.space != "generic":
        return _load(g, a, a.space, mask, addr, off)
    parts = list(split_generic(g, a, mask, addr, off))
    if len(parts) == 1:
        return _load(g, a, *parts[0])
    total = None
    for space, part, at, o in parts:
        values = _load(g, a, space, part, at, o)
        values = values if isinstance(values, tuple) else (values,)
        fresh = tuple(np.where(part, v, 0).astype(v.dtype) for v in values)
        total = fresh if total is None else tuple(t | f for t, f in zip(total, fresh))
    return total if a.count > 1 else total[0]


def _load(g: Group, a: Access, space: str, mask, addr: np.ndarray, off: int) -> Any:
    if space == "param" and addr.size == 1:
        return _parameter(g.wave.run, a, int(addr.item()) + off)
    rows = load_rows(g, a, space, mask, addr, off)
    if a.count == 1:
        return rows
    return tuple(np.ascontiguousarray(rows[..., j]) for j in range(a.count))


def load_rows(g: Group, a: Access, space: str, mask, addr: np.ndarray, off: int) -> np.ndarray:
    """Loads into one array; if ``a.count`` is above 1, its last axis has the elements of each access."""
    host, m, region = located(g, a, space, mask, addr, off)
    g.wave.events.load(g, a, space, host, mask)
    flat = host if m is None else host[m]
    if region is not None:
        rows = _gather(region, a, flat)
    else:
        rows = np.empty(flat.shape if a.count == 1 else (*flat.shape, a.count), f"u{a.element}")
        for where, at in by_region(g, a, host, m, flat):
            rows[at] = _gather(where, a, flat[at])
    if m is not None:
        full = np.zeros(host.shape + rows.shape[1:], rows.dtype)
        full[m] = rows
        rows = full
    return rows


def _parameter(run: Run, a: Access, offset: int) -> Any:
    """Loads from a parameter address that is the same for all lanes, as (1, 1) arrays that the run caches."""
    key = (offset, a.element, a.count)
    if key not in run.parameters_read:
        raw = run.params.rows(1, 1)[1][max(offset, 0) : offset + a.total].copy()
        values = raw[: len(raw) // a.element * a.element].view(f"u{a.element}")
        if len(values) != a.count or offset % a.total:
            raise LaunchError(
                f"{a.instruction.where()}: bytes {offset}..{offset + a.total} of {run.params.size} parameter bytes"
            )
        arrays = tuple(v.reshape(1, 1) for v in values)
        run.parameters_read[key] = arrays if a.count > 1 else arrays[0]
    return run.parameters_read[key]


def _gather(region: Region, a: Access, flat: np.ndarray) -> np.ndarray:
    first, rows = region.rows(a.element, a.total)
    return rows.take((flat - first) >> (a.total.bit_length() - 1), axis=0)


def by_region(g: Group, a: Access, host, m, flat: np.ndarray):
    """Yields (region, which of ``flat`` lie in it); ``flat`` has the addresses ``host`` of the lanes in ``m``.
    Raises ``OutOfBounds`` for the first lane outside every region, ``ReadOnlyWrite`` for a write to a read-only one."""
    memory = g.wave.run.memory
    starts = np.array([r.base for r in memory.regions], np.int64)
    ends = np.array([r.end for r in memory.regions], np.int64)
    index = np.searchsorted(starts, flat, side="right") - 1
    bad = (index < 0) | (flat + a.total > (ends[index] if len(ends) else np.int64(0)))
    if bad.any():
        lanes, address = _first(g, host, m, bad)
        raise OutOfBounds(_say(g, a, lanes, memory.describe(address)))
    for k in np.unique(index).tolist():
        region = memory.regions[k]
        if a.kind != "load" and not region.writable:
            _read_only(g, a, region, host, m)
        yield region, index == k


def store(g: Group, a: Access, mask, addr: np.ndarray, off: int, values: tuple[np.ndarray, ...]) -> None:
    """Stores ``values``, ``a.count`` arrays; of two lanes at one address the later in (warp, lane) order wins."""
    parts = [(a.space, mask, addr, off)] if a.space != "generic" else split_generic(g, a, mask, addr, off)
    g.wave.effects += 1
    for space, part, at, o in parts:
        host, _, region = located(g, a, space, part, at, o)
        g.wave.events.store(g, a, space, host, part, values)
        shape = np.broadcast_shapes(host.shape, *(v.shape for v in values))
        m = reduce_mask(part, shape)
        flat = np.broadcast_to(host, shape)
        flat = flat.ravel() if m is None else flat[m]
        columns = [np.broadcast_to(v, shape) for v in values]
        columns = [c.ravel() if m is None else c[m] for c in columns]
        data = columns[0] if a.count == 1 else np.stack(columns, axis=-1)
        several = region is None
        for where, chosen in by_region(g, a, np.broadcast_to(host, shape), m, flat) if several else [(region, ...)]:
            first, rows = where.rows(a.element, a.total)
            rows[(flat[chosen] - first) >> (a.total.bit_length() - 1)] = data[chosen]


def _first(g: Group, host: np.ndarray, mask, bad_flat: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns (offending lanes (n, 32), address of the first); ``bad_flat`` marks them among the lanes in ``mask``."""
    full = np.zeros(host.shape, bool)
    if mask is None:
        full[...] = bad_flat.reshape(host.shape)
    else:
        full[mask] = bad_flat
    bad = np.broadcast_to(full, (g.n, 32)) & g.lanes()
    return bad, int(np.broadcast_to(host, (g.n, 32))[bad][0])


def _say(g: Group, a: Access, bad: np.ndarray, what: str) -> str:
    """Returns the message of an error: ``what`` is wrong, and the first lane of ``bad`` (n, 32) has done it."""
    who = f"{g.thread(bad)} in {g.wave.run.launch.title}"
    return f"{a.instruction.where()}: {what}; {a.kind} of {a.total} bytes by {who}"


def _misaligned(g: Group, a: Access, space: str, host, mask) -> None:
    flat = host if mask is None else host[mask]
    bad, address = _first(g, host, mask, (flat & (a.total - 1)) != 0)
    place = g.wave.run.memory.describe(address) if space == "global" else f"a {space} address"
    raise Misaligned(_say(g, a, bad, f"address is not a multiple of {a.total}: {place}"))


def _read_only(g: Group, a: Access, region: Region, host, mask) -> None:
    flat = host if mask is None else host[mask]
    bad, address = _first(g, host, mask, (flat >= region.base) & (flat < region.end))
    text = f"tensor {region.name!r} is read-only: {g.wave.run.memory.describe(address)}"
    raise ReadOnlyWrite(_say(g, a, bad, text))


def _window_bounds(g: Group, a: Access, addr, off: int, mask, size: int, base: int, what: str) -> None:
    seen = addr if mask is None or mask.shape != addr.shape else addr[mask]
    low, high = int(seen.min()) + off, int(seen.max()) + off
    if low >= base and high + a.total <= base + size:
        return
    at = np.broadcast_to(addr.astype(np.int64) + off - base, (g.n, 32))
    full = g.lanes() if mask is None else g.lanes() & np.broadcast_to(mask, (g.n, 32))
    bad = ((at < 0) | (at + a.total > size)) & full
    # Where the shapes of mask and addresses differ, ``seen`` includes lanes outside the mask.
    if bad.any():
        raise OutOfBounds(_say(g, a, bad, f"byte {int(at[bad][0])} of {what}, which has {size} bytes"))
