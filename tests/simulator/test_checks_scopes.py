"""Scopes of releases, acquires, fences and atomics: one that leaves the other thread out orders nothing."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import launch_kernel, module, wait
from test_checks import CLUSTER, FLAG, GRID, MEMORY, THREAD, go
from test_checks_cluster_start import MEET, PEER_BARRIER
from test_checks_findings import result
from tma_lab import aligned

from cute_nvfp4.sim import MissingProxyFence, Race
from cute_nvfp4.sim.tma import TensorMap

PAIR = {"grid": (4, 1, 1), "cluster": (2, 1, 1)}
RELEASE, ACQUIRE = "st.release.{}.global.b32 [%p0+512], 1;", "ld.acquire.{}.global.b32 %r13, [%p0+512];"
FENCED = "fence.acq_rel.{}; @%q1 st.relaxed.{}.global.b32 [%p0+512], 1;"
FENCED_READ = "ld.relaxed.{}.global.b32 %r13, [%p0+512]; fence.acq_rel.{};"
NARROW = [
    (RELEASE.format("{0}"), ACQUIRE.format("gpu")),
    (RELEASE.format("gpu"), ACQUIRE.format("{0}")),
    (FENCED.format("{0}", "gpu"), ACQUIRE.format("gpu")),
    (FENCED.format("gpu", "{0}"), ACQUIRE.format("gpu")),
    (RELEASE.format("gpu"), FENCED_READ.format("{0}", "gpu")),
    (RELEASE.format("gpu"), FENCED_READ.format("gpu", "{0}")),
    ("red.release.{0}.global.add.u32 [%p0+512], 1;", ACQUIRE.format("gpu")),
    ("membar.{0}; @%q1 st.volatile.global.b32 [%p0+512], 1;", ACQUIRE.format("gpu")),
]


def races(body: str, strict: bool = False, **options) -> bool:
    try:
        go(body, strict=strict, **options)
    except Race:
        return True
    return False


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("release,acquire", NARROW, ids=[f"{a} {b}" for a, b in NARROW])
def test_flags_between_ctas(release: str, acquire: str, strict: bool) -> None:
    """CTA 0 tells CTA 1, which is in no cluster with it; then in one, where ``.cluster`` will do."""
    body = FLAG.format(release=release, acquire=acquire)
    wide = body.replace("membar.{0}", "membar.gl")
    assert not races(wide.replace("{0}", "gpu"), strict, **GRID)
    assert not races(wide.replace("{0}", "sys"), strict, **GRID)
    assert races(body.replace("{0}", "cta"), strict, **GRID)
    if "membar" not in release:
        assert races(body.replace("{0}", "cluster"), strict, **GRID)
        assert not races(body.replace("{0}", "cluster"), strict, **CLUSTER)
    assert races(body.replace("{0}", "cta"), strict, **CLUSTER)


def test_flags_in_a_cta() -> None:
    """Warp 0 tells warp 1."""
    body = "@!%q2 bra B; st.global.b32 [%rd2], 5; bar.warp.sync -1; @%q1 {} bra E; B: {} setp.eq.u32 %q4, %r13, 0;"
    body += "@%q4 bra B; bar.warp.sync -1; ld.global.b32 %r12, [%rd2+-128]; E:"
    for scope in ("cta", "cluster", "gpu", "sys"):
        assert not races(body.format(RELEASE.format(scope), ACQUIRE.format(scope)), block=64)
        relaxed = RELEASE.format(scope).replace("release", "relaxed")
        assert races(body.format(relaxed, ACQUIRE.format(scope)), block=64)


def test_one_way_fences() -> None:
    """fence.release prepares, and takes nothing; fence.acquire takes, and prepares nothing."""
    good = FLAG.format(release=FENCED.format("gpu", "gpu"), acquire=FENCED_READ.format("gpu", "gpu"))
    first, second = good.index("fence.acq_rel"), good.rindex("fence.acq_rel")
    for at, way in ((first, "release"), (second, "acquire")):
        other = {"release": "acquire", "acquire": "release"}[way]
        assert not races(good[:at] + good[at:].replace("acq_rel", way, 1), **GRID)
        assert races(good[:at] + good[at:].replace("acq_rel", other, 1), **GRID)


@pytest.mark.parametrize(
    "atomic", ["red.relaxed.{}.global.add.u32 [%p0], 1;", "st.relaxed.{}.global.b32 [%p0], 1;"], ids=["add", "store"]
)
def test_strong_accesses_of_two_ctas(atomic: str) -> None:
    """They do not race if their scopes have both CTAs; in one CTA any scope will do."""
    one = f"@%q1 {atomic}"
    assert not races(one.format("gpu"), **GRID) and not races(one.format("cluster"), **CLUSTER)
    assert races(one.format("cta"), **GRID) and races(one.format("cluster"), **PAIR)
    assert not races(atomic.format("cta"), block=64)


READS = {"weak": "ld{}.b32 %r13, [%p0];", "relaxed": "ld.relaxed.gpu{}.b32 %r13, [%p0];"}
READS["narrow"] = READS["relaxed"].replace("gpu", "cta")


@pytest.mark.parametrize("then", ["relaxed", "narrow", "weak"])
@pytest.mark.parametrize("first", ["weak", "narrow", "relaxed"])
def test_a_strong_read_hides_no_weaker_one(first: str, then: str) -> None:
    """CTA 0 reads a word twice that CTA 1 stores, for the last time after a release that CTA 1 acquires or not."""
    body = "@!%q1 bra E; @!%q3 bra B; FIRST {} THEN bra E; B: {} st.relaxed.gpu.global.b32 [%p0], 7; E:"
    body = "@%q3 st.relaxed.gpu.global.b32 [%p0+256], 1;" + body
    first, then = (READS[one].format(".global") for one in (first, then))
    told = RELEASE.format("gpu"), "L: " + ACQUIRE.format("gpu") + "setp.eq.u32 %q4, %r13, 0; @%q4 bra L;"
    relaxed = tuple(one.replace("release", "relaxed").replace("acquire", "relaxed") for one in told)
    body = body.replace("FIRST", first).replace("THEN", then)
    strong = READS["relaxed"].format(".global")
    assert races(body.format(*told), **GRID) == (then != strong)
    assert races(body.format(*relaxed), **GRID) == (first != strong or then != strong)


REMOTE = "@%q1 mbarrier.init.shared.b64 [bar], 32; fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed;"
REMOTE += "barrier.cluster.wait; mov.u32 %r20, bar; mapa.shared::cluster.u32 %r15, %r7, 1;" + PEER_BARRIER
REMOTE += "setp.eq.u32 %q4, %r19, 1; @%q4 bra A; st.shared::cluster.b32 [%r15], %r1; GIVE bra E; A: TAKE"
REMOTE += " ld.shared.b32 %r12, [%r7]; E:" + MEET
GIVE, TAKE = "mbarrier.arrive{}.shared::cluster.b64 _, [%r14];", wait("%r20", "0")


def told(give: str, take: str = TAKE) -> str:
    """CTA 0 stores to CTA 1 and tells it by an mbarrier there."""
    return REMOTE.replace("GIVE", give).replace("TAKE", take)


def test_arrivals_at_another_cta() -> None:
    assert not races(told(GIVE.format(".release.cluster")), **CLUSTER)
    assert races(told(GIVE.format(".release.cta")), **CLUSTER)
    fence = "fence.acq_rel.{};" + GIVE.format(".relaxed.cluster")
    assert not races(told(fence.format("cluster")), **CLUSTER)
    assert races(told(fence.format("cta")), **CLUSTER) and races(told(GIVE.format(".relaxed.cluster")), **CLUSTER)


def test_relaxed_waits_for_another_cta() -> None:
    give, relaxed = GIVE.format(".release.cluster"), TAKE.replace("parity", "parity.relaxed.cluster")
    assert not races(told(give, relaxed + "fence.acq_rel.cluster;"), **CLUSTER)
    assert races(told(give, relaxed + "fence.acq_rel.cta;"), **CLUSTER) and races(told(give, relaxed), **CLUSTER)


def test_scopes_that_are_not_written_are_warnings_when_strict() -> None:
    """Arrivals and waits have the scope of the CTA then, and NVIDIA's kernels rely on more."""
    wide = TAKE.replace("parity", "parity.acquire.cluster")

    def rules(give: str, take: str, strict: bool) -> list[str]:
        return [f.rule for f in result(told(GIVE.format(give), take), strict=strict, **CLUSTER).findings]

    assert rules("", TAKE, False) == rules(".release.cluster", wide, True) == []
    assert rules("", wide, True) == rules(".release.cluster", TAKE, True) == ["mbarrier-scope"]
    assert rules("", TAKE, True) == 2 * ["mbarrier-scope"]
    assert rules(".release.cluster", wide.replace("cluster", "cta"), False) == []


