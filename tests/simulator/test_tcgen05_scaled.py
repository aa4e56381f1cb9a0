"""tcgen05.mma with block scaling: scale layouts of every kind and CTA group, missing copies, extreme scales."""

from __future__ import annotations

import numpy as np
import pytest

from cute_nvfp4.sim.tcgen05 import instruction as idesc
from cute_nvfp4.sim.tcgen05.descriptor import DescriptorError, decode
from cute_nvfp4.sim.tcgen05.mma import Spec
from tests.simulator import tcgen05_lab as lab
from tests.simulator.test_tcgen05_mma import A_AT, B_AT, block_bits, issue, starts

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


@pytest.mark.parametrize("kind,block", [("mxf4", 32), ("mxf4nvf4", 16)])
def test_sparsity_version_of_dense_operands_does_not_matter(kind, block):
    """Bits 7 to 9 are the type of A, bits 10 and 11 that of B, and E2M1 is 1 for both; 5 is its code in the 8-bit
    kinds. Bits 3 and 6 are reserved."""
    scale = "ue8m0" if kind == "mxf4" else "ue4m3"
    bits = block_bits(kind, "e2m1x2", "e2m1x2", 128, 256, scale)
    assert idesc.decode(bits | 1 << 12, kind, block, 2, False) == idesc.decode(bits, kind, block, 2, False)
    for wrong in (bits | 1 << 3, bits | 1 << 6, bits | 1 << 11, bits & ~(1 << 10)):
        with pytest.raises(DescriptorError, match=r"reserved|do not exist"):
            idesc.decode(wrong, kind, block, 2, False)
    with pytest.raises(DescriptorError, match=r"codes 5 \(A\) and 1 \(B\) do not exist here: 1 is e2m1"):
        idesc.decode(bits | 1 << 9, kind, block, 2, False)


@pytest.mark.parametrize("version", [0, 1])
def test_the_descriptor_that_nvidias_builder_makes(version):
    """With its default, a sparsity version of 1, the three bits from 10 on read 5: B's type is the lower two."""
    import cutlass
    from cutlass.experimental.primitives import Tcgen05MxOmmaInstrDesc

    e2m1, shape = cutlass.Float4E2M1FN, {"n_dim": 256, "m_dim": 128}
    built = Tcgen05MxOmmaInstrDesc.build(a_dtype=e2m1, b_dtype=e2m1, scale_format=0, sparsity_version=version, **shape)
    assert int(built) >> 10 & 7 == (5 if version else 1)
    d = idesc.decode(int(built), "mxf4nvf4", 16, 1, False)
    assert (d.a, d.b, d.m, d.n, d.k, d.scale) == ("e2m1x2", "e2m1x2", 128, 256, 64, "ue4m3")


def test_type_of_b_has_three_bits_where_types_are_mixed():
    """Code 5 of kind::mxf8f6f4 is E2M1; 6 does not exist."""
    bits = block_bits("mxf8f6f4", "e5m2", "e2m1", 128, 64, "ue8m0")
    assert idesc.decode(bits, "mxf8f6f4", 32, 1, False).b == "e2m1"
    with pytest.raises(DescriptorError, match=r"type codes 1 \(A\) and 6 \(B\)"):
        idesc.decode(bits & ~(7 << 10) | 6 << 10, "mxf8f6f4", 32, 1, False)


def test_the_descriptor_of_cutlass_nvfp4_pair_example():
    """2cta_mma_blockscale_m128.py: M = 128 of a pair, N = 256, UE4M3 scales."""
    d = idesc.decode(0x08401480, "mxf4nvf4", 16, 2, False)
    assert (d.a, d.b, d.m, d.n, d.k, d.scale) == ("e2m1x2", "e2m1x2", 128, 256, 64, "ue4m3")
