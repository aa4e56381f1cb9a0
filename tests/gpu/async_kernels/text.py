"""PTX by hand: the pieces that the recorded kernels share.

A kernel has its buffers' addresses in %p0, %p1, ..., generic addresses of its tensor maps in %m0, ..., its 32-bit
parameters in %s0, ..., the thread in %t, and the first byte of dynamic shared memory in %base. %q, %r, %d, %h and %f
are free registers. Pieces that need registers of their own declare them in a scope.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

SHARED_BASE = 1024
"""Dynamic shared memory that is aligned to 1024 starts here, behind what the system reserves on sm_90."""
POISON = 0xA5
SPINS = 4000
"""Tries of a wait before the kernel traps: a wrong count must not hang the machine."""

_labels = itertools.count()


def label() -> str:
    return f"L{next(_labels)}"


def restart_labels() -> None:
    """Makes the text of the next kernel independent of those before it."""
    global _labels
    _labels = itertools.count()


def module(
    body: str, buffers: int = 1, maps: int = 0, scalars: int = 0, directives: str = "", declarations: str = ""
) -> str:
    """A module with the one kernel ``kernel``."""
    params = [f".param .u64 p{i}" for i in range(buffers)]
    params += [f".param .align 64 .b8 map{i}[128]" for i in range(maps)]
    params += [f".param .u32 s{i}" for i in range(scalars)]
    loads = [f"ld.param.b64 %p{i}, [p{i}];" for i in range(buffers)]
    loads += [f"mov.b64 %m{i}, map{i}; cvta.param.u64 %m{i}, %m{i};" for i in range(maps)]
    loads += [f"ld.param.b32 %s{i}, [s{i}];" for i in range(scalars)]
    start = "\n  ".join(loads)
    return f"""\
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
{declarations}
.visible .entry kernel({", ".join(params)}) {directives}
{{
  .reg .b64 %p<{buffers + 1}>, %m<{maps + 1}>, %d<64>;
  .reg .b32 %s<{scalars + 1}>, %r<300>, %t, %base;
  .reg .b16 %h<64>; .reg .f32 %f<64>; .reg .f64 %g<16>; .reg .pred %q<32>;
  {start}
  mov.u32 %t, %tid.x;
  mov.u32 %base, smem;
  {body}
  ret;
}}
"""


def only(predicate: str, lines: str | Sequence[str]) -> str:
    """``lines`` for the threads with ``predicate``, by a branch around them."""
    end = label()
    text = lines if isinstance(lines, str) else "\n  ".join(lines)
    return f"@!{predicate} bra {end};\n  {text}\n{end}:"


def elected(lines: str | Sequence[str], thread: int = 0) -> str:
    """``lines`` for one thread of the CTA."""
    return f"setp.eq.u32 %q31, %t, {thread};\n  " + only("%q31", lines)


def at(offset: int) -> str:
    """A shared-memory address operand."""
    return f"[%base+{offset}]"


def wait(bar: int | str, parity: int | str = 0, form: str = "try_wait.parity.shared::cta.b64") -> str:
    """Waits for a phase of the barrier at byte ``bar`` of dynamic shared memory."""
    loop, done = label(), label()
    where = at(bar) if isinstance(bar, int) else f"[{bar}]"
    return f"""{{ .reg .pred %w, %l; .reg .b32 %n;
  mov.u32 %n, 0;
{loop}:
  mbarrier.{form} %w, {where}, {parity};
  @%w bra {done};
  add.u32 %n, %n, 1;
  setp.lt.u32 %l, %n, {SPINS};
  @%l bra {loop};
  trap;
{done}:
  }}"""


def init(bar: int, count: int = 1) -> str:
    return f"mbarrier.init.shared.b64 {at(bar)}, {count};"


INIT_FENCE = "fence.mbarrier_init.release.cluster;"
PROXY_FENCE = "fence.proxy.async.shared::cta;"


def _walk(size: int, step: int, inside: str) -> str:
    loop, done = label(), label()
    return f"""{{ .reg .pred %w; .reg .b32 %i, %a, %n, %v<4>; .reg .b64 %o;
  mov.u32 %n, %ntid.x; mul.lo.u32 %n, %n, {step};
  mul.lo.u32 %i, %t, {step};
{loop}:
  setp.ge.u32 %w, %i, {size};
  @%w bra {done};
  {inside}
  add.u32 %i, %i, %n;
  bra {loop};
{done}:
  }}"""


def fill(offset: int, size: int, value: int = POISON) -> str:
    """Every byte of a piece of shared memory becomes ``value``; no barrier."""
    assert size % 16 == offset % 16 == 0
    word = value * 0x01010101
    inside = f"mov.u32 %v0, {word}; add.u32 %a, %base, %i; st.shared.v4.b32 [%a+{offset}], {{%v0, %v0, %v0, %v0}};"
    return _walk(size, 16, inside)


def dump(offset: int, size: int, pointer: str = "%p0", to: int = 0) -> str:
    """Shared memory to global memory; no barrier."""
    assert size % 16 == offset % 16 == to % 16 == 0
    inside = f"""add.u32 %a, %base, %i; ld.shared.v4.b32 {{%v0, %v1, %v2, %v3}}, [%a+{offset}];
  cvt.u64.u32 %o, %i; add.u64 %o, %o, {pointer};
  st.global.v4.b32 [%o+{to}], {{%v0, %v1, %v2, %v3}};"""
    return _walk(size, 16, inside)


def bring(offset: int, size: int, pointer: str = "%p0", start: int = 0) -> str:
    """Global memory to shared memory; no barrier."""
    assert size % 16 == offset % 16 == start % 16 == 0
    inside = f"""cvt.u64.u32 %o, %i; add.u64 %o, %o, {pointer};
  ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%o+{start}];
  add.u32 %a, %base, %i; st.shared.v4.b32 [%a+{offset}], {{%v0, %v1, %v2, %v3}};"""
    return _walk(size, 16, inside)


def address(scale: int, pointer: str = "%p0", into: str = "%d60", index: str = "%t") -> str:
    """``into`` = pointer + scale * index."""
    return f"mad.wide.u32 {into}, {index}, {scale}, {pointer};"


def global_index() -> str:
    """%r299 = the thread's number in the grid."""
    return "mov.u32 %r298, %ctaid.x; mov.u32 %r297, %ntid.x; mad.lo.u32 %r299, %r298, %r297, %t;"


CLUSTER_SYNC = "barrier.cluster.arrive.aligned;\n  barrier.cluster.wait.aligned;"
EPILOGUE_SYNC = "bar.sync 0;"
