"""mma.sync with block scales: fragments and selectors by the formulas of the ISA, products by exact numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from ptx_lab import launch_kernel, module

from cute_nvfp4.sim import UnsupportedInstruction

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BYTES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
#: (kind, scale_vec) -> shape, blocks along K, type of scales
FORMS = {
    ("mxf4nvf4", "4X"): ("m16n8k64", 4, "ue4m3"),
    ("mxf4nvf4", "2X"): ("m16n8k64", 2, "ue8m0"),
    ("mxf4", "2X"): ("m16n8k64", 2, "ue8m0"),
    ("mxf8f6f4", "1X"): ("m16n8k32", 1, "ue8m0"),
}


def text(kind: str, vector: str, a: str, b: str, selectors=(0, 0, 0, 0), scale: str = "") -> str:
    shape, _, kind_scale = FORMS[kind, vector]
    byte_a, thread_a, byte_b, thread_b = selectors
    return (
        f"mma.sync.aligned.{shape}.row.col.kind::{kind}.block_scale.scale_vec::{vector}.f32.{a}.{b}.f32."
        f"{scale or kind_scale} {{%r10, %r11, %r12, %r13}}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, "
        f"{{%r6, %r7, %r8, %r9}}, %r14, {{{byte_a}, {thread_a}}}, %r15, {{{byte_b}, {thread_b}}};"
    )


def run(instruction: str, a, b, c, sfa, sfb, target: str = "sm_120a") -> np.ndarray:
    """(32, 4) results of one warp from (32, n) words."""
    return run_warps(instruction, np.concatenate([a, b, c, sfa[:, None], sfb[:, None]], axis=1)[None], target)[0].view(
        "f4"
    )


def run_warps(instruction: str, words: np.ndarray, target: str = "sm_120a") -> np.ndarray:
    """(n, 32, 4) words that n warps get from (n, 32, 12): registers of A, B, C, scales of A and of B."""
    words = np.ascontiguousarray(words, dtype="u4")
    out = np.zeros((len(words), 32, 4), "u4")
    order = [*range(10), 14, 15]
    body = "mov.u32 %r30, %tid.x; mad.wide.u32 %rd1, %r30, 48, %p0; mad.wide.u32 %rd2, %r30, 16, %p1;"
    body += "".join(f"ld.global.b32 %r{r}, [%rd1+{4 * j}];" for j, r in enumerate(order))
    body += instruction + "".join(f"st.global.b32 [%rd2+{4 * j}], %r{10 + j};" for j in range(4))
    launch_kernel(module(body, 2).replace("sm_100a", target), [words, out], block=(32 * len(words), 1, 1))
    return out


def packed(rng, rows: int, k: int, elements: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes (rows, K) as the instruction has them in bytes or nibbles, and their values."""
    if k == 64:
        codes = rng.integers(0, 16, (rows, k))
        return codes, E2M1[codes]
    width = {"e4m3": 8, "e5m2": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4}[elements]
    # finite codes of moderate size, so that sums are exact
    codes = rng.integers(0, 1 << width, (rows, k)) & (0xBF if width == 8 else 0xFF)
    values = codes.astype("u1").view(BYTES[elements]).astype("f8")
    return (codes << 2 if width == 4 else codes), values


