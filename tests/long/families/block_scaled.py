"""GEMM, gated and grouped GEMM of two block-scaled operands: every structure of a kernel, and problems at random."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
from support import gated_gemm_problems as gated
from support import gemm_problems as gemm
from support import grouped_problems as grouped
from support.gemm_structures import Pairs, random_case, structures

from cute_nvfp4.kernels.gemm.grouped_config import GroupedConfig, can_implement_grouped
from cute_nvfp4.target import ARCHITECTURES
from tests.long.depends import PACKED
from tests.long.family import Family, Once

ARCHS = ("sm_100a", "sm_120a")
_KINDS = ("nvfp4", "mxfp4", "mxfp8")
_8BIT = tuple(pair for pair in gemm.FORMAT_PAIRS if "mxfp4" not in pair and "nvfp4" not in pair)
_STRUCTURE = (
    "tile_n", "pair", "cluster_m", "cluster_n", "split_k", "stages", "acc_stages", "scheduler", "raster",
)  # fmt: skip


@cache
def _structures(arch: str) -> list[gemm.Case]:
    return list(structures(arch))


def _one_a_kind(arch: str) -> Iterator[gemm.Case]:
    """Structures of one pair of formats for each kind of MMA: the PTX of 8-bit formats differs in a constant alone, a
    field of a descriptor."""
    return (case for case in _structures(arch) if case.a_format == case.b_format and case.a_format in _KINDS)


def _ends_of_rings(arch: str) -> Iterator[gemm.Case]:
    """Those with the longest ring and the shortest."""
    return (case for case in _one_a_kind(arch) if case.stages in (0, 2))


def _generator(*words: object) -> np.random.Generator:
    """The same for the same words."""
    return np.random.default_rng(zlib.crc32(repr(words).encode()))


def _fixed(arch: str) -> dict[str, object]:
    """What a random case may not have drawn."""
    return {} if arch == "sm_100a" else {"store": "direct"}


def _of_structure(case: gemm.Case) -> tuple[object, ...]:
    """What decides which instructions run; formats as the kernel sees them."""
    formats = (case.b_format, case.a_format) if case.swap else (case.a_format, case.b_format)
    return (*(getattr(case, name) for name in _STRUCTURE), *formats)


def _kind(a_format: str) -> str:
    return a_format.removesuffix("_e5m2")


# --- GEMM


def _gemms(arch: str, part: str) -> list[gemm.Case]:
    return [_complete(_of_kind(case, arch), arch) for case in _one_a_kind(arch)]


def _of_kind(structure: gemm.Case, arch: str) -> gemm.Case:
    """The structure with any pair of formats of its kind of MMA."""
    if structure.a_format != "mxfp8":
        return structure
    a, b = _8BIT[_generator(arch, "formats", _of_structure(structure)).integers(len(_8BIT))]
    return replace(structure, a_format=a, b_format=b)


def _gemm_identity(case: gemm.Case) -> str:
    *structure, a, b = _of_structure(case)
    return repr((*structure, _kind(a), _kind(b)))


def _complete(structure: gemm.Case, arch: str, **fixed: object) -> gemm.Case:
    generator = _generator(arch, _of_structure(structure), fixed)
    return Pairs(int(generator.integers(1 << 30))).complete(structure, tries=1, **_fixed(arch), **fixed)


def _gemm(case: gemm.Case) -> Once:
    problem = gemm.make(case)
    return lambda: gemm.check(problem, problem.run())


def _random_gemm(generator: np.random.Generator, arch: str) -> gemm.Case:
    if arch != "sm_90a":
        return random_case(generator, _structures(arch), **_fixed(arch))
    # both operands as they are: NVFP4 alone, by the plan that is chosen
    fixed = {"a_format": "nvfp4", "b_format": "nvfp4"}
    case = random_case(generator, _structures("sm_100a"), max_mn=300, max_k=1024, **fixed)
    return replace(case, a_format="nvfp4", b_format="nvfp4", workers=0)


# --- two products and a gate


def _gateds(arch: str, part: str) -> list[gated.Gated]:
    found = []
    for structure in _ends_of_rings(arch):
        for form in ("two", "interleaved"):
            for swap in (False, True):
                generator = _generator(arch, "gated", _of_structure(structure), form, swap)
                pair = _8BIT[generator.integers(len(_8BIT))] if structure.a_format == "mxfp8" else ("",) * 2
                formats = {"a_format": pair[0], "b_format": pair[1]} if pair[0] else {}
                case = _complete(replace(structure, **formats), arch, swap=swap)
                given = "halves" if form == "two" and generator.integers(2) else form
                one = gated.gated_of(generator, case, given)
                if gated.fits(one, arch):
                    found.append(one)
    return found


def _gated_identity(one: gated.Gated) -> str:
    *structure, a, _ = _of_structure(one.case)
    return repr((*structure, _kind(a), one.case.swap, one.form == "interleaved"))


def _gated(case: gated.Gated) -> Once:
    problem = gated.make(case)
    return lambda: problem.check(problem.run())


def _random_gated(generator: np.random.Generator, arch: str) -> gated.Gated:
    while (found := gated.random_gated(generator, _structures(arch), arch, **_fixed(arch))) is None:
        pass
    return found


# --- groups


def _groupeds(arch: str, part: str) -> list[grouped.Grouped]:
    found = []
    for structure in _ends_of_rings(arch):
        for maps, swap in itertools.product(("", "workspace", "shared"), (False, True)):
            if structure.scheduler == "static" and not _refused(structure, arch, maps, swap):
                found.append(_grouped_of(structure, arch, maps, swap))
    return found


def _refused(structure: gemm.Case, arch: str, maps: str, swap: bool) -> str:
    tiling = structure.tiling().tiling | {"store": "direct"}
    ragged = ("b" if swap else "a") if maps == "shared" else ""
    sort = {"maps": maps or "parameters", "ragged": ragged, "slots": 0 if maps else 4}
    formats = {"a_format": structure.a_format, "b_format": structure.b_format}
    return can_implement_grouped(GroupedConfig(arch=ARCHITECTURES[arch], **tiling, **sort, **formats))


def _grouped_of(structure: gemm.Case, arch: str, maps: str, swap: bool) -> grouped.Grouped:
    """A few groups for a structure, ragged, some of them empty."""
    g = _generator(arch, "grouped", _of_structure(structure), maps, swap)
    steps = 128 * (2 if structure.a_format != "mxfp8" else 1)
    count, least = int(g.integers(2, 6)), steps * (structure.split_k - 1)
    n0, k0 = int(g.integers(1, 300)), least + 32 * int(g.integers(1, 25))
    sizes = []
    for i in range(count):
        m, n, k = int(g.integers(1, 300)), int(g.integers(1, 300)), least + 32 * int(g.integers(1, 25))
        m = 0 if i and g.integers(5) == 0 else m
        sizes.append((m, n0, k0) if maps == "shared" else (m, n, k))
    pair = _8BIT[g.integers(len(_8BIT))] if structure.a_format == "mxfp8" else (structure.a_format,) * 2
    dtype = str(g.choice(list(gemm.DTYPES)))
    return grouped.Grouped(
        tuple(sizes), maps == "shared", before=int(g.integers(3)) if maps == "shared" else 0,
        tile_n=structure.tile_n, pair=structure.pair, cluster=(structure.cluster_m, structure.cluster_n),
        split_k=structure.split_k, stages=structure.stages, acc_stages=structure.acc_stages, raster=structure.raster,
        swap=swap, maps=maps if maps == "workspace" else "", workers=int(g.choice((1, 2, 3))), a_format=pair[0],
        b_format=pair[1], dtype=dtype, out="rows" if maps == "shared" else str(g.choice(("new", "strided", "sliced"))),
        alphas=str(g.choice(("", "number", "one", "each"))), globals_=pair[0] == "nvfp4" and bool(g.integers(2)),
        offsets=str(g.choice(("tensor", "ints"))), exact=dtype == "float16", seed=int(g.integers(1000)),
    )  # fmt: skip


def _grouped_identity(one: grouped.Grouped) -> str:
    names = ("tile_n", "pair", "cluster", "split_k", "stages", "acc_stages", "raster", "swap", "maps", "contiguous")
    return repr((*(getattr(one, name) for name in names), _kind(one.a_format)))


def _grouped(case: grouped.Grouped) -> Once:
    problem = grouped.make(case)
    return lambda: problem.check(problem.run())


def _random_grouped(generator: np.random.Generator, arch: str) -> grouped.Grouped:
    drawn = grouped.random_grouped(generator, max_groups=12)
    if arch == "sm_100a":
        return drawn
    return replace(drawn, pair=False, cluster=(1, 1), split_k=1, tile_n=int(generator.choice((64, 128))))


_ROOMS = ("gemm", "gemm/sm100", "gemm/sm120")
FAMILIES = (
    Family(
        "gemm-structure", gemm.Case, _gemm, every=_gemms, identity=_gemm_identity, weight=4, schedules=20,
        archs=ARCHS, rooms=_ROOMS,
    ),
    Family(
        "gated-structure", gated.Gated, _gated, every=_gateds, identity=_gated_identity, weight=2, schedules=20,
        archs=ARCHS, rooms=_ROOMS,
    ),
    Family(
        "grouped-structure", grouped.Grouped, _grouped, every=_groupeds, identity=_grouped_identity, weight=2,
        schedules=20, archs=ARCHS, rooms=_ROOMS,
    ),
    Family("gemm", gemm.Case, _gemm, _random_gemm, archs=(*ARCHS, "sm_90a"), weight=4, goal=1200, rooms=PACKED),
    Family("gated-gemm", gated.Gated, _gated, _random_gated, archs=ARCHS, weight=2, goal=800, rooms=_ROOMS),
    Family("grouped-gemm", grouped.Grouped, _grouped, _random_grouped, archs=ARCHS, weight=2, goal=800, rooms=_ROOMS),
)  # fmt: skip
