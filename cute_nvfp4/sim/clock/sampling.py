"""Chooses the SMs that are replayed, and says how many SMs each of them stands for."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cute_nvfp4.sim.clock.machine import Machine
from cute_nvfp4.sim.machine.cluster import Clusters
from cute_nvfp4.sim.machine.launch import Launch

THREADS, CTAS, REGISTERS, WARP_REGISTERS = 2048, 32, 65536, 256
SHARED, SHARED_OF_CTA = 228 * 1024, 1024
UNLIKE = 1.03
"""The factor by which the work of places must differ from that of the replayed ones for the launch to be executed once
more, with others sampled."""


RAISERS = 8
"""The most places that are replayed because others wait for flags of their CTAs."""


@dataclass(frozen=True)
class Place:
    """The SMs that one cluster occupies. A launch without clusters has a place for each SM."""

    number: int  # the place's number on the GPU
    clusters: tuple[tuple[int, ...], ...]  # those that run there in turn, each as its CTAs of the grid by rank
    together: int  # how many of the clusters run at the same time
    weight: float  # how many places it stands for


@dataclass(frozen=True)
class Sample:
    """The places that are replayed, and the CTAs of the grid that run there (m,), in increasing order."""

    places: tuple[Place, ...]
    ctas: np.ndarray
    ctas_per_sm: int


class Limits(NamedTuple):
    """How many CTAs an SM has room for by each limit alone: of CTAs ("sm"), warps, shared memory and registers."""

    sm: int
    warps: int
    shared: int
    registers: int


def limits(threads: int, shared: int, registers: int) -> Limits:
    """Returns the limits for CTAs of ``threads`` threads with ``registers`` registers each, and of ``shared`` bytes
    (CUDA C++ Programming Guide, "Technical Specifications")."""
    warps = -(-threads // 32)
    of_warp = -(-max(registers, 1) * 32 // WARP_REGISTERS) * WARP_REGISTERS
    by_shared = SHARED // (-(-shared // 128) * 128 + SHARED_OF_CTA)
    return Limits(CTAS, THREADS // (warps * 32), by_shared, REGISTERS // (of_warp * warps))


def ctas_per_sm(threads: int, shared: int, registers: int) -> int:
    """Returns how many CTAs an SM holds at the same time, at least 1."""
    return max(1, min(limits(threads, shared, registers)))


def sample(launch: Launch, machine: Machine, static_shared: int, registers: int, most: int) -> Sample:
    """Distributes the clusters of a launch over the GPU's places in turn. Returns a sample of at most ``most`` places
    of each class; the places of a class run equally many clusters."""
    clusters = Clusters(launch)
    places = max(1, machine.sms // clusters.size)
    threads = int(np.prod(launch.block))
    together = ctas_per_sm(threads, static_shared + launch.dynamic_smem, registers)
    full, more = divmod(clusters.count, places)
    taken = []
    for first, last, count in ((0, more, full + 1), (more, places, full)):
        alike = last - first
        if not alike or not count:
            continue
        chosen = np.unique(np.linspace(first, last - 1, min(most, alike)).astype(int)).tolist()
        for number in chosen:
            mine = np.arange(number, clusters.count, places)
            ctas = tuple(tuple(row) for row in _ctas(clusters, launch, mine).tolist())
            taken.append(Place(number, ctas, together, alike / len(chosen)))
    return _sample(taken, together)


def resample(taken: Sample, launch: Launch, machine: Machine, work: np.ndarray) -> Sample | None:
    """Returns another sample if places of one class turned out to differ, None if ``taken`` stands for all of them. Of
    each class it has the place with the most work, for itself and all that come near it, and a middle one for others.

    work: (CTAs of the grid, 2), the instructions of all warps of a CTA, and of its warp with the most.
    """
    clusters = Clusters(launch)
    places = max(1, machine.sms // clusters.size)
    full, more = divmod(clusters.count, places)
    found, differ = [], False
    for first, last, count in ((0, more, full + 1), (more, places, full)):
        if first == last or not count:
            continue
        each = np.array(
            [_work(clusters, launch, np.arange(n, clusters.count, places), work) for n in range(first, last)]
        )
        mine = [p.number - first for p in taken.places if first <= p.number < last]
        most, mean = each.max(axis=0) > UNLIKE * each[mine].max(axis=0), each.mean(axis=0) / each[mine].mean(axis=0)
        differ |= bool((most | (mean > UNLIKE) | (mean < 1 / UNLIKE)).any())
        load = (each / each.max(axis=0).clip(1)).mean(axis=1)
        order = np.argsort(load, kind="stable")
        heavy = int((load * UNLIKE >= load.max()).sum())
        chosen = [(order[-1], heavy)] + (
            [(order[(last - first - heavy) // 2], last - first - heavy)] if heavy < last - first else []
        )
        for at, stands_for in chosen:
            number = first + int(at)
            ctas = _ctas(clusters, launch, np.arange(number, clusters.count, places))
            found.append(Place(number, tuple(map(tuple, ctas.tolist())), taken.ctas_per_sm, stands_for))
    return _sample(found, taken.ctas_per_sm) if differ else None


def with_raisers(
    taken: Sample, launch: Launch, machine: Machine, waits_for: Mapping[int, Collection[int]]
) -> Sample | None:
    """Returns ``taken`` with the places of the CTAs whose flags the replayed ones wait for, of those that these wait
    for, and so on: ``RAISERS`` places more at most. Returns None if all are there. Each new place stands for itself.

    waits_for: for each CTA of the grid, the CTAs whose flags it waits for.
    """
    clusters = Clusters(launch)
    places = max(1, machine.sms // clusters.size)
    more = clusters.count % places
    number = np.empty(clusters.count * clusters.size, int)
    for first in range(places):
        number[_ctas(clusters, launch, np.arange(first, clusters.count, places)).ravel()] = first
    have = {p.number: p for p in taken.places}
    known, new = set(have), {}
    todo = deque(cta for p in taken.places for cluster in p.clusters for cta in cluster)
    while todo and len(new) < RAISERS:
        for other in sorted(waits_for.get(todo.popleft(), ())):
            n = int(number[other])
            if n not in known and len(new) < RAISERS:
                known.add(n)
                ctas = _ctas(clusters, launch, np.arange(n, clusters.count, places)).tolist()
                new[n] = Place(n, tuple(map(tuple, ctas)), taken.ctas_per_sm, 1.0)
                todo.extend(cta for cluster in ctas for cta in cluster)
    if not new:
        return None
    kept = []
    for low, high in ((0, more), (more, places)):
        joined = sum(low <= n < high for n in new)
        kept += [
            replace(p, weight=p.weight * (high - low - joined) / (high - low))
            for p in taken.places
            if low <= p.number < high
        ]
    return _sample([*kept, *new.values()], taken.ctas_per_sm)


def _work(clusters: Clusters, launch: Launch, which: np.ndarray, work: np.ndarray) -> tuple[float, float]:
    """Returns the instructions of all CTAs of a place, and those of its warp with the most."""
    ctas = _ctas(clusters, launch, which)
    return work[ctas, 0].sum(), work[ctas, 1].max()


def _sample(places: list[Place], together: int) -> Sample:
    everyone = np.array(sorted({c for place in places for cluster in place.clusters for c in cluster}), np.int64)
    return Sample(tuple(places), everyone, together)


def _ctas(clusters: Clusters, launch: Launch, which: np.ndarray) -> np.ndarray:
    """Returns the CTAs of the grid in clusters ``which`` (n,), by rank (n, size)."""
    rank = np.tile(np.arange(clusters.size), len(which))
    x, y, z = clusters.coordinates(np.repeat(which, clusters.size), rank)
    gx, gy, _ = launch.grid
    return (x + gx * (y + gy * z)).reshape(len(which), clusters.size)
