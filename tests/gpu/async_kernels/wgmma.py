"""Warpgroup matrix instructions: one wgmma, or two over adjacent slices of K, from images of shared memory.

The images hold small integers, so that sums are exact in any order, or random floats ("real"), whose sums are not
specified to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from . import text
from .case import Case, Pointer
from .tile_model import swizzled

#: type -> (bytes, instruction's K)
_TYPES = {
    "f16": (2, 16),
    "bf16": (2, 16),
    "tf32": (4, 8),
    "e4m3": (1, 32),
    "e5m2": (1, 32),
    "s8": (1, 32),
    "u8": (1, 32),
}
_SPAN = {0: 16, 1: 32, 2: 64, 3: 128}
#: our swizzle -> field of the matrix descriptor
_LAYOUT = {0: 0, 1: 3, 2: 2, 3: 1}
_A, _B, _SIZE = 0, 8192, 16384


@dataclass(frozen=True)
class Form:
    name: str
    type: str = "f16"
    accumulator: str = "f32"
    n: int = 32
    swizzle: int = 3
    a_mn: bool = False
    b_mn: bool = False
    a_registers: bool = False
    scale_a: int = 1
    scale_b: int = 1
    accumulate: bool = True
    steps: int = 1
    real: bool = False
    b_type: str = ""
    satfinite: bool = False

    @property
    def right(self) -> str:
        return self.b_type or self.type


def strides(form: Form, mn_major: bool) -> tuple[int, int]:
    """(leading, stride) byte offsets of a matrix descriptor (PTX ISA, "Strides" of asynchronous warpgroup matrices)."""
    if not mn_major:
        return (128, 256) if form.swizzle == 0 else (16, 8 * _SPAN[form.swizzle])
    if form.swizzle == 0:
        return 1024, 128
    # along M or N, along K: 16-bit types, one instruction has two atoms along K
    return 2048 if form.swizzle == 3 else 1024, 8 * _SPAN[form.swizzle]


def place(form: Form, start: int, mn: int, byte: int, mn_major: bool) -> int:
    """Where the element (row or column mn, first byte of its K) lies in shared memory."""
    leading, stride = strides(form, mn_major)
    if not mn_major:
        if form.swizzle == 0:
            return start + mn // 8 * stride + mn % 8 * 16 + byte // 16 * leading + byte % 16
        return swizzled(start + mn // 8 * stride + mn % 8 * _SPAN[form.swizzle] + byte, form.swizzle)
    size = _TYPES[form.type][0]
    k, span = byte // size, _SPAN[form.swizzle]
    atom = span // size
    if form.swizzle == 0:
        return start + mn // atom * stride + k // 8 * leading + k % 8 * 16 + mn % atom * size
    inner = k // 8 * stride + k % 8 * span + mn % atom * size
    return swizzled(start + mn // atom * leading + inner, form.swizzle)


def advance(form: Form, mn_major: bool) -> int:
    """Bytes from one K slice to the next."""
    if form.swizzle == 0:
        return 2 * strides(form, mn_major)[0]
    return 2 * strides(form, mn_major)[1] if mn_major else 32


def descriptor(form: Form, offset: int, mn_major: bool) -> list[str]:
    """%d20 = the matrix descriptor of what begins at byte ``offset`` of shared memory."""
    leading, stride = strides(form, mn_major)
    fixed = leading >> 4 << 16 | stride >> 4 << 32 | _LAYOUT[form.swizzle] << 62
    signed = fixed - (1 << 64) if fixed >> 63 else fixed
    return [f"add.u32 %r250, %base, {offset}; shr.u32 %r250, %r250, 4; cvt.u64.u32 %d20, %r250;",
            f"mov.b64 %d21, {signed}; or.b64 %d20, %d20, %d21;"]  # fmt: skip


def image(type_: str, real: bool, seed: int) -> np.ndarray:
    """8192 bytes of operands."""
    rng = np.random.default_rng(seed)
    size = _TYPES[type_][0]
    count = 8192 // size
    if type_ in ("s8", "u8"):
        return rng.integers(0, 256, count, dtype=np.uint8)
    if type_ in ("e4m3", "e5m2"):
        if real:
            # everything but infinities and NaNs
            bits = rng.integers(0, 0x7C if type_ == "e5m2" else 0x7F, count) | rng.integers(0, 2, count) << 7
            return bits.astype(np.uint8)
        codes = {"e4m3": [0, 0x38, 0x40, 0x44, 0x48, 0x30], "e5m2": [0, 0x3C, 0x40, 0x42, 0x44, 0x38]}[type_]
        return (rng.choice(codes, count) | rng.integers(0, 2, count) << 7).astype(np.uint8)
    floats = rng.standard_normal(count) if real else rng.integers(-4, 5, count)
    if type_ == "f16":
        return floats.astype(np.float16).view(np.uint8)
    bits = floats.astype(np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16).view(np.uint8) if type_ == "bf16" else bits.view(np.uint8)


def decode(raw: bytes, type_: str) -> float:
    """The value of one element; tf32 operands are used with the low 13 bits ignored."""
    bits = int.from_bytes(raw, "little")
    if type_ == "f16":
        return float(np.uint16(bits).view(np.float16))
    if type_ in ("bf16", "tf32"):
        return float(np.uint32(bits << 16 if type_ == "bf16" else bits & 0xFFFFE000).view(np.float32))
    if type_ in ("s8", "u8"):
        return bits - 256 * (type_ == "s8" and bits > 127)
    mantissa = {"e4m3": 3, "e5m2": 2}[type_]
    bias = {"e4m3": 7, "e5m2": 15}[type_]
    exponent, fraction = bits >> mantissa & (15 if type_ == "e4m3" else 31), bits & (1 << mantissa) - 1
    value = fraction / (1 << mantissa) * 2.0 ** (1 - bias)
    if exponent:
        value = (1 + fraction / (1 << mantissa)) * 2.0 ** (exponent - bias)
    return -value if bits >> 7 else value


def operands(form: Form, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A (64, K) and B (N, K) over all steps."""
    size, k = _TYPES[form.type]
    shared = np.concatenate([a, b])
    found = []
    for start, count, mn_major, type_ in ((_A, 64, form.a_mn, form.type), (_B, form.n, form.b_mn, form.right)):
        matrix = np.zeros((count, k * form.steps))
        for i in range(count):
            for j in range(k * form.steps):
                if start == _A and form.a_registers:
                    at = i * 32 + j // k * 2048 + j % k * size
                else:
                    at = place(form, start + j // k * advance(form, mn_major), i, j % k * size, mn_major)
                matrix[i, j] = decode(shared[at : at + size].tobytes(), type_)
        found.append(matrix)
    return found[0], found[1]


def fragments(matrix: np.ndarray) -> np.ndarray:
    """(64, N) results in the order of threads and registers: (128, N / 2)."""
    t, i = np.arange(128)[:, None], np.arange(matrix.shape[1] // 2)[None]
    row = 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2)
    return matrix[row, 8 * (i // 4) + 2 * (t % 4) + i % 2]


def cases() -> Iterator[Case]:
    for form in _forms():
        yield case(form)


def _forms() -> Iterator[Form]:
    for swizzle in range(4):
        yield Form(f"f16 K-major swizzle {swizzle}", swizzle=swizzle, steps=2)
        yield Form(f"bf16 B MN-major swizzle {swizzle}", "bf16", swizzle=swizzle, b_mn=True, n=64)
        yield Form(f"f16 A MN-major swizzle {swizzle}", swizzle=swizzle, a_mn=True)
    yield Form("f16 both MN-major two steps", a_mn=True, b_mn=True, steps=2, n=64)
    yield Form("f16 into f16", accumulator="f16")
    yield Form("f16 without D, negated", accumulate=False, scale_a=-1)
    yield Form("bf16 both negated", "bf16", scale_a=-1, scale_b=-1)
    yield Form("f16 A in registers", a_registers=True, steps=2)
    yield Form("tf32", "tf32", steps=2)
    yield Form("tf32 A in registers", "tf32", a_registers=True)
    yield Form("e4m3", "e4m3", steps=2)
    yield Form("e4m3 by e5m2 into f16", "e4m3", "f16", b_type="e5m2")
    yield Form("e5m2 A in registers", "e5m2", a_registers=True)
    yield Form("s8", "s8", "s32", steps=2)
    yield Form("u8 by s8 satfinite", "u8", "s32", b_type="s8", satfinite=True)
    yield Form("f16 n 8", n=8)
    yield Form("f16 n 64 64-byte rows", n=64, swizzle=2)
    for type_, accumulator in (
        ("f16", "f32"),
        ("f16", "f16"),
        ("bf16", "f32"),
        ("tf32", "f32"),
        ("e4m3", "f32"),
        ("e5m2", "f32"),
    ):
        yield Form(f"real {type_} into {accumulator}", type_, accumulator, real=True)


def case(form: Form) -> Case:
    text.restart_labels()
    a, b = image(form.type, form.real, 91), image(form.right, form.real, 92)
    _, k = _TYPES[form.type]
    words = form.n // 2 if form.accumulator != "f16" else form.n // 4
    rng = np.random.default_rng(93)
    start = rng.standard_normal((64, form.n)) if form.real else rng.integers(-99, 100, (64, form.n))
    number = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[form.accumulator]
    start = start.astype(number)
    body = [text.bring(_A, 8192, "%p1"), text.bring(_B, 8192, "%p2"), text.PROXY_FENCE, "bar.sync 0;"]
    body += [text.address(4 * words, "%p0", "%d1"), f"setp.eq.u32 %q1, 1, {int(form.accumulate)};"]
    body += [f"ld.global.b32 %r{i + 1}, [%d1+{4 * i}];" for i in range(words)]
    kind = "b" if form.accumulator == "f16" else {"f32": "f", "s32": "r"}[form.accumulator]
    names = [f"%r{i + 1}" for i in range(words)]
    declarations = ""
    if kind == "f":
        body.append(f".reg .f32 %acc<{words}>;")
        body += [f"mov.b32 %acc{i}, %r{i + 1};" for i in range(words)]
        names = [f"%acc{i}" for i in range(words)]
    if form.a_registers:
        body.append("shr.u32 %r240, %t, 5; and.b32 %r241, %t, 31; shr.u32 %r242, %r241, 2; and.b32 %r243, %r241, 3;")
        body.append(
            "mad.lo.u32 %r242, %r240, 16, %r242; mul.lo.u32 %r242, %r242, 32; mad.lo.u32 %r242, %r243, 4, %r242;"
        )
        body.append("add.u32 %r242, %r242, %base;")
        for step in range(form.steps):
            for j in range(4):
                offset = j % 2 * 256 + j // 2 * 16 + 2048 * step
                body.append(f"ld.shared.b32 %r{230 + 4 * step + j}, [%r242+{offset}];")
    body.append("wgmma.fence.sync.aligned;")
    for step in range(form.steps):
        body += descriptor(form, _A + step * advance(form, form.a_mn), form.a_mn)
        body.append("mov.b64 %d30, %d20;")
        body += descriptor(form, _B + step * advance(form, form.b_mn), form.b_mn)
        left = f"{{{', '.join(f'%r{230 + 4 * step + j}' for j in range(4))}}}" if form.a_registers else "%d30"
        scales = f", {form.scale_a}, {form.scale_b}" if form.accumulator != "s32" else ""
        if form.type in ("f16", "bf16"):
            scales += f", {int(form.b_mn)}" if form.a_registers else f", {int(form.a_mn)}, {int(form.b_mn)}"
        saturate = ".satfinite" if form.satfinite else ""
        body.append(
            f"wgmma.mma_async.sync.aligned.m64n{form.n}k{k}{saturate}.{form.accumulator}.{form.type}.{form.right} "
            f"{{{', '.join(names)}}}, {left}, %d20, %q1{scales};"
        )
    body += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    body += [f"st.global.b32 [%d1+{4 * i}], {name};" for i, name in enumerate(names)]

    def expected(_: list[np.ndarray]) -> dict[int, np.ndarray]:
        left, right = operands(form, a, b)
        product = left @ right.T * form.scale_a * form.scale_b
        # without D the first step alone starts from nothing, and so does every other
        if not form.accumulate:
            assert form.steps == 1
        total = product + (start if form.accumulate else 0)
        return {0: np.ascontiguousarray(fragments(total.astype(number))).view(np.uint8).reshape(-1)}

    return Case(
        f"wgmma {form.name}",
        text.module("\n  ".join(body), 3, declarations=declarations),
        [np.ascontiguousarray(fragments(start)).view(np.uint8).reshape(-1).copy(), a, b],
        [Pointer(0), Pointer(1), Pointer(2)],
        smem=_SIZE,
        compare="approximate" if form.real else "exact",
        expected=None if form.real else expected,
        notes={"results": [form.accumulator], "form": dict(form.__dict__)},
    )