def test_waits_for_stores_of_another_cta() -> None:
    """st.async of CTA 0 signals CTA 1, whose wait must have the cluster's scope."""
    body = REMOTE.replace("[bar], 32", "[bar], 1").replace("st.shared::cluster.b32 [%r15], %r1; GIVE", "STORE")
    store = "@%q1 st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r15], %r1, [%r14];"
    body = body.replace("STORE", store).replace("ld.shared.b32 %r12, [%r7];", "@%q1 ld.shared.b32 %r12, [cell];")
    body = body.replace("TAKE", "@%q1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 4; TAKE")
    for wide in (True, False):
        take = TAKE.replace("parity", f"parity.acquire.{'cluster' if wide else 'cta'}")
        found = [f.rule for f in result(body.replace("TAKE", take), strict=True, **CLUSTER).findings]
        assert found == ([] if wide else ["mbarrier-scope"])
        assert result(body.replace("TAKE", take), **CLUSTER).findings == ()


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("adds_first", [True, False])
def test_reductions_of_two_ctas(adds_first: bool, block: int) -> None:
    """red.async of CTA 0 or CTA 1 adds to a word of CTA 1, as an atomic of CTA 1 does."""
    body = "@%q1 mbarrier.init.shared.b64 [bar], 1; @%q1 st.shared.b32 [cell], 0; mov.u32 %r20, bar;"
    body += f"@%q1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 4; fence.mbarrier_init.release.cluster; {MEET}"
    body += "mapa.shared::cluster.u32 %r15, %r4, 1; mapa.shared::cluster.u32 %r14, %r20, 1;"
    body += "setp.eq.and.u32 %q4, %r19, 1, %q1; setp.eq.and.u32 %q5, %r19, ADDER, %q1;"
    add = "@%q5 red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r15], 1, [%r14];"
    both = add, "@%q4 red.relaxed.SCOPE.shared::cta.add.u32 [cell], 1;"
    body += "".join(both if adds_first else both[::-1])
    body += f"setp.ne.u32 %q5, %r19, 1; @%q5 bra E; {wait('%r20', '0')} E: {MEET}"
    for adder, scope, race in (("1", "cta", 0), ("0", "cluster", 0), ("0", "cta", 1)):
        assert races(body.replace("ADDER", adder).replace("SCOPE", scope), block=block, **CLUSTER) == race


