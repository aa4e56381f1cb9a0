"""``merge``: joins groups of warps that are at the same block."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.machine.wave import Group


def merge(groups: list[Group], live: list[int]) -> Group:
    """Returns one group with the warps and lanes of all ``groups``, and the registers whose slots are ``live``.

    If lanes of one warp were in different groups, each lane of a register comes from the group that has the lane.
    """
    warps = np.unique(np.concatenate([g.warps for g in groups]))
    total = sum(g.n for g in groups)
    first = groups[0]
    masks = np.zeros((len(warps), 32), bool)
    rows = [np.searchsorted(warps, g.warps) for g in groups]
    for g, at in zip(groups, rows):
        masks[at] |= g.lanes()
    regs = list(first.wave.run.zeros)
    disjoint, whole = total == len(warps), bool(masks.all())
    # If all groups have the same warps, a register that none has written since they parted is one array in all.
    same = whole and all(g.n == len(warps) for g in groups)
    for slot in live:
        values = [g.regs[slot] for g in groups]
        if same and all(v is values[0] for v in values):
            regs[slot] = values[0]
        else:
            regs[slot] = _join(values, groups, rows, len(warps), disjoint)
    merged = Group(first.wave, first.block, warps, None if whole else masks, regs)
    merged.age = min(g.age for g in groups)
    merged.patience = min(g.patience for g in groups)
    merged.seen = min(g.seen for g in groups)
    return merged


def _join(values: list[np.ndarray], groups: list[Group], rows: list[np.ndarray], n: int, disjoint: bool) -> np.ndarray:
    head = values[0]
    if all(v is head for v in values) and head.shape[0] == 1:
        return head
    if all(v.shape == (1, 1) for v in values) and all(v.item() == head.item() for v in values):
        return head
    # One value a warp is enough if no warp is split over groups and no group has a value for each lane.
    width = 1 if disjoint and all(v.shape[1] == 1 for v in values) else 32
    out = np.zeros((n, width), head.dtype)
    for v, g, at in zip(values, groups, rows):
        if disjoint:
            out[at] = v
        else:
            out[at] = np.where(g.lanes(), v, out[at])
    return out
