"""Named barriers and their reductions, votes, matches, redux, elect, shuffles, setmaxnreg, dependent launches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import text
from .case import Case, Pointer
from .tile_loads import data


def cases() -> Iterator[Case]:
    yield _pairs()
    yield _reductions()
    yield from _warp()
    yield _setmaxnreg()
    yield _dependents()


def _pairs() -> Case:
    """Four warps: 0 and 1 produce for 2 and 3 with bar.arrive and bar.sync on barriers of 64 threads."""
    text.restart_labels()
    body = ["shr.u32 %r1, %t, 5; and.b32 %r2, %r1, 1; add.u32 %r3, %r2, 1; add.u32 %r4, %r2, 5;"]
    body.append("shl.b32 %r5, %t, 2; and.b32 %r5, %r5, 255; add.u32 %r5, %r5, %base; mov.u32 %r6, 0;")
    body.append("setp.lt.u32 %q1, %r1, 2;")
    body.append("AGAIN:\n  @!%q1 bra TAKE;")
    body.append(
        "mad.lo.u32 %r7, %r6, 1000, %t; st.shared.b32 [%r5], %r7; barrier.cta.arrive %r3, 64; bar.sync %r4, 64;"
    )
    body.append("bra NEXT;\nTAKE:")
    body.append("bar.sync %r3, 64; xor.b32 %r8, %r5, 28; ld.shared.b32 %r9, [%r8]; bar.arrive %r4, 64;")
    body.append("sub.u32 %r10, %t, 64; mad.lo.u32 %r10, %r6, 64, %r10;")
    body.append(text.address(4, "%p0", "%d1", "%r10") + " st.global.b32 [%d1], %r9;\nNEXT:")
    body.append("add.u32 %r6, %r6, 1; setp.lt.u32 %q2, %r6, 5; @%q2 bra AGAIN;")
    out = np.arange(5, dtype=np.uint32)[:, None] * 1000 + (np.arange(64, dtype=np.uint32)[None] ^ 7)
    return Case(
        "barrier pairs",
        text.module("\n  ".join(body)),
        [np.zeros(5 * 256, np.uint8)],
        [Pointer(0)],
        smem=1024,
        expected=lambda _: {0: out.view(np.uint8).reshape(-1)},
    )


def _reductions() -> Case:
    """bar.red over all threads and over two of the four warps."""
    text.restart_labels()
    bits = data(128, 71) & 1
    body = [text.address(1, "%p1", "%d1"), "ld.global.u8 %h1, [%d1]; setp.ne.u16 %q1, %h1, 0;", text.address(32)]
    body.append("bar.red.popc.u32 %r1, 0, %q1; bar.red.and.pred %q2, 0, %q1; bar.red.or.pred %q3, 0, %q1;")
    body.append("barrier.cta.red.popc.u32 %r2, 3, 128, !%q1; shr.u32 %r3, %t, 6; add.u32 %r4, %r3, 8;")
    body.append("bar.red.popc.aligned.u32 %r5, %r4, 64, %q1;".replace(".aligned", ""))
    body.append("setp.lt.u32 %q4, %t, 64; or.pred %q4, %q4, %q1; barrier.cta.red.and.pred %q5, %r4, 64, %q4;")
    body.append("barrier.cta.red.or.aligned.pred %q6, %r4, 64, !%q4;".replace(".or.aligned", ".or"))
    for i, q in ((1, 2), (2, 3), (4, 5), (5, 6)):
        body.append(f"selp.u32 %r{20 + i}, 1, 0, %q{q}; st.global.b32 [%d60+{4 * i}], %r{20 + i};")
    body.append("st.global.b32 [%d60], %r1; st.global.b32 [%d60+12], %r2; st.global.b32 [%d60+24], %r5;")
    out = np.zeros((128, 8), np.uint32)
    half = np.repeat([bits[:64].sum(), bits[64:].sum()], 64)
    wide = bits.astype(bool) | (np.arange(128) < 64)
    out[:, 0], out[:, 1], out[:, 2], out[:, 3] = bits.sum(), bits.all(), bits.any(), 128 - bits.sum()
    out[:, 4] = np.repeat([wide[:64].all(), wide[64:].all()], 64)
    out[:, 5] = np.repeat([(~wide[:64]).any(), (~wide[64:]).any()], 64)
    out[:, 6] = half
    return Case(
        "barrier reductions",
        text.module("\n  ".join(body), 2),
        [np.zeros(128 * 32, np.uint8), bits],
        [Pointer(0), Pointer(1)],
        expected=lambda _: {0: out.view(np.uint8).reshape(-1)},
    )


def _warp() -> Iterator[Case]:
    """Warp-wide operations by whole warps and, under a mask, by parts of one."""
    full = "0xffffffff"
    forms: list[tuple[str, str]] = []
    for operation in ("add", "min", "max"):
        forms += [(f"redux {operation}.{k}", f"redux.sync.{operation}.{k} %r3, %r1, MASK;") for k in ("u32", "s32")]
    forms += [(f"redux {o}.b32", f"redux.sync.{o}.b32 %r3, %r1, MASK;") for o in ("and", "or", "xor")]
    forms.append(("match any.b32", "match.any.sync.b32 %r3, %r2, MASK;"))
    forms.append(("match any.b64", "mov.b64 %d1, {%r2, %r2}; match.any.sync.b64 %r3, %d1, MASK;"))
    forms.append(("match all.b32", "match.all.sync.b32 %r3|%q3, %r2, MASK; selp.u32 %r4, 1, 0, %q3;"))
    forms.append(
        ("match all.b32 same", "mov.u32 %r5, 7; match.all.sync.b32 %r3|%q3, %r5, MASK; selp.u32 %r4, 1, 0, %q3;")
    )
    forms.append(("vote ballot", "vote.sync.ballot.b32 %r3, %q1, MASK;"))
    for mode in ("any", "all", "uni"):
        forms.append((f"vote {mode}", f"vote.sync.{mode}.pred %q3, %q1, MASK; selp.u32 %r3, 1, 0, %q3;"))
    forms.append(("vote not", "vote.sync.any.pred %q3, !%q1, MASK; selp.u32 %r3, 1, 0, %q3;"))
    forms.append(("elect", "elect.sync %r3|%q3, MASK; selp.u32 %r4, 1, 0, %q3;"))
    forms.append(("activemask", "activemask.b32 %r3;"))
    for mode in ("up", "down", "bfly", "idx"):
        clamp = 0 if mode == "up" else 31
        forms.append((f"shfl {mode}", f"shfl.sync.{mode}.b32 %r3|%q3, %r1, 5, {clamp}, MASK; selp.u32 %r4, 1, 0, %q3;"))
        limited = (8 << 8 | clamp) if mode == "up" else (0x18 << 8 | 0x1F)
        forms.append((f"shfl {mode} of 8", f"shfl.sync.{mode}.b32 %r3|%q3, %r1, %r2, {limited}, MASK; "
                      "selp.u32 %r4, 1, 0, %q3;"))  # fmt: skip
    words = data(4 * 96, 72)
    for part, mask in (("whole", full), ("some", "0x0ff0f0a5")):
        text.restart_labels()
        body = [text.address(4, "%p1", "%d1"), "ld.global.b32 %r1, [%d1]; and.b32 %r2, %r1, 7; mov.u32 %r30, 0;"]
        body.append("and.b32 %r6, %r1, 1; setp.eq.u32 %q1, %r6, 1; and.b32 %r7, %t, 31; mov.u32 %r8, 1;")
        body.append(f"shl.b32 %r8, %r8, %r7; and.b32 %r9, %r8, {mask}; setp.ne.u32 %q2, %r9, 0;")
        body.append(text.address(8 * len(forms)))
        inside = ["bar.warp.sync MASK;"]
        for i, (name, form) in enumerate(forms):
            # a lane that takes from one outside the mask gets anything
            if part == "some" and (name.startswith("shfl") or name == "activemask"):
                continue
            inside.append(f"mov.u32 %r4, 0; {form} st.global.v2.b32 [%d60+{8 * i}], {{%r3, %r4}};")
        # a lone value cannot say which lanes vote.all and the like leave out: lanes outside the mask skip all
        body.append(text.only("%q2", "\n  ".join(inside).replace("MASK", mask)))
        yield Case(
            f"warp {part}",
            text.module("\n  ".join(body), 2),
            [np.zeros(96 * 8 * len(forms), np.uint8), words],
            [Pointer(0), Pointer(1)],
            block=96,
            notes={"forms": [name for name, _ in forms]},
        )


def _setmaxnreg() -> Case:
    """Registers moved from one warp group to the other, with values live across."""
    text.restart_labels()
    body = ["mov.u32 %r1, %t; shr.u32 %r2, %t, 7; setp.eq.u32 %q1, %r2, 0; @!%q1 bra OTHER;"]
    body.append("setmaxnreg.dec.sync.aligned.u32 40; mad.lo.u32 %r3, %r1, 3, 1; bra JOIN;\nOTHER:")
    body.append("setmaxnreg.inc.sync.aligned.u32 208; mad.lo.u32 %r3, %r1, 5, 2;\nJOIN:")
    body += [text.address(4), "st.global.b32 [%d60], %r3;"]
    t = np.arange(256, dtype=np.uint32)
    out = np.where(t < 128, 3 * t + 1, 5 * t + 2).astype(np.uint32)
    return Case(
        "control setmaxnreg",
        text.module("\n  ".join(body), directives=".reqntid 256, 1, 1 .maxnreg 128"),
        [np.zeros(1024, np.uint8)],
        [Pointer(0)],
        block=256,
        expected=lambda _: {0: out.view(np.uint8)},
    )


def _dependents() -> Case:
    """griddepcontrol in a launch that depends on no other, with the attribute of programmatic launches."""
    text.restart_labels()
    body = ["griddepcontrol.launch_dependents;", text.global_index(), "griddepcontrol.wait;"]
    body += [text.address(4, "%p0", "%d1", "%r299"), "mul.lo.u32 %r1, %r299, 7; st.global.b32 [%d1], %r1;"]
    out = np.arange(128, dtype=np.uint32) * 7
    return Case(
        "control griddepcontrol",
        text.module("\n  ".join(body)),
        [np.zeros(512, np.uint8)],
        [Pointer(0)],
        grid=2,
        block=64,
        programmatic=True,
        expected=lambda _: {0: out.astype(np.uint32).view(np.uint8)},
    )
