"""tcgen05.mma with K = 96 (sm_103a): rows of 48 bytes in circular buffers, three or six scales a row in two words.

The references follow the examples' use of the instruction: eight of them eat 384 bytes of K out of three buffers of
128 bytes, and their scales lie one after the other, four to a word.
"""

from __future__ import annotations

import numpy as np
import pytest

from cute_nvfp4.sim.errors import UnsupportedInstruction
from cute_nvfp4.sim.tcgen05 import instruction as idesc
from cute_nvfp4.sim.tcgen05.descriptor import DescriptorError, alike, decode, encode, start_of
from cute_nvfp4.sim.tcgen05.mma import Spec
from tests.simulator import tcgen05_lab as lab
from tests.simulator.test_tcgen05_mma import A_AT, B_AT, block_bits, issue, starts
from tests.simulator.test_tcgen05_scaled import scale_values

LONG = 1 << 31
STEPS = 8
SFA, SFB = 300, 400


def buffers(wave, cta, start, code):
    """Puts (rows, 768) codes into three buffers of 256 K elements and returns the eight descriptors."""
    rows, size = code.shape[0], code.shape[0] * 128
    data = lab.row_bytes(code, "e2m1x2")
    for j in range(3):
        _, sbo, _ = lab.place_k_major(wave.shared2d[cta], start + j * size, data[:, 128 * j : 128 * j + 128], "128B")
    out = []
    for step in range(STEPS):
        buffer, inside = divmod(48 * step, 128)
        following = start + min(buffer + 1, 2) * size
        out.append(encode(start + buffer * size + inside, "128B", following, sbo, absolute=True))
    assert rows % 8 == 0
    return out


