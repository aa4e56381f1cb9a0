"""One instruction on arrays: a kernel that loads operands, applies some PTX to them and stores the results."""

from __future__ import annotations

import numpy as np

from . import text
from .case import Case, Pointer

#: type -> (bytes in memory, width of its register)
SIZES = {"f16": (2, 16), "bf16": (2, 16), "e4m3x2": (2, 16), "e5m2x2": (2, 16), "pred": (4, 32)}
SIZES |= dict.fromkeys(("f16x2", "bf16x2", "b32", "u32", "s32", "f32", "tf32"), (4, 32))
SIZES |= dict.fromkeys(("b64", "u64", "s64", "f64"), (8, 64)) | dict.fromkeys(("b16", "u16", "s16"), (2, 16))
SIZES |= dict.fromkeys(("u8", "s8"), (1, 16))


def values(kind: str, count: int, seed: int) -> np.ndarray:
    """Bytes of ``count`` operands: special ones, neighbours of one, and every bit pattern alike."""
    rng = np.random.default_rng(seed)
    size = SIZES[kind][0]
    if kind in ("f16x2", "bf16x2"):
        half = kind.removesuffix("x2")
        both = np.stack([values(half, count, s).view(np.uint16) for s in (seed, seed + 1000)], 1)
        return rng.permutation(both).view(np.uint8).reshape(-1)
    bits = rng.integers(0, np.iinfo(np.uint64).max, count, dtype=np.uint64) >> np.uint64(64 - 8 * size)
    layout = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "tf32": (8, 23), "f64": (11, 52)}.get(kind)
    if layout:
        exponent, mantissa = layout
        one, infinity = ((1 << exponent - 1) - 1) << mantissa, ((1 << exponent) - 1) << mantissa
        special = [0, 1, 2, 1 << mantissa, (1 << mantissa) - 1, infinity, infinity - 1, infinity | 1 << mantissa - 1]
        special += [infinity | 1, one, one + 1, one - 1, one + (1 << mantissa), one | 1 << mantissa - 1]
        special += [s | 1 << exponent + mantissa for s in special]
        # a good half is near one, where sums cancel and products round
        near = (one + rng.integers(-6, 7, count) * (1 << mantissa)).astype(np.uint64)
        near |= rng.integers(0, 1 << mantissa, count, dtype=np.uint64)
        near |= rng.integers(0, 2, count, dtype=np.uint64) << np.uint64(exponent + mantissa)
        bits = np.where(rng.integers(0, 4, count) < 3, near, bits)
        places = rng.permutation(count)[: 3 * len(special)]
        bits[places] = np.resize(np.array(special, np.uint64), len(places))
    else:
        bits[: count // 4] >>= rng.integers(0, 8 * size, count // 4, dtype=np.uint64)
    return bits.astype(f"u{size}").view(np.uint8).copy()


def case(
    name: str, code: str, inputs: list[str], outputs: list[str], count: int = 256, compare: str = "exact", **options
) -> Case:
    """``code`` reads %a, %b, %c and writes %x, %y; a predicate result is written to a 32-bit register."""
    text.restart_labels()
    body = [text.global_index()]
    declarations = []
    buffers = [np.zeros(count * SIZES[k][0], np.uint8) for k in outputs]
    given = options.get("given") or [values(k, count, i + 1) for i, k in enumerate(inputs)]
    for i, (kind, register) in enumerate(zip(inputs, "abc")):
        size, width = SIZES[kind]
        declarations.append(f".reg .b{width} %{register};")
        body.append(text.address(size, f"%p{len(outputs) + i}", f"%d{i}", "%r299"))
        body.append(f"ld.global.{'b' if size > 1 else 'u'}{8 * size} %{register}, [%d{i}];")
    declarations += [f".reg .b{SIZES[k][1]} %{r};" for k, r in zip(outputs, "xyz")]
    body.append(code)
    for i, (kind, register) in enumerate(zip(outputs, "xyz")):
        size, _ = SIZES[kind]
        body.append(text.address(size, f"%p{i}", f"%d{i + 8}", "%r299"))
        body.append(f"st.global.{'b' if size > 1 else 'u'}{8 * size} [%d{i + 8}], %{register};")
    buffers += given
    return Case(
        name,
        text.module("\n  ".join([*declarations, *body]), len(buffers)),
        buffers,
        [Pointer(i) for i in range(len(buffers))],
        grid=count // 128,
        compare=compare,
        notes={"results": outputs},
    )
