"""tcgen05.mma with block scaling: scale layouts of every kind and CTA group, missing copies, extreme scales."""

from __future__ import annotations

import numpy as np
import pytest

from cute_nvfp4.sim.tensor import instruction as idesc
from cute_nvfp4.sim.tensor.descriptor import decode
from cute_nvfp4.sim.tensor.mma import Spec
from tests.sim import tcgen05_lab as lab
from tests.sim.test_tcgen05_mma import A_AT, B_AT, block_bits, issue, starts

SCALED = [
    ("mxf8f6f4", "e4m3", "ue8m0", 32),
    ("mxf8f6f4", "e2m1", "ue8m0", 32),
    ("mxf8f6f4", "e3m2", "ue8m0", 32),
    ("mxf4", "e2m1x2", "ue8m0", 32),
    ("mxf4nvf4", "e2m1x2", "ue8m0", 32),
    ("mxf4nvf4", "e2m1x2", "ue8m0", 16),
    ("mxf4nvf4", "e2m1x2", "ue4m3", 16),
]


def scale_values(code, scale):
    return np.exp2(code.astype("f8") - 127) if scale == "ue8m0" else code.view(lab.FLOATS["e4m3"]).astype("f8")


def scaled_case(wave, kind, t, scale, block, m, n, group, ids, seed=1, low=120, high=134):
    """Operands and scales by the ISA's scale layouts: row m % 32 of every quarter, column m // 32, byte id + j."""
    rng = np.random.default_rng(seed)
    decoded = idesc.decode(block_bits(kind, t, t, m, n, scale, ids), kind, block, group, False)
    a, b = lab.codes(rng, t, (m, decoded.k)), lab.codes(rng, t, (n, decoded.k))
    own = m // group
    for j in range(group):
        da = lab.place(wave, j, A_AT, a[j * own : (j + 1) * own], t, "128B")
        db = lab.place(wave, j, B_AT, b[j * n // group : (j + 1) * n // group], t, "128B")
    low, high = (low, high) if scale == "ue8m0" else (0x20, 0x60)
    count = decoded.scales
    fa, fb = rng.integers(low, high, (m, count)).astype("u1"), rng.integers(low, high, (n, count)).astype("u1")
    raw = wave.tmem.view("u1").reshape(wave.count, 128, 512, 4)
    fold = group == 2 and m == 128
    for j in range(group):
        for r in range(own):
            for q in range(4):
                raw[j, 32 * q + r % 32, 300 + r // 32, ids[0] : ids[0] + count] = fa[j * own + r]
        for c in range(n):
            half = c // (n // 2) if fold else 0
            inside = c % (n // 2) if fold else c
            for q in (2 * half, 2 * half + 1) if fold else range(4):
                raw[j, 32 * q + inside % 32, 320 + inside // 32, ids[1] : ids[1] + count] = fb[c]
    wide_a, wide_b = np.repeat(scale_values(fa, scale), block, 1), np.repeat(scale_values(fb, scale), block, 1)
    exact = (lab.values(a, t) * wide_a) @ (lab.values(b, t) * wide_b).T
    spec = Spec(decoded, group, False, decode(da), decode(db))
    return spec, starts((da, db)), exact, ids


@pytest.mark.parametrize("kind,t,scale,block", SCALED)
@pytest.mark.parametrize("m,n,group", [(128, 64, 1), (128, 24, 1), (256, 128, 2), (128, 128, 2), (128, 256, 2)])
def test_block_scaled(kind, t, scale, block, m, n, group):
    wave = lab.machine(2, cluster=2)
    step = 64 // block if kind != "mxf8f6f4" else 1
    for ids in [(0, 0)] if step == 4 else [(0, step), (step, 0)]:
        wave.tmem[:] = 0
        spec, at, exact, ids = scaled_case(wave, kind, t, scale, block, m, n, group, ids)
        issue(wave, spec, *at, sfa=300, sfb=320, sf_ids=ids).run(wave)
        got = [wave.tmem[j].view("f4") for j in range(group)]
        if m // group == 128:
            got = np.concatenate([g[:, :n] for g in got])
        else:
            got = np.concatenate([np.concatenate([g[:64, : n // 2], g[64:, : n // 2]], 1) for g in got])
        # sums of exact products, rounded in f32
        bound = 64 * 2.0**-24 * np.abs(exact).max()
        assert np.abs(got - exact).max() <= bound


def test_every_quarter_reads_its_own_scales():
    """A copy missing in one quarter spoils just the rows of that quarter."""
    wave = lab.machine()
    spec, at, exact, ids = scaled_case(wave, "mxf4nvf4", "e2m1x2", "ue4m3", 16, 128, 64, 1, (0, 0))
    wave.tmem[0, 32:64, 320:322] = 0
    issue(wave, spec, *at, sfa=300, sfb=320, sf_ids=ids).run(wave)
    got = wave.tmem[0, :, :64].view("f4")
    assert not got[32:64].any()
    assert np.allclose(np.delete(got, range(32, 64), 0), np.delete(exact, range(32, 64), 0), rtol=1e-5, atol=1e-3)


def test_extreme_scales_meet_their_opposites():
    wave = lab.machine()
    spec, at, _, ids = scaled_case(wave, "mxf4", "e2m1x2", "ue8m0", 32, 128, 64, 1, (0, 0))
    raw = wave.tmem.view("u1").reshape(1, 128, 512, 4)
    raw[0, :, 300:304, :2], raw[0, :, 320:322, :2] = 254, 0
    issue(wave, spec, *at, sfa=300, sfb=320, sf_ids=ids).run(wave)
    rng = np.random.default_rng(1)
    a, b = lab.codes(rng, "e2m1x2", (128, 64)), lab.codes(rng, "e2m1x2", (64, 64))
    plain = lab.values(a, "e2m1x2") @ lab.values(b, "e2m1x2").T
    assert (wave.tmem[0, :, :64].view("f4") == plain).all()