def put_scales(wave, cta, column, codes):
    """(rows, scales) into all four quarters: scale j of row r is byte j % 4 of word j // 4; a word of all rows, counted
    in full hundreds and twenty-eights, follows the other."""
    raw = wave.tmem.view("u1").reshape(wave.count, 128, 512, 4)
    rows, count = codes.shape
    groups = (rows + 127) // 128
    for r in range(rows):
        for j in range(count):
            for quarter in range(4):
                raw[cta, 32 * quarter + r % 32, column + j // 4 * 4 * groups + r // 32, j % 4] = codes[r, j]


@pytest.mark.parametrize(
    "kind,scale,block", [("mxf4nvf4", "ue4m3", 16), ("mxf4nvf4", "ue8m0", 16), ("mxf4", "ue8m0", 32)]
)
@pytest.mark.parametrize("m,n,group", [(128, 128, 1), (128, 64, 1), (128, 192, 1), (256, 256, 2)])
def test_eight_instructions_from_three_buffers(kind, scale, block, m, n, group):
    wave, rng = lab.machine(2, cluster=2), np.random.default_rng(3)
    a, b = lab.codes(rng, "e2m1x2", (m, 768)), lab.codes(rng, "e2m1x2", (n, 768))
    low, high = (122, 132) if scale == "ue8m0" else (0x20, 0x60)
    fa = rng.integers(low, high, (m, 768 // block)).astype("u1")
    fb = rng.integers(low, high, (n, 768 // block)).astype("u1")
    own, part = m // group, n // group
    for j in range(group):
        da = buffers(wave, j, A_AT, a[j * own : (j + 1) * own])
        db = buffers(wave, j, B_AT, b[j * part : (j + 1) * part])
    each = 96 // block
    stage = 2 if block == 16 else 4
    for step in range(STEPS):
        first = step % stage * each
        if first == 0:
            columns = slice(step * each, (step + stage) * each)
            for j in range(group):
                put_scales(wave, j, SFA, fa[j * own : (j + 1) * own, columns])
                put_scales(wave, j, SFB, fb[:, columns])
        ids = first % 4, first % 4
        word = first // 4
        decoded = idesc.decode(block_bits(kind, "e2m1x2", "e2m1x2", m, n, scale, ids) | LONG, kind, block, group, False)
        assert (decoded.k, decoded.scales) == (96, each)
        spec = Spec(decoded, group, False, decode(da[step]), decode(db[step]))
        at = starts((da[step], db[step]))
        sfa, sfb = SFA + 4 * word, SFB + (n + 127) // 128 * 4 * word
        issue(wave, spec, *at, sfa=sfa, sfb=sfb, sf_ids=ids, enable=step > 0).run(wave)
    wide_a, wide_b = np.repeat(scale_values(fa, scale), block, 1), np.repeat(scale_values(fb, scale), block, 1)
    exact = (lab.values(a, "e2m1x2") * wide_a) @ (lab.values(b, "e2m1x2") * wide_b).T
    got = np.concatenate([wave.tmem[j].view("f4")[:, :n] for j in range(group)])
    assert np.abs(got - exact).max() <= 768 * 2.0**-24 * np.abs(exact).max()


def test_scale_ids_and_kinds():
    for block, ids in ((16, (1, 0)), (16, (0, 3))):
        with pytest.raises(DescriptorError, match="multiples of 2"):
            bits = block_bits("mxf4nvf4", "e2m1x2", "e2m1x2", 128, 64, "ue4m3", ids) | LONG
            idesc.decode(bits, "mxf4nvf4", block, 1, False)
    for j in range(4):
        bits = block_bits("mxf4", "e2m1x2", "e2m1x2", 128, 64, "ue8m0", (j, j)) | LONG
        assert idesc.decode(bits, "mxf4", 32, 1, False).scales == 3
    with pytest.raises(DescriptorError, match="K = 96"):
        idesc.decode(block_bits("mxf8f6f4", "e4m3", "e4m3", 128, 64, "ue8m0", (0, 0)) | LONG, "mxf8f6f4", 32, 1, False)


@pytest.mark.parametrize("layout,absolute,start", [("64B", True, 0), ("128B", False, 96)])
def test_what_is_not_modelled_is_refused(layout, absolute, start):
    wave = lab.machine()
    decoded = idesc.decode(
        block_bits("mxf4", "e2m1x2", "e2m1x2", 128, 64, "ue8m0", (0, 0)) | LONG, "mxf4", 32, 1, False
    )
    desc = encode(A_AT + start, layout, A_AT, 1024, absolute=absolute)
    spec = Spec(decoded, 1, False, decode(desc), decode(desc))
    with pytest.raises(UnsupportedInstruction, match="K = 96"):
        issue(wave, spec, *starts((desc, desc)), sfa=SFA, sfb=SFB, sf_ids=(0, 0)).run(wave)


def test_footprints_hold_the_next_buffer_and_both_words():
    wave = lab.machine()
    bits = block_bits("mxf4nvf4", "e2m1x2", "e2m1x2", 128, 64, "ue4m3", (2, 2)) | LONG
    decoded = idesc.decode(bits, "mxf4nvf4", 16, 1, False)
    da = encode(A_AT + 96, "128B", A_AT + 16384, 1024, absolute=True)
    db = encode(B_AT, "128B", B_AT, 1024, absolute=True)
    one = issue(
        wave, Spec(decoded, 1, False, decode(da), decode(db)), *starts((da, db)), sfa=SFA, sfb=SFB, sf_ids=(2, 2)
    )
    a, b = (f.place for f in one.footprints(wave) if f.space == "shared")
    assert (a[0] < A_AT + 16384).sum() == 2 * 128 and (a[0] >= A_AT + 16384).sum() == 128
    assert b.shape[1] == 3 * 64
    columns = [f.place.columns[0].tolist() for f in one.footprints(wave) if f.space == "tensor" and not f.write]
    assert list(range(SFA, SFA + 8)) in columns and list(range(SFB, SFB + 6)) in columns


def test_descriptors_with_an_address_are_alike_only_at_the_same_start():
    relative = np.array([encode(4096, "128B", 0, 1024), encode(8192, "128B", 0, 1024)], "u8")
    absolute = np.array([encode(s, "128B", 16384, 1024, absolute=True) for s in (4096, 8192)], "u8")
    assert len(set(alike(relative).tolist())) == 1 and len(set(alike(absolute).tolist())) == 2
    assert start_of(absolute).tolist() == [4096, 8192] and decode(int(absolute[1])).lbo == 8192