def fragment(codes: np.ndarray, rows_of, registers: int) -> np.ndarray:
    """Registers of lane 4 g + t: register r has row ``rows_of(g, r)`` and a 32-bit word along K."""
    k = codes.shape[1]
    each = 8 if k == 64 else 4
    out = np.zeros((32, registers), "u8")
    for lane in range(32):
        g, t = lane >> 2, lane & 3
        for r in range(registers):
            start = (k // 2) * (r >> 1 if registers == 4 else r) + t * each
            for j in range(each):
                out[lane, r] |= np.uint64(int(codes[rows_of(g, r), start + j]) << (32 // each * j))
    return out.astype("u4")


@pytest.mark.parametrize("kind,vector,a,b", [
    *((kind, vector, "e2m1", "e2m1") for kind, vector in FORMS if kind != "mxf8f6f4"),
    ("mxf8f6f4", "1X", "e4m3", "e5m2"),
    ("mxf8f6f4", "1X", "e2m1", "e3m2"),
    ("mxf8f6f4", "1X", "e2m3", "e4m3"),
])  # fmt: skip
def test_every_selector(kind: str, vector: str, a: str, b: str) -> None:
    rng = np.random.default_rng(7)
    shape, blocks, scale_type = FORMS[kind, vector]
    k = int(shape.split("k")[1])
    codes_a, values_a = packed(rng, 16, k, a)
    codes_b, values_b = packed(rng, 8, k, b)
    ra = fragment(codes_a, lambda g, r: g + 8 * (r & 1), 4)
    rb = fragment(codes_b, lambda g, r: g, 2)
    # small powers of two, and for E4M3 some with a mantissa; every byte of every lane is another number
    raw = (
        rng.integers(0x30, 0x48, (2, 32, 4)) if scale_type == "ue4m3" else rng.integers(122, 132, (2, 32, 4))
    ).astype("u1")
    scales = (
        raw.view(ml_dtypes.float8_e4m3fn).astype("f8") if scale_type == "ue4m3" else 2.0 ** (raw.astype("f8") - 127)
    )
    c = rng.integers(-20, 20, (16, 8)).astype("f4")
    at = [[((lane >> 2) + 8 * (i >> 1), (lane & 3) * 2 + (i & 1)) for i in range(4)] for lane in range(32)]
    rc = np.array([[c[p] for p in row] for row in at], "f4").view("u4")
    sf = np.ascontiguousarray(raw).view("u4").reshape(2, 32)
    for byte in range(0, 4, blocks):
        for thread_a in (0, 1):
            for thread_b in range(4):
                byte_b = 4 - blocks - byte
                found = run(text(kind, vector, a, b, (byte, thread_a, byte_b, thread_b)), ra, rb, rc, *sf)
                rows = [4 * (m % 8) + 2 * thread_a + m // 8 for m in range(16)]
                columns = [4 * n + thread_b for n in range(8)]
                sa = np.repeat(scales[0, rows, byte : byte + blocks], k // blocks, axis=1)
                sb = np.repeat(scales[1, columns, byte_b : byte_b + blocks], k // blocks, axis=1)
                want = (values_a * sa) @ (values_b * sb).T + c
                want = np.array([[want[p] for p in row] for row in at])
                assert np.array_equal(found, want.astype("f4"))


@pytest.mark.parametrize("kind,vector,selectors,what", [
    ("mxf4nvf4", "4X", (1, 0, 0, 0), "byte-id of a selector is 1, expected one of 0:"),
    ("mxf4nvf4", "4X", (0, 0, 2, 0), "byte-id of a selector is 2, expected one of 0:"),
    ("mxf4", "2X", (1, 0, 0, 0), "byte-id of a selector is 1, expected one of 0, 2:"),
    ("mxf8f6f4", "1X", (0, 2, 0, 0), "thread-id of a selector is 2, expected one of 0, 1:"),
    ("mxf8f6f4", "1X", (3, 0, 3, 4), "thread-id of a selector is 4, expected one of 0, 1, 2, 3:"),
])  # fmt: skip
def test_what_ptxas_refuses(kind: str, vector: str, selectors: tuple[int, ...], what: str) -> None:
    zeros = [np.zeros((32, n), "u4") for n in (4, 2, 4)]
    with pytest.raises(UnsupportedInstruction, match=what):
        run(text(kind, vector, "e2m1", "e2m1", selectors), *zeros, *np.zeros((2, 32), "u4"))


@pytest.mark.parametrize("kind,vector,scale", [("mxf4nvf4", "4X", "ue8m0"), ("mxf4", "2X", "ue4m3")])
def test_a_wrong_type_of_scales(kind: str, vector: str, scale: str) -> None:
    zeros = [np.zeros((32, n), "u4") for n in (4, 2, 4)]
    with pytest.raises(UnsupportedInstruction, match=r"expected one of \.ue"):
        run(text(kind, vector, "e2m1", "e2m1", scale=scale), *zeros, *np.zeros((2, 32), "u4"))


@pytest.mark.parametrize("target", ["sm_120", "sm_121", "sm_100a"])
def test_a_target_that_lacks_it(target: str) -> None:
    zeros = [np.zeros((32, n), "u4") for n in (4, 2, 4)]
    with pytest.raises(UnsupportedInstruction, match=f"needs one of sm_120a, .*this is {target}"):
        run(text("mxf4nvf4", "4X", "e2m1", "e2m1"), *zeros, *np.zeros((2, 32), "u4"), target=target)


@pytest.mark.parametrize("target, hint", [("sm_120a", "; its block-scaled products are mma.sync"), ("sm_90a", "")])
def test_tcgen05_on_a_target_without_tensor_memory(target: str, hint: str) -> None:
    ptx = module("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [cell], 32;", 0, ".shared .b32 cell;")
    with pytest.raises(UnsupportedInstruction, match=f"needs sm_100a or sm_103a, this is {target}{hint}"):
        launch_kernel(ptx.replace("sm_100a", target), [])


@pytest.mark.parametrize("kinds", [1, 5, 32])
@pytest.mark.parametrize("form", [("mxf4nvf4", "4X"), ("mxf4", "2X")])
def test_warps_with_the_same_fragments_and_with_others(form: tuple[str, str], kinds: int) -> None:
    """Whatever other warps have, each gets what it gets alone."""
    rng, warps = np.random.default_rng(kinds), 32
    of_a, of_b = rng.integers(kinds, size=warps), rng.integers(max(1, kinds // 2), size=warps)
    a, b = rng.integers(1 << 32, size=(kinds, 32, 5)), rng.integers(1 << 32, size=(kinds, 32, 3))
    # scales: finite, moderate
    a[..., 4], b[..., 2] = (rng.integers(0x70, 0x7E, (kinds, 32, 4)) @ (1 << 8 * np.arange(4)) for _ in range(2))
    c = rng.standard_normal((warps, 32, 4)).astype("f4").view("u4")
    words = np.concatenate([a[of_a, :, :4], b[of_b, :, :2], c, a[of_a, :, 4:], b[of_b, :, 2:]], axis=2).astype("u4")
    instruction = text(*form, "e2m1", "e2m1")
    together = run_warps(instruction, words)
    assert np.isfinite(together.view("f4")).all()
    for warp in range(0, warps, 5):
        assert (run_warps(instruction, words[warp : warp + 1]) == together[warp]).all()
