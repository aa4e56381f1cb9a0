"""Clusters: barriers, distributed shared memory, copies between CTAs, multicast, remote mbarriers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from . import text
from .case import Case, Pointer, TensorMap
from .tile_loads import data
from .tile_model import load, tile_bytes

_BAR = 4096
_RANK = "mov.u32 %r90, %cluster_ctarank;"


def _start(count: int = 1) -> list[str]:
    """Shared memory filled, one mbarrier, and every CTA of the cluster there."""
    ready = text.elected([text.init(_BAR, count), text.INIT_FENCE])
    return [_RANK, text.fill(0, 2048), ready, text.PROXY_FENCE, "bar.sync 0;", text.CLUSTER_SYNC]


def _finish(span: int = 2048) -> list[str]:
    """Each CTA dumps its shared memory at its own place."""
    return [
        "mov.u32 %r91, %ctaid.x;",
        text.address(span, "%p0", "%d40", "%r91"),
        text.dump(0, span, "%d40"),
        text.CLUSTER_SYNC,
    ]


def _case(name: str, body: list[str], size: int, ctas: int, extra: list, expected=None, maps: int = 0, block: int = 64):
    buffers = [np.zeros(2048 * ctas, np.uint8), *[e for e in extra if isinstance(e, np.ndarray)]]
    arguments = [Pointer(i) for i in range(len(buffers))] + [e for e in extra if isinstance(e, TensorMap)]
    return Case(
        f"cluster {name}",
        text.module("\n  ".join(body), len(buffers), maps),
        buffers,
        arguments,
        grid=ctas,
        block=block,
        cluster=size,
        smem=_BAR + 16,
        expected=expected,
    )


def cases() -> Iterator[Case]:
    yield from _multicast()
    yield from _special_registers()
    yield from _shared()
    yield from _async_stores()
    yield from _bulk()
    yield from _remote_barriers()


def _multicast() -> Iterator[Case]:
    """A tile and a bulk copy to several CTAs at once, each with its own barrier at the same place."""
    memory = data(4096, 41)
    spec = TensorMap("f16", (60, 20), (128,), (64, 8), swizzle=3, buffer=1)
    for size, masks in ((2, (0b11, 0b10)), (4, (0b1111, 0b1010, 0b0110))):
        for mask in masks:
            text.restart_labels()
            body = _start()
            total = tile_bytes(spec) + 512
            body.append(f"shr.u32 %r92, {mask}, %r90; and.b32 %r92, %r92, 1; setp.ne.u32 %q29, %r92, 0;")
            body.append("setp.eq.u32 %q28, %t, 0; and.pred %q27, %q28, %q29;")
            body.append(text.only("%q27", f"mbarrier.arrive.expect_tx.shared::cta.b64 _, {text.at(_BAR)}, {total};"))
            body.append("setp.eq.u32 %q26, %r90, 0; and.pred %q25, %q28, %q26;")
            issue = [
                f"mov.u16 %h1, {mask}; add.u32 %r1, %base, 1024; mov.u32 %r2, %clusterid.x; shl.b32 %r3, %r2, 2;",
                "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                f"[%r1], [%m0, {{-8, %r3}}], {text.at(_BAR)}, %h1;",
                "add.u64 %d1, %p1, 256; add.u32 %r4, %base, 128;",
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                f"[%r4], [%d1], 512, {text.at(_BAR)}, %h1;",
            ]
            body.append(text.only("%q25", issue))
            body.append(text.only("%q29", text.wait(_BAR)))
            body += ["bar.sync 0;", *_finish()]

            def expected(_, size=size, mask=mask) -> dict[int, np.ndarray]:
                out = np.full((2 * size, 2048), text.POISON, np.uint8)
                for cta in range(2 * size):
                    if mask >> cta % size & 1:
                        load(spec, memory, (-8, cta // size * 4), out[cta], 1024)
                        out[cta, 128:640] = memory[256:768]
                return {0: out.reshape(-1)}

            yield _case(f"multicast {size} mask {mask:b}", body, size, 2 * size, [memory, spec], expected, 1)


def _special_registers() -> Iterator[Case]:
    text.restart_labels()
    names = ["clusterid.x", "nclusterid.x", "cluster_ctaid.x", "cluster_nctaid.x", "cluster_ctarank"]
    names += ["cluster_nctarank", "clusterid.y", "cluster_ctaid.y", "nclusterid.z", "cluster_nctaid.z"]
    body = ["mov.u32 %r90, %ctaid.x;", text.address(64, "%p0", "%d40", "%r90")]
    for i, name in enumerate(names):
        body.append(f"mov.u32 %r1, %{name}; st.global.b32 [%d40+{4 * i}], %r1;")
    body.append("mov.pred %q1, %is_explicit_cluster; selp.u32 %r1, 1, 0, %q1; st.global.b32 [%d40+40], %r1;")
    yield Case(
        "cluster special registers",
        text.module("\n  ".join(body)),
        [np.zeros(64 * 8, np.uint8)],
        [Pointer(0)],
        grid=8,
        block=32,
        cluster=4,
    )


def _peer(into: str = "%r93", by: int = 1, size: int = 4) -> str:
    """The rank of another CTA of the cluster."""
    return f"add.u32 {into}, %r90, {by}; and.b32 {into}, {into}, {size - 1};"


def _shared() -> Iterator[Case]:
    """ld, st, atom and red of a peer's shared memory, by 32-bit and by generic addresses; mapa and getctarank."""
    text.restart_labels()
    body = _start()
    body += [_peer(), "mapa.shared::cluster.u32 %r1, %base, %r93;", "shl.b32 %r2, %t, 2; add.u32 %r3, %r1, %r2;"]
    body.append("mad.lo.u32 %r4, %r90, 1000, %t; st.shared::cluster.b32 [%r3+256], %r4;")
    body += [text.CLUSTER_SYNC, _peer("%r94", 2), "mapa.shared::cluster.u32 %r5, %base, %r94; add.u32 %r6, %r5, %r2;"]
    body.append("ld.shared::cluster.b32 %r7, [%r6+256]; add.u32 %r8, %base, %r2; st.shared.b32 [%r8+512], %r7;")
    body.append("getctarank.shared::cluster.u32 %r9, %r6; st.shared.b32 [%r8+768], %r9;")
    body.append(
        "cvt.u64.u32 %d1, %base; cvta.shared.u64 %d1, %d1; mapa.u64 %d2, %d1, %r94; "
        "cvt.u64.u32 %d3, %r2; add.u64 %d2, %d2, %d3;"
    )
    body.append("ld.b32 %r10, [%d2+256]; getctarank.u64 %r11, %d2; st.shared.b32 [%r8+1024], %r10;")
    body.append("st.shared.b32 [%r8+1280], %r11; isspacep.shared::cluster %q1, %d2; isspacep.shared::cta %q2, %d2;")
    body.append("selp.u32 %r12, 1, 0, %q1; selp.u32 %r13, 2, 0, %q2; or.b32 %r12, %r12, %r13;")
    body.append("st.shared.b32 [%r8+1536], %r12;")
    body += [text.CLUSTER_SYNC, *_finish()]

    def expected(_) -> dict[int, np.ndarray]:
        out = np.full((8, 512), text.POISON * 0x01010101, np.uint32)
        t = np.arange(64)
        for cta in range(8):
            rank = cta % 4
            out[cta, 64:128] = (rank - 1) % 4 * 1000 + t
            out[cta, 128:192] = out[cta, 256:320] = ((rank + 2) % 4 - 1) % 4 * 1000 + t
            out[cta, 192:256] = out[cta, 320:384] = (rank + 2) % 4
            out[cta, 384:448] = 1
        return {0: out.view(np.uint8).reshape(-1)}

    yield _case("ld and st", body, 4, 8, [], expected)
    for operation, kind in (("add", "u32"), ("min", "s32"), ("max", "u32"), ("xor", "b32"), ("add", "u64")):
        text.restart_labels()
        wide = kind.endswith("64")
        body = [*_start(), "mad.lo.u32 %r4, %r90, 1000003, %t; mul.lo.u32 %r4, %r4, 2654435761; cvt.u64.u32 %d4, %r4;"]
        # every CTA combines into the same words of CTA 0, then exchanges a word of its own with CTA 1's
        body.append("mapa.shared::cluster.u32 %r1, %base, 0; and.b32 %r2, %t, 7; shl.b32 %r2, %r2, 3;")
        body.append("add.u32 %r1, %r1, %r2;")
        body.append(f"red.relaxed.cluster.shared::cluster.{operation}.{kind} [%r1+128], {'%d4' if wide else '%r4'};")
        body.append("mapa.shared::cluster.u32 %r5, %base, 1; shl.b32 %r6, %t, 2; add.u32 %r5, %r5, %r6;")
        body.append("shl.b32 %r7, %r90, 8; add.u32 %r5, %r5, %r7; add.u32 %r8, %base, %r6;")
        body.append("atom.shared::cluster.exch.b32 %r9, [%r5+512], %r4; st.shared.b32 [%r8+256], %r9;")
        body += [text.CLUSTER_SYNC, *_finish()]
        yield _case(f"red {operation}.{kind} and exch", body, 2, 4, [])


