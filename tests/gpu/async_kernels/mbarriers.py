"""mbarriers of one CTA: counts, states, transactions, phases, and arrivals by cp.async."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import text
from .case import Case, Pointer
from .tile_loads import data

_BAR = 1024


class Script:
    """Lines for one thread; what it finds out goes to the words of buffer 0, beside what the ISA says it is."""

    def __init__(self) -> None:
        text.restart_labels()
        self.lines: list[str] = []
        self.known: list[int] = []

    def do(self, line: str) -> None:
        self.lines.append(line)

    def out(self, value: int, register: str = "%r1") -> None:
        self.lines.append(f"st.global.b32 [%p0+{4 * len(self.known)}], {register};")
        self.known.append(value)

    def test(self, passes: bool, operand: str | int, form: str = "test_wait", bar: int = _BAR) -> None:
        """Whether a phase is over, asked by its state or by its parity."""
        parity = ".parity" if isinstance(operand, int) else ""
        self.do(f"mbarrier.{form}{parity}.shared::cta.b64 %q1, {text.at(bar)}, {operand}; selp.u32 %r1, 1, 0, %q1;")
        self.out(int(passes))

    def pending(self, count: int, state: str) -> None:
        self.do(f"mbarrier.pending_count.b64 %r1, {state};")
        self.out(count)

    def case(self, name: str) -> Case:
        size = -(-4 * len(self.known) // 16) * 16
        image = np.zeros(size, np.uint8)
        known = np.array(self.known, np.uint32).view(np.uint8)
        image[: len(known)] = known
        return Case(
            f"mbarrier {name}",
            text.module(text.elected(self.lines)),
            [np.zeros(size, np.uint8)],
            [Pointer(0)],
            block=32,
            smem=_BAR + 64,
            expected=lambda _: {0: image},
        )


_AT = text.at(_BAR)


def cases() -> Iterator[Case]:
    yield _states()
    yield _parities()
    yield _counts()
    yield _transactions()
    yield _inval()
    yield _forms()
    yield from _many_threads()
    yield _raw_states()
    yield from _cp_async()


def _states() -> Case:
    """Arrivals return the state before them; a state stands for its phase."""
    s = Script()
    s.do(text.init(_BAR, 3))
    for phase in range(3):
        for i in range(3):
            s.do(f"mbarrier.arrive.shared.b64 %d{i + 1}, {_AT};")
            s.pending(3 - i, f"%d{i + 1}")
            for j in range(i + 1):
                s.test(i == 2, f"%d{j + 1}")
            s.test(i == 2, phase & 1)
            s.test(i != 2, 1 - (phase & 1))
    return s.case("states of three arrivals")


def _parities() -> Case:
    """Parity waits over many phases; a fresh barrier passes parity 1."""
    s = Script()
    s.do(text.init(_BAR, 1))
    s.test(False, 0)
    s.test(True, 1)
    for phase in range(9):
        s.do(f"mbarrier.arrive.shared::cta.b64 %d1, {_AT};")
        for form in ("test_wait", "try_wait"):
            s.test(True, phase & 1, form)
        s.test(False, 1 - (phase & 1))
    return s.case("parities of nine phases")


def _counts() -> Case:
    """Arrivals with a count, noComplete, drops."""
    s = Script()
    s.do(text.init(_BAR, 10))
    s.do(f"mov.u32 %r5, 4; mbarrier.arrive.shared.b64 %d1, {_AT}, %r5;")
    s.pending(10, "%d1")
    s.do(f"mbarrier.arrive.noComplete.shared.b64 %d2, {_AT}, 5;")
    s.pending(6, "%d2")
    s.test(False, "%d1")
    s.do(f"mbarrier.arrive.release.cta.shared::cta.b64 %d3, {_AT};")
    s.pending(1, "%d3")
    s.test(True, "%d1")
    s.test(True, 0)
    # the expected count falls with each drop, from the next phase on
    s.do(f"mbarrier.arrive_drop.shared.b64 %d1, {_AT};")
    s.pending(10, "%d1")
    s.do(f"mbarrier.arrive_drop.shared.b64 %d1, {_AT}, 3;")
    s.pending(9, "%d1")
    s.do(f"mbarrier.arrive_drop.noComplete.shared.b64 %d1, {_AT}, 2;")
    s.pending(6, "%d1")
    s.do(f"mbarrier.arrive.shared.b64 %d1, {_AT}, 4;")
    s.pending(4, "%d1")
    s.test(True, 1)
    s.do(f"mbarrier.arrive.shared.b64 %d1, {_AT}, 3;")
    s.pending(4, "%d1")
    s.test(False, 0)
    s.do(f"mbarrier.arrive.shared.b64 %d1, {_AT};")
    s.test(True, 0)
    return s.case("counts and drops")


def _transactions() -> Case:
    """expect_tx and complete_tx, in every order; the phase ends when both counts are zero."""
    s = Script()
    s.do(text.init(_BAR, 2))
    s.do(f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 {_AT}, 48;")
    s.do(f"mbarrier.arrive.shared.b64 %d1, {_AT}; mbarrier.arrive.shared.b64 %d2, {_AT};")
    s.test(False, 0)
    s.do(f"mbarrier.complete_tx.relaxed.cta.shared::cta.b64 {_AT}, 32;")
    s.test(False, 0)
    s.do(f"mbarrier.complete_tx.shared::cta.b64 {_AT}, 16;")
    s.test(True, 0)
    s.do(f"mbarrier.arrive.expect_tx.shared.b64 %d1, {_AT}, 100;")
    s.pending(2, "%d1")
    s.do(f"mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %d2, {_AT}, 28;")
    s.pending(1, "%d2")
    s.test(False, 1)
    s.do(f"mbarrier.complete_tx.shared::cta.b64 {_AT}, 128;")
    s.test(True, "%d1")
    s.test(True, 1)
    # completed before it is expected
    s.do(f"mbarrier.complete_tx.shared::cta.b64 {_AT}, 64; mbarrier.arrive.shared.b64 %d1, {_AT};")
    s.test(False, 0)
    s.do(f"mbarrier.arrive.expect_tx.shared.b64 %d1, {_AT}, 64;")
    s.test(True, 0)
    s.do(f"mbarrier.arrive_drop.expect_tx.shared::cta.b64 %d1, {_AT}, 16; mbarrier.arrive.shared.b64 %d2, {_AT};")
    s.test(False, 1)
    s.do(f"mbarrier.complete_tx.shared::cta.b64 {_AT}, 16;")
    s.test(True, 1)
    s.do(f"mbarrier.arrive.shared.b64 %d1, {_AT};")
    s.test(True, 0)
    # the largest transaction count
    s.do(f"mbarrier.expect_tx.shared::cta.b64 {_AT}, 1048575; mbarrier.arrive.shared.b64 %d1, {_AT};")
    s.test(False, 1)
    s.do(f"mbarrier.complete_tx.shared::cta.b64 {_AT}, 1048575;")
    s.test(True, 1)
    return s.case("transactions")


def _inval() -> Case:
    """A barrier made invalid is memory again, and can be a barrier again; the largest count."""
    s = Script()
    s.do(f"{text.init(_BAR, 1)} mbarrier.arrive.shared.b64 %d1, {_AT}; mbarrier.inval.shared.b64 {_AT};")
    s.do(f"mov.u64 %d2, 81985529216486895; st.shared.b64 {_AT}, %d2; ld.shared.b32 %r1, {_AT};")
    s.out(0x89ABCDEF)
    s.do(text.init(_BAR, (1 << 20) - 1))
    s.test(False, 0)
    s.do(f"mbarrier.arrive.shared.b64 %d1, {_AT}, 1048574;")
    s.pending((1 << 20) - 1, "%d1")
    s.test(False, 0)
    s.do(f"mbarrier.arrive.shared.b64 %d1, {_AT};")
    s.pending(1, "%d1")
    s.test(True, 0)
    return s.case("inval and the largest count")


def _forms() -> Case:
    """Generic addresses, sink results, the forms with semantics and time limit."""
    s = Script()
    s.do(f"cvt.u64.u32 %d9, %base; cvta.shared.u64 %d9, %d9; mbarrier.init.b64 [%d9+{_BAR}], 2;")
    s.do(f"mbarrier.arrive.b64 _, [%d9+{_BAR}]; mbarrier.arrive.shared::cluster.b64 _, {_AT};")
    s.test(True, 0)
    s.do(f"mbarrier.arrive.expect_tx.shared::cluster.b64 _, {_AT}, 16;")
    s.do(f"mbarrier.arrive.relaxed.cluster.shared::cta.b64 %d1, {_AT};")
    s.do(f"mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %q1, {_AT}, 1, 100; selp.u32 %r1, 1, 0, %q1;")
    s.out(0)
    s.do(f"mbarrier.complete_tx.shared::cluster.b64 {_AT}, 16;")
    s.do(f"mbarrier.try_wait.acquire.cta.shared::cta.b64 %q1, {_AT}, %d1; selp.u32 %r1, 1, 0, %q1;")
    s.out(1)
    s.do(f"mbarrier.try_wait.parity.b64 %q1, [%d9+{_BAR}], 1, 1000; selp.u32 %r1, 1, 0, %q1;")
    s.out(1)
    s.do(f"mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64 %q1, {_AT}, 0; selp.u32 %r1, 1, 0, %q1;")
    s.out(0)
    return s.case("forms")


def _many_threads() -> Iterator[Case]:
    """A ring of two buffers between a producing and a consuming warp group, and arrivals of whole warps."""
    text.restart_labels()
    rounds, full, empty = 7, _BAR, _BAR + 16
    body = [text.elected([text.init(b + 8 * i, 64) for b in (full, empty) for i in range(2)]), "bar.sync 0;"]
    body.append("mov.u32 %r1, 0; shl.b32 %r2, %t, 2; setp.lt.u32 %q1, %t, 64; mov.u32 %r20, 0; @!%q1 bra CONSUMER;")
    body.append("PRODUCER:\n  and.b32 %r3, %r1, 1; shr.u32 %r4, %r1, 1; and.b32 %r4, %r4, 1; xor.b32 %r5, %r4, 1;")
    body.append(f"mad.lo.u32 %r6, %r3, 8, %base; add.u32 %r7, %r6, {empty};")
    body.append(text.wait("%r7", "%r5"))
    body.append("mad.lo.u32 %r8, %r3, 256, %r2; add.u32 %r8, %r8, %base; mad.lo.u32 %r9, %r1, 1000, %t;")
    body.append(f"st.shared.b32 [%r8], %r9; mbarrier.arrive.shared.b64 _, [%r6+{full}];")
    body.append(f"add.u32 %r1, %r1, 1; setp.lt.u32 %q2, %r1, {rounds}; @%q2 bra PRODUCER;\n  bra END;")
    body.append("CONSUMER:\n  and.b32 %r3, %r1, 1; shr.u32 %r4, %r1, 1; and.b32 %r4, %r4, 1;")
    body.append(f"mad.lo.u32 %r6, %r3, 8, %base; add.u32 %r7, %r6, {full};")
    body.append(text.wait("%r7", "%r4"))
    # the mirrored thread's word
    body.append("sub.u32 %r8, 127, %t; shl.b32 %r8, %r8, 2; mad.lo.u32 %r8, %r3, 256, %r8; add.u32 %r8, %r8, %base;")
    body.append(f"ld.shared.b32 %r9, [%r8]; mbarrier.arrive.shared.b64 _, [%r6+{empty}];")
    body.append("sub.u32 %r10, %t, 64; mad.lo.u32 %r10, %r1, 64, %r10;")
    body.append(text.address(4, "%p0", "%d1", "%r10") + " st.global.b32 [%d1], %r9;")
    body.append(f"add.u32 %r1, %r1, 1; setp.lt.u32 %q2, %r1, {rounds}; @%q2 bra CONSUMER;\nEND:")
    out = (np.arange(rounds, dtype=np.uint32)[:, None] * 1000 + np.arange(63, -1, -1, dtype=np.uint32)[None]).copy()
    yield Case(
        "mbarrier ring of two",
        text.module("\n  ".join(body)),
        [np.zeros(4 * 64 * rounds, np.uint8)],
        [Pointer(0)],
        smem=_BAR + 64,
        expected=lambda _: {0: out.view(np.uint8).reshape(-1)},
    )


def _raw_states() -> Case:
    """The opaque words themselves, as they were seen: nothing may depend on them."""
    text.restart_labels()
    lines, count = [], 0

    def show(register: str) -> None:
        nonlocal count
        lines.append(f"st.global.b64 [%p0+{8 * count}], {register};")
        count += 1

    for expected in (1, 3, (1 << 20) - 1):
        lines.append(text.init(_BAR, expected))
        lines.append(f"ld.shared.b64 %d1, {_AT};")
        show("%d1")
        for line in (
            f"mbarrier.arrive.shared.b64 %d2, {_AT};",
            f"mbarrier.arrive.expect_tx.shared.b64 %d2, {_AT}, 48;",
        ):
            if expected > 1:
                lines.append(f"{line} ld.shared.b64 %d1, {_AT};")
                show("%d2")
                show("%d1")
        lines.append(f"mbarrier.inval.shared.b64 {_AT}; ld.shared.b64 %d1, {_AT};")
        show("%d1")
    return Case(
        "mbarrier raw words",
        text.module(text.elected(lines)),
        [np.zeros(-(-8 * count // 16) * 16, np.uint8)],
        [Pointer(0)],
        block=32,
        smem=_BAR + 64,
        compare="opaque",
    )


def _cp_async() -> Iterator[Case]:
    """cp.async.mbarrier.arrive: with .noinc the arrival was counted, without it the pending count grows first."""
    memory = data(64 * 16, 51)
    for noinc in (False, True):
        text.restart_labels()
        count = 64 if noinc else 1
        body = [text.elected(text.init(_BAR, count)), "bar.sync 0;", text.address(16, "%p1", "%d1")]
        body.append("mad.lo.u32 %r1, %t, 16, %base; cp.async.cg.shared.global [%r1], [%d1], 16;")
        body.append(f"cp.async.mbarrier.arrive{'.noinc' if noinc else ''}.shared.b64 {_AT};")
        if not noinc:
            # the only counted arrival comes after every thread has raised the pending count
            body += ["bar.sync 0;", text.elected(f"mbarrier.arrive.shared.b64 _, {_AT};")]
        body += [text.wait(_BAR), "bar.sync 0;", text.dump(0, 1024)]
        yield Case(
            f"mbarrier cp.async{'.noinc' if noinc else ''}",
            text.module("\n  ".join(body), 2),
            [np.zeros(1024, np.uint8), memory],
            [Pointer(0), Pointer(1)],
            block=64,
            smem=_BAR + 64,
            expected=lambda _: {0: memory},
        )