def test_a_fence_before_a_relaxed_arrival_at_the_cluster() -> None:
    """As in the ISA's example of barrier.cluster."""
    body = f"mapa.shared::cluster.u32 %r14, %r7, 1; {MEET} setp.eq.u32 %q4, %r19, 0;"
    body += "@%q4 st.shared::cluster.b32 [%r14], 1; FENCE barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
    body += "@!%q4 ld.shared.b32 %r12, [%r7];"
    assert not races(body.replace("FENCE", "fence.acq_rel.cluster;"), **CLUSTER)
    assert races(body.replace("FENCE", "fence.acq_rel.cta;"), **CLUSTER)
    assert races(body.replace("FENCE", ""), **CLUSTER)


MAP = (
    """@!%q3 bra B; add.u32 %r13, %r4, %r6; ld.global.b32 %r14, [%rd2]; st.shared.b32 [%r13], %r14; bar.warp.sync -1;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.RELEASE.sync.aligned [%p0], [%r4], 128;
    @%q1 st.release.gpu.global.b32 [%p0+512], 1; bra E;
    B: ld.acquire.gpu.global.b32 %r13, [%p0+512]; setp.eq.u32 %q4, %r13, 0; @%q4 bra B;
    fence.proxy.tensormap::generic.acquire.ACQUIRE [%p0], 128; mov.u32 %r20, bar;
    @%q1 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster; bar.warp.sync -1;
    @%q1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
    @%q1 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [other], [%p0, {%r2, %r2}], [bar];
    """
    + wait("%r20", "0")
    + "E:"
)


@pytest.mark.parametrize(
    "release,acquire,good", [("gpu", "gpu", 1), ("gpu", "cta", 0), ("cta", "gpu", 0), ("sys", "gpu", 1)]
)
def test_tensor_maps(release: str, acquire: str, good: int) -> None:
    """CTA 0 changes a map that CTA 1 uses."""
    data = aligned(bytes(4096))
    held = aligned(TensorMap(data.ctypes.data, "f16", (16, 2), (64,), (16, 8), (1, 1)).encode() + bytes(1024))
    text = MAP.replace("RELEASE", release).replace("ACQUIRE", acquire).replace("{%r2, %r2}", "{%s1, %s1}")
    declare = MEMORY.replace(".align 16 .b8 cell", ".align 128 .b8 cell").replace(
        ".align 16 .b8 other", ".align 128 .b8 other"
    )
    text = module(THREAD + "mov.u32 %s1, 0;" + text, 2, declare, 1)

    def launch() -> None:
        launch_kernel(text, [held, data], [np.uint32(0).tobytes()], grid=(2, 1, 1), checks=True)

    if good:
        launch()
        return
    with pytest.raises(MissingProxyFence, match="includes the other thread"):
        launch()