def _async_stores() -> Iterator[Case]:
    """st.async and red.async to the next CTA, counted by its mbarrier."""
    narrow = (("b32", "%r4", 4), ("u64", "%d4", 8), ("v2.b32", "{%r4, %r5}", 8), ("f32", "%f4", 4))
    wide = (("v4.s32", "{%r4, %r5, %r6, %r7}", 16), ("v2.b64", "{%d4, %d5}", 16))
    for form, registers, size in (*narrow, *wide):
        text.restart_labels()
        body = _start()
        body.append(text.elected(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, {text.at(_BAR)}, {64 * size};"))
        body.append("mad.lo.u32 %r4, %r90, 1000, %t; add.u32 %r5, %r4, 65536; add.u32 %r6, %r5, 65536;")
        body.append("xor.b32 %r7, %r6, -1; mov.b64 %d4, {%r4, %r5}; mov.b64 %d5, {%r6, %r7}; mov.b32 %f4, %r4;")
        body += [_peer(size=2), "mapa.shared::cluster.u32 %r1, %base, %r93;", f"mad.lo.u32 %r1, %t, {size}, %r1;"]
        body.append(f"mapa.shared::cluster.u32 %r2, %base, %r93; add.u32 %r2, %r2, {_BAR};")
        body.append(f"st.async.shared::cluster.mbarrier::complete_tx::bytes.{form} [%r1+64], {registers}, [%r2];")
        body += [text.wait(_BAR), "bar.sync 0;", *_finish()]

        def expected(_, size=size) -> dict[int, np.ndarray]:
            out = np.full((4, 2048), text.POISON, np.uint8)
            for cta in range(4):
                a = (1 - cta % 2) * 1000 + np.arange(64, dtype=np.uint32)
                columns = np.stack([a, a + 65536, a + 131072, ~(a + np.uint32(131072))], 1)[:, : size // 4]
                out[cta, 64 : 64 + 64 * size] = np.ascontiguousarray(columns).view(np.uint8).reshape(-1)
            return {0: out.reshape(-1)}

        yield _case(f"st.async {form}", body, 2, 4, [], expected)
    forms = [("inc", "u32"), ("dec", "u32"), ("add", "s32"), ("add", "u64"), ("min", "u32"), ("max", "s32")]
    for operation, kind in (*forms, ("and", "b32"), ("or", "b32"), ("xor", "b32")):
        text.restart_labels()
        size = 8 if kind.endswith("64") else 4
        memory = data(64 * 8, 43)
        body = [*_start(), text.bring(0, 512, "%p1"), "bar.sync 0;", text.CLUSTER_SYNC]
        body.append(text.elected(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, {text.at(_BAR)}, {64 * size};"))
        body.append("mad.lo.u32 %r4, %r90, 1000003, %t; mul.lo.u32 %r4, %r4, 2654435761; mov.b64 %d4, {%r4, %r4};")
        body += [_peer(size=2), "mapa.shared::cluster.u32 %r1, %base, %r93;", f"mad.lo.u32 %r3, %t, {size}, %r1;"]
        body.append(
            f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{operation}.{kind} "
            f"[%r3], {'%d4' if size == 8 else '%r4'}, [%r1+{_BAR}];"
        )
        body += [text.wait(_BAR), "bar.sync 0;", *_finish()]
        yield _case(f"red.async {operation}.{kind}", body, 2, 2, [memory])


def _bulk() -> Iterator[Case]:
    """Bulk copies and reductions from one CTA's shared memory to another's."""
    for operation in (
        "",
        "add.u32",
        "add.s32",
        "add.u64",
        "min.s32",
        "max.u32",
        "inc.u32",
        "dec.u32",
        "and.b32",
        "xor.b32",
    ):
        text.restart_labels()
        memory = data(2048, 44)
        body = [*_start(), _peer(size=2), text.address(1024, "%p1", "%d1", "%r90"), text.bring(0, 1024, "%d1")]
        body += [text.PROXY_FENCE, "bar.sync 0;", text.CLUSTER_SYNC]
        issue = [
            f"mbarrier.arrive.expect_tx.shared::cta.b64 _, {text.at(_BAR)}, 480;",
            "mapa.shared::cluster.u32 %r1, %base, %r93;",
            ("cp.reduce.async.bulk" if operation else "cp.async.bulk")
            + ".shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
            + (f".{operation}" if operation else "")
            + f" [%r1+512], [%base+16], 480, [%r1+{_BAR}];",
        ]
        body += [text.elected(issue), text.wait(_BAR), "bar.sync 0;", *_finish()]

        def expected(_, memory=memory) -> dict[int, np.ndarray]:
            out = np.full((2, 2048), text.POISON, np.uint8)
            for cta in range(2):
                out[cta, :1024] = memory[1024 * cta : 1024 * cta + 1024]
                other = memory[1024 * (1 - cta) :]
                out[cta, 512:992] = other[16:496]
            return {0: out.reshape(-1)}

        yield _case(f"bulk {operation or 'copy'}", body, 2, 2, [memory], None if operation else expected)


def _remote_barriers() -> Iterator[Case]:
    """A consumer that releases its producer through a remote arrive, over several phases; cluster-scope waits."""
    text.restart_labels()
    rounds = 6
    # barrier 0 of CTA 0 counts 64 threads of each of 4 CTAs; barrier 0 of the others counts one arrive by CTA 0
    body = [_RANK, text.fill(0, 2048), "setp.eq.u32 %q1, %r90, 0; selp.u32 %r80, 256, 1, %q1;"]
    body.append(text.elected([f"mbarrier.init.shared.b64 {text.at(_BAR)}, %r80;", text.INIT_FENCE]))
    body += ["bar.sync 0;", text.CLUSTER_SYNC, "mapa.shared::cluster.u32 %r1, %base, 0; shl.b32 %r2, %t, 2;"]
    body += [
        "shl.b32 %r3, %r90, 8; add.u32 %r3, %r3, %r2; add.u32 %r4, %r1, %r3; mov.u32 %r5, 0; add.u32 %r12, %base, %r2;"
    ]
    body.append("LOOP:")
    body.append("mad.lo.u32 %r6, %r90, 100, %t; mad.lo.u32 %r6, %r5, 10000, %r6; st.shared::cluster.b32 [%r4], %r6;")
    body.append(f"mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1+{_BAR}];")
    body.append("and.b32 %r7, %r5, 1;")
    wait = text.wait(_BAR, "%r7", "try_wait.parity.acquire.cluster.shared::cta.b64")
    tell = []
    for rank in (1, 2, 3):
        tell.append(f"mapa.shared::cluster.u32 %r8, %base, {rank}; st.shared::cluster.b32 [%r8+64], %r10;")
        tell.append(f"mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8+{_BAR}];")
    gather = "ld.shared.b32 %r10, [%r12+256]; ld.shared.b32 %r11, [%r12+768]; add.u32 %r10, %r10, %r11;"
    body.append(text.only("%q1", [wait, gather, "bar.sync 1;", text.elected(tell)]))
    body.append("@%q1 bra NEXT;\n  " + wait)
    body.append("ld.shared.b32 %r10, [%base+64]; mad.lo.u32 %r13, %r5, 256, %r12; st.shared.b32 [%r13+512], %r10;")
    body.append("NEXT:\n  add.u32 %r5, %r5, 1;")
    body.append(f"setp.lt.u32 %q2, %r5, {rounds}; @%q2 bra LOOP;")
    body += ["bar.sync 0;", text.CLUSTER_SYNC, *_finish()]

    def expected(_) -> dict[int, np.ndarray]:
        out = np.full((4, 512), text.POISON * 0x01010101, np.uint32)
        t = np.arange(64)
        for rank in range(4):
            out[0, 64 * rank : 64 * rank + 64] = (rounds - 1) * 10000 + rank * 100 + t
        for rank in (1, 2, 3):
            # thread 0 of CTA 0 adds the words that ranks 1 and 3 gave it
            told = [2 * 10000 * k + 400 for k in range(rounds)]
            out[rank, 16] = told[-1]
            for k in range(rounds):
                out[rank, 128 + 64 * k : 192 + 64 * k] = told[k]
        return {0: out.view(np.uint8).reshape(-1)}

    yield _case("remote arrive", body, 4, 4, [], expected)
    text.restart_labels()
    body = [_RANK, text.fill(0, 2048), "bar.sync 0;", "shl.b32 %r2, %t, 2; add.u32 %r3, %base, %r2;"]
    body.append("barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;")
    for step in range(3):
        body += [_peer("%r93", step + 1), "mapa.shared::cluster.u32 %r1, %r3, %r93;"]
        body.append(f"mad.lo.u32 %r4, %r90, 16, {step}; st.shared::cluster.b32 [%r1+{256 * step}], %r4;")
        body.append("barrier.cluster.arrive.release; barrier.cluster.wait;")
        body.append(
            f"ld.shared.b32 %r5, [%r3+{256 * step}]; add.u32 %r5, %r5, %t; "
            f"st.shared.b32 [%r3+{1024 + 256 * step}], %r5;"
        )
    yield _case("barrier.cluster forms", [*body, text.CLUSTER_SYNC, *_finish()], 4, 4, [])
