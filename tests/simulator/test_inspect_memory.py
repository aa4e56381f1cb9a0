"""Copies of memory: taken before the block, of the right CTA, and counted when there is no room."""

from __future__ import annotations

import numpy as np

from cute_nvfp4.sim.observe.inspect_memory import Snapshots
from tests.simulator.ptx_lab import launch_kernel, module

ROOM = ".shared .align 4 .b32 room[2];"
# each CTA stores its number plus one, then, behind a barrier, twice that
BODY = """
  mov.u32 %r1, %ctaid.x; add.u32 %r1, %r1, 1; mov.u32 %r2, room;
  st.shared.b32 [%r2], %r1;
  bar.sync 0;
  ld.shared.b32 %r3, [%r2]; add.u32 %r3, %r3, %r3; st.shared.b32 [%r2+4], %r3;
  bar.sync 0;
  ld.shared.b32 %r4, [%r2+4];
"""


def taken(before: str, grid: int = 2, **options) -> Snapshots:
    out = Snapshots(before, **options)
    launch_kernel(module(BODY, 1, ROOM), [np.zeros(1, "u4")], block=(64, 1, 1), grid=(grid, 1, 1), trace=out)
    return out


def test_before_the_block_and_of_each_cta() -> None:
    words = [(s.cta, s.shared.view(np.uint32)[:2].tolist()) for s in taken("ld.shared").taken]
    first, second = "CTA (0, 0, 0)", "CTA (1, 0, 0)"
    assert words == [(first, [1, 0]), (second, [2, 0]), (first, [1, 2]), (second, [2, 4])]


def test_what_is_said_beside_the_bytes() -> None:
    shots = taken("ld.shared").taken
    assert all("ld.shared.b32" in s.instruction and s.tensor is None for s in shots)
    assert [s.step for s in shots] == sorted(s.step for s in shots) and shots[0].step > 0


def test_limits() -> None:
    few = taken("ld.shared", most=3)
    assert len(few.taken) == 3 and few.missed == 1
    assert {s.cta for s in taken("ld.shared", grid=5, clusters=1).taken} == {"CTA (0, 0, 0)"}
    assert taken("tcgen05").taken == []


def test_it_is_a_trace() -> None:
    assert {r.track for r in taken("ld").rows()} == {"warp 0", "warp 1"}
